"""`ssmgen tune` and `ssmgen tuned`."""

from __future__ import annotations

import itertools
import json
import re
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..bench import benchmarks
from ..errors import SsmgenError
from ..select import tuned as table
from ..select.catalog import parse
from ..spec.kernel import flat, text_of
from ..work_sharing import LEASE, LEASE_HELP, Crew, seat
from .losses import loss, ruled

if TYPE_CHECKING:
    from .search import Bench, Outcome

TUNED = tuple(benchmarks())
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType):
    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value)
        if not match:
            self.fail(f"{value!r} is not a time; expected one such as 60s, 10m or 1h", param, ctx)
        return float(match[1]) * UNITS[match[2]]


@click.command()
@click.argument("op", type=click.Choice([*TUNED, "all"]))
@click.option("--model", "models", multiple=True, help="A model of `ssmgen models`; may repeat. Default: all that use the operator.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help="Batch size; may repeat. Default: 1, 8, 64, 256.")
@click.option("--tokens", type=click.IntRange(1), multiple=True, help="Tokens per sequence; may repeat. Default: 1.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Number of tensor-parallel ranks that share a --model.")
@click.option("--budget", type=Duration(), default="60s", show_default=True, help="Stop after this time, between two cases.")
@click.option("--again", is_flag=True, help="Measure known cases again.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write this table. Default: your table of this GPU.")
@click.option("--lease", type=click.FloatRange(1), default=LEASE, show_default=True, help=LEASE_HELP)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def tune(
    op: str, models: tuple[str, ...], batches: tuple[int, ...], tokens: tuple[int, ...], tp: int, budget: float, again: bool,
    out: Path | None, lease: float, as_json: bool,
) -> None:  # fmt: skip
    """Measure the fastest variants on this GPU, for later calls.

    Every legal variant of a call is considered; those that may win are compiled, checked bit for bit against the one that the rules would
    serve, and timed in turn with it. The table grows with each case: stop it whenever you like, and go on with the same command.
    Processes that torchrun started, one for each card, share the cases.
    """
    from .cases import cases, used
    from .search import Bench
    from .search import tune as run
    from .sharing import take_card

    if here := seat():
        take_card(here)
    bench = Bench.here()
    path = out or table.overlay_path(bench.gpu)
    if path is None:
        raise SsmgenError("there is no cache directory to keep a table in. Pass --out, or set SSMGEN_CACHE_DIR.")
    start, hidden = time.monotonic(), here is not None or not sys.stderr.isatty()
    bar = click.progressbar(length=int(budget), label="tuning", file=sys.stderr, hidden=hidden)

    def done(outcome: Outcome) -> None:
        bar.update(max(0, min(int(time.monotonic() - start), int(budget)) - bar.pos))
        who = f"rank {here.rank}: " if here else "" if bar.hidden else chr(13)
        click.echo(f"{who}{describe(outcome)}", err=True)

    names = [name for name in TUNED if used(name, models)] if op == "all" else (op,)

    def work() -> Iterable[Any]:
        return itertools.chain.from_iterable(cases(name, models, batches, tokens, tp) for name in names)

    if here:
        task = (
            f"ssmgen {__version__} tune {op}, models {models}, batches {batches}, tokens {tokens}, tp {tp}, budget {budget}, again {again}"
        )
        code = _tuned_by_crew(Crew(here, f"{task}, {bench.gpu}, NVRTC {bench.compiler}", lease, f"{bench.gpu} of {socket.gethostname()}"),
                              bench, path, as_json, work=work, budget=budget, again=again, done=done)  # fmt: skip
    else:
        with bar:
            outcomes = run(bench, work(), path, budget, again, done)
        seconds = time.monotonic() - start
        click.echo(f"{len(outcomes)} cases in {seconds:.1f} s, {len(outcomes) / seconds:.2f} a second", err=True)
        code = _told(outcomes, bench, path, as_json)
    if code:
        sys.exit(code)


def _tuned_by_crew(crew: Crew, bench: Bench, path: Path, as_json: bool, **share: Any) -> int:
    """Does this process's share. The publishing process also prints the command's output. Returns the exit code of all processes."""
    from .sharing import hold_card, tune_share, tuned_by_all

    with crew:
        hold_card(crew)
        start = time.perf_counter()
        tune_share(crew, bench, path=path, **share)

        def publish(told: dict[int, dict[str, Any]]) -> int:
            seconds = time.perf_counter() - start
            outcomes = tuned_by_all(told, bench, path)
            click.echo(crew.account(told, seconds, "cases"), err=True)
            return _told(outcomes, bench, path, as_json)

        return crew.finish(publish)


def _told(outcomes: list[Outcome], bench: Bench, path: Path, as_json: bool) -> int:
    """Prints the outcomes of cases; returns the exit code."""
    rows = [o.row for o in outcomes if o.row is not None]
    failed = [o for o in outcomes if o.row is None]
    if as_json:
        failures = [{"label": o.label, "why": o.why} for o in failed]
        click.echo(json.dumps({"gpu": bench.gpu, "table": str(path), "rows": [asdict(row) for row in rows], "failed": failures}, indent=1))
    else:
        click.echo(f"{len(rows)} cases in {path}" + (f"; {gain(rows)}" if rows else ""))
    if failed:
        click.echo("".join(f"{o.label}: {o.why}\n" for o in failed), err=True, nl=False)
    return 1 if failed else 0


def describe(outcome: Any) -> str:
    row = outcome.row
    if row is None:
        return f"{outcome.label}: FAILED: {outcome.why.splitlines()[0]}"
    known = " (known)" if outcome.why else ""
    return f"{outcome.label}: {row.us:.2f} us, rules {row.rule_us:.2f}, {row.rule_us / row.us:.3f} x{known}"


def gain(rows: list[table.Row]) -> str:
    """The speedup of a table's rows over the rules, in words."""
    ratios = [row.rule_us / row.us for row in rows]
    better = sum(r > 1 for r in ratios)
    return (
        f"{better} of {len(rows)} better than the rules, {statistics.geometric_mean(ratios):.3f} x in the mean, {max(ratios):.3f} x at most"
    )


@click.command()
@click.option("--gpu", help="Name of the GPU in torch. Default: all GPUs with a table.")
@click.option(
    "--lost",
    type=click.FloatRange(0),
    help="List only rows on which today's rules lose more than this many percent; exits with 1 if there are any.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def tuned(gpu: str | None, lost: float | None, as_json: bool) -> None:
    """List the tuned variants and the loss of the rules.

    Also says which rows are stale.

    With --lost, a row whose variant the rules choose by now counts as one on which they lose nothing, and stale rows are left out.
    """
    found = [(name, row, table.staleness(row)) for name in ([gpu] if gpu else table.gpus()) for row in table.rows_of(name).values()]
    losses = {row: loss(row) for _, row, stale in found if not stale}
    kept = found if lost is None else [(name, row, stale) for name, row, stale in found if losses.get(row, 0.0) > lost / 100]
    if as_json:
        click.echo(
            json.dumps([{"gpu": name, "stale": s or None, "lost": losses.get(row)} | asdict(row) for name, row, s in kept], indent=1)
        )
    else:
        for name, row, stale in kept:
            what = f"STALE: {stale}" if stale else parse(row.spec).name if lost is None else _otherwise(row)
            click.echo(f"{name}  {row.label:60} {row.us:9.2f} us {100 * losses.get(row, row.rule_us / row.us - 1):5.1f} %  {what}")
    for name in dict.fromkeys(name for name, _, _ in found):
        own = [row for owner, row, _ in found if owner == name]
        click.echo(f"{name}: {len(own)} rows, {sum(row not in losses for row in own)} stale{_lost(own, losses)}", err=True)
    if lost is not None and kept:
        sys.exit(1)


def _lost(rows: list[table.Row], losses: dict[table.Row, float]) -> str:
    """The loss of the rules to the valid rows, in words."""
    known = [row for row in rows if row in losses]
    if not known:
        return ""
    worst = max(known, key=losses.__getitem__)
    mean = statistics.mean(losses[row] for row in known)
    return f"; the rules lose {100 * mean:.2f} % in the mean, {100 * losses[worst]:.1f} % at most ({worst.label})"


def _otherwise(row: table.Row) -> str:
    """The fields in which a row's variant differs from the rules' choice."""
    chosen = {name: text_of(value) for name, value in flat(ruled(row)).items()}
    mine = {name: text_of(value) for name, value in flat(parse(row.spec)).items()}
    return ", ".join(f"{name}={v} (rules {chosen.get(name, '-')})" for name, v in mine.items() if v != chosen.get(name))
