"""Messages of `ssmgen build`: the purpose of each group of kernels, progress, times by operator, and the kernels that it leaves."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from ..select.catalog import OPERATOR_OF
from ..select.models import Client, asks
from ..spec.family import public_names
from ..spec.kernel import Arch, KernelSpec, Problem
from ..variants.build import Built
from .options import EXIT_FAILURE

Work = Mapping[tuple[KernelSpec, Arch], str]  # the operator that each variant is for
EVERY = 5.0  # seconds between two lines of progress without a terminal


def by_operator(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Problems by the operator that they are posed to."""
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(OPERATOR_OF[type(problem)], []).append(problem)
    return found


def describe(work: Work, found: Mapping[tuple[KernelSpec, Arch], bool], callers: Sequence[Client | None]) -> str:
    """A line for each operator with its variants, their purpose and the number found; then the kernels that are not built."""
    public = public_names()  # variants are listed by family, purposes by operator
    roles = {public[name][0].name if name in public else name: ask.role.value for name, ask in asks().items() if ask.role}
    lines = []
    for operator in dict.fromkeys(work.values()):
        pairs = [pair for pair, whose in work.items() if whose == operator]
        there = sum(found[pair] for pair in pairs)
        purpose = f": {roles[operator]}" if operator in roles else ""
        lines.append(f"{len(pairs):5} {operator or 'named by --spec'}{purpose}" + f" ({there} found)" * bool(there))
    lines += [f"not built, compiled at the first request ({caller.value}): {caller.left}" for caller in callers if caller]
    return "\n".join(lines)


@contextmanager
def progress(count: int, hidden: bool) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each variant. It draws a bar in a terminal; elsewhere it prints a line every few seconds."""
    if sys.stderr.isatty() or hidden:
        with click.progressbar(length=count, label="building", file=sys.stderr, hidden=hidden) as bar:
            yield lambda: bar.update(1)
        return
    done, start = 0, time.monotonic()
    last = start

    def one() -> None:
        nonlocal done, last
        done, now = done + 1, time.monotonic()
        if done == count or now - last >= EVERY:
            last = now
            click.echo(f"building: {done} of {count} variants, {now - start:.0f} s", err=True)

    yield one


def told(results: list[Built], work: Work, seconds: float, as_json: bool) -> int:
    """Prints the outcomes; returns the exit code. work: the variants asked for."""
    failed = [b for b in results if b.error]
    if as_json:
        rows = [
            {"spec": str(b.spec), "name": b.spec.name, "arch": str(b.arch), "hit": b.hit, "error": b.error and str(b.error)}
            | ({"resources": asdict(b.entry.resources), "seconds": b.entry.seconds, "key": b.entry.key} if b.entry else {})
            for b in results
        ]
        click.echo(json.dumps({"seconds": seconds, "variants": rows}, indent=1))
        return EXIT_FAILURE if failed else 0
    for b in failed:
        click.echo(f"{type(b.error).__name__}: {b.error}\n", err=True)
    fresh: dict[str, list[float]] = {}
    for b in results:
        if b.entry and not b.hit:
            fresh.setdefault(work[b.spec, b.arch], []).append(b.entry.seconds)
    compiled, hits = sum(map(len, fresh.values())), sum(b.hit and not b.error for b in results)
    click.echo(
        f"{len(results)} variants in {seconds:.2f} s: {compiled} compiled, {hits} found, {len(failed)} failed"
        + (f", {len(work) - len(results)} not begun" if len(work) > len(results) else "")
    )
    for operator, times in fresh.items():
        click.echo(f"{len(times):5} {operator or 'by --spec'}: {sum(times) / len(times):.2f} s each, {max(times):.2f} at most")
    if built := [b.entry for b in results if b.entry]:
        click.echo(f"registers {min(e.resources.registers for e in built)} … {max(e.resources.registers for e in built)}, "
                   f"spilled bytes at most {max(e.resources.spills for e in built)}")  # fmt: skip
    return EXIT_FAILURE if failed else 0


def foretold(work: Work, found: Mapping[tuple[KernelSpec, Arch], bool], text: str, as_json: bool) -> None:
    """Prints what a build would do."""
    rows: list[dict[str, Any]] = [
        {"spec": str(spec), "name": spec.name, "arch": str(arch), "operator": operator or None, "hit": found[spec, arch]}
        for (spec, arch), operator in work.items()
    ]
    there = sum(found.values())
    words = f"{text}\n{len(work)} variants: {there} found, {len(work) - there} would be compiled. Nothing was compiled."
    click.echo(json.dumps({"variants": rows}, indent=1) if as_json else words)
