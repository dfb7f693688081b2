"""Commands that compile kernels before their use, build and generate, and that describe models and machines: models, env."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from .. import __version__
from .. import work_sharing as crew
from ..cache.files import FileError
from ..cache.store import Cache, shared_cache
from ..cache.trust import distrust
from ..errors import ModelError
from ..select import tuned as table
from ..select.models import Client
from ..spec.kernel import Arch, KernelSpec
from ..variants.build import Built
from ..work_sharing import LEASE, LEASE_HELP, Crew, Seat
from . import reporting
from .options import (
    BUILT,
    EXIT_INTERRUPTED,
    Folder,
    device_arch_option,
    json_option,
    pdl_choices,
    problems_of,
    refuse_others,
    with_model,
)  # fmt: skip


@click.command()
@with_model
@click.option("--all", "everything", is_flag=True, help="Build every model of `ssmgen models`, without tensor parallelism.")
@click.option("--op", type=click.Choice(BUILT), help="Build only this operator's variants. Default: all that the model uses.")
@click.option("--spec", "specs", multiple=True, help="Build this variant, given by its text or name; may repeat.")
@device_arch_option
@click.option(
    "--caller",
    type=click.Choice([c.value for c in Client]),
    help="Build only the kernels that this library calls. Default: those of all three.",
)
@click.option(
    "--max-batch", type=click.IntRange(1), default=1024, show_default=True, help="Build the kernels of all batches up to this size."
)
@click.option("--max-spill", type=click.IntRange(0), default=0, show_default=True, help="Bytes of spilled registers to accept per variant.")
@click.option("--jobs", type=click.IntRange(1), help="Parallel compilations. Default: one per processor.")
@click.option("--out", type=Folder(), help="Write a cache layer here instead of to the user's cache.")
@click.option("--dry-run", is_flag=True, help="Print what would be built; compile nothing.")
@click.option("--lease", type=click.FloatRange(1), default=LEASE, show_default=True, help=LEASE_HELP)
@json_option
def build(
    model: str | None, pdl: str, no_pdl: bool, everything: bool, op: str | None, specs: tuple[str, ...], archs: list[Arch],
    caller: str | None, max_batch: int, max_spill: int, jobs: int | None, out: Path | None, dry_run: bool, lease: float, as_json: bool,
    **call: Any,
) -> None:  # fmt: skip
    """Compile a model's kernels before their use, without a GPU.

    Ship the directory that --out writes, and name it in SSMGEN_CACHE_PATH. Processes started by torchrun share the work.
    """
    from ..select.model_variants import specs_for
    from ..select.models import models
    from ..variants.build import build as run
    from ..variants.inspect import resolve

    if sum(map(bool, (model, everything, specs))) != 1:
        raise click.UsageError("expected exactly one of --model, --all and --spec")
    if (op or caller) and specs:
        raise click.UsageError(f"--{'op' if op else 'caller'} is given without --model or --all; expected one of them")
    if model:
        refuse_others(model, call)
    cache = Cache(prepared(out)) if out and not dry_run else shared_cache() if not out else Cache(out)
    cache.compiler_build()  # without NVRTC one error, not one for each variant
    callers: tuple[Client | None, ...] = (Client(caller),) if caller else (None, *Client)
    work: dict[tuple[KernelSpec, Arch], str] = {}
    finished: list[Built] = []
    here = crew.seat()
    try:
        work |= dict.fromkeys(((resolve(text, cache), arch) for text in specs for arch in archs), "")
        for name in list(models()) if everything else [model] if model else []:
            for operator, problems in reporting.by_operator(problems_of(name, op, callers=callers, **call)).items():
                for arch in archs:
                    for spec in specs_for(problems, arch, pdl_choices(pdl, no_pdl), max_batch, (None, *table.gpus(arch))):
                        work.setdefault((spec, arch), operator)
        if not work:
            raise ModelError(
                f"--op is {op}, which {caller or model} does not use" if op else f"{caller} makes no call for {model}. Leave out --caller."
            )

        found = {pair: cache.has(*pair) for pair in work}
        words = reporting.describe(work, found, callers if model or everything else ())
        if dry_run:
            return reporting.foretold(work, found, words, as_json)
        if not out and not all(found.values()):
            refuse_unwritable(cache)
        if here:
            code = _built_by_crew(here, work, cache, jobs, max_spill, lease, as_json)
        else:
            if not as_json:
                click.echo(words, err=True)
            start = time.perf_counter()
            with reporting.progress(len(work), as_json) as another:

                def done(built: Built) -> None:
                    finished.append(built)
                    another()

                results = run(list(work), cache, jobs, max_spill, done, keep=True)
            code = reporting.told(results, work, time.perf_counter() - start, as_json)
    except KeyboardInterrupt:
        _interrupted(None if here else sum(built.error is None for built in finished), len(work), cache)
    if code:
        sys.exit(code)


def _built_by_crew(seat: Seat, asked: reporting.Work, cache: Cache, jobs: int | None, max_spill: int, lease: float, as_json: bool) -> int:
    """Builds this process's share. The publishing process also prints the command's output. Returns the exit code of all processes."""
    from ..variants.build import build_share, built_by_all

    work = list(asked)
    names = "\n".join(f"{spec} {arch}" for spec, arch in work)
    digest = hashlib.sha256(names.encode()).hexdigest()[:16]
    task = f"ssmgen {__version__} build of {len(work)} variants, digest {digest}, max spill {max_spill}, NVRTC {cache.compiler_build()}"
    jobs = jobs or max(1, (os.cpu_count() or 1) // seat.local_world)
    with Crew(seat, task, lease) as ours:
        start = time.perf_counter()
        build_share(ours, work, cache, jobs, max_spill)

        def publish(told: dict[int, dict[str, Any]]) -> int:
            seconds = time.perf_counter() - start
            results = built_by_all(told, work, cache=cache, jobs=jobs, max_spill=max_spill, keep=True)
            click.echo(ours.account(told, seconds, "variants"), err=True)
            return reporting.told(results, asked, time.perf_counter() - start, as_json)

        return ours.finish(publish)


def refuse_unwritable(cache: Cache) -> None:
    """Raises FileError if the user's cache takes no kernels: before minutes of compiling."""
    if cache.writable is None:
        reason = cache.unusable or "there is none"
    else:
        try:
            prepared(cache.writable.root)
            return
        except FileError as e:
            reason = str(e)
    raise FileError(f"the cache cannot be written: {reason}. Nothing was compiled. Set SSMGEN_CACHE_DIR, or pass --out.")


def prepared(out: Path) -> Path:
    """The directory, made if it was not there. Raises FileError if nothing can be kept in it: before minutes of compiling."""
    try:
        directory = out.resolve()
        for level in reversed((directory, *directory.parents)):
            if not level.exists():
                level.mkdir(mode=0o700, exist_ok=True)
        if reason := distrust(directory):
            raise FileError(f"kernels cannot be kept: {reason}")
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError) as e:  # RuntimeError: links that go round
        raise FileError(f"kernels cannot be kept in {out}: {getattr(e, 'strerror', None) or e}") from e


def _interrupted(kept: int | None, count: int, cache: Cache) -> NoReturn:
    """Ends the process at once: joining a running compilation may take many seconds, and its result is not needed.

    kept: the number of kept variants; None if several processes share the build.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        where = f" in {cache.writable.root}" if cache.writable else ""
        what = "what was compiled is" if kept is None else f"{kept} of {count} variants are"
        click.echo(f"\ninterrupted: {what} kept{where}. Run the same command again to continue.", err=True)
        sys.stdout.flush()
    finally:
        os._exit(EXIT_INTERRUPTED)


@click.command()
@json_option
def models(as_json: bool) -> None:
    """List the known models and the shapes of their layers.

    (unverified): the shape was not read from the model's config.
    """
    from ..select.models import models as known

    if as_json:
        told = ("function", "conv_channels", "layer_function")
        rows = [{k: getattr(v, "value", v) for k, v in asdict(m).items()} | {k: getattr(m, k) for k in told} for m in known().values()]
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(
        f"{'model':28} {'kind':16} {'heads':>5} {'headdim, V':>11} {'d_state, K':>11} {'groups, key heads':>18}  {'state':6} whole layer"
    )
    for m in known().values():
        note = "" if m.verified else "  (unverified)"
        size, elements, groups = m.shape
        click.echo(
            f"{m.name:28} {m.kind:16} {m.nheads:5} {size:11} {elements:11} {groups:18}  {m.state.value:6} {m.layer_function or '-'}{note}"
        )


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Print versions, devices and settings for a bug report."""
    from .bug_report import describe

    facts = describe()
    click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(f"{k:18} {v}" for k, v in facts.items()))


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 3 if a file would change.")
@click.option("--any-compiler", is_flag=True, help="With --check: skip resources if the lock has none of this compiler.")
@click.option("--dir", "root", type=Folder(), default="generated", show_default=True)
def generate(check: bool, any_compiler: bool, root: Path) -> None:
    """Write the default variants and ssmgen.lock to generated/.

    Run it in a checkout. The lock records resources under one NVRTC 12 and one NVRTC 13: if sources changed, run it under both.
    """
    from ..variants import generate as generated

    if any_compiler and not check:
        raise click.UsageError("--any-compiler is given without --check; expected both")
    count, note = generated.check(root, any_compiler) if check else generated.write(root)
    click.echo((f"{count} variants are up to date" if check else f"{count} variants written to {root}") + (f"; {note}" if note else ""))
