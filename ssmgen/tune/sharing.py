"""Tuning by several processes, each on a separate card: they share the cases, and write their rows to one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..select import registry
from ..select import tuned as table
from ..work_sharing import Crew, CrewError, Seat
from .cases import Case
from .search import KNOWN, Bench, Outcome, outcome_of


def take_card(seat: Seat) -> None:
    """Makes this process's card the current one: the card of its LOCAL_RANK, or the only visible one. Raises CrewError."""
    count = torch.cuda.device_count()
    if count > 1 and seat.local_rank >= count:
        raise CrewError(f"rank {seat.rank} is process {seat.local_rank + 1} on a machine with {count} cards; expected one process per card")
    if count:
        torch.cuda.set_device(seat.local_rank if count > 1 else 0)


def hold_card(crew: Crew) -> None:
    """Raises CrewError if another rank measures on this process's card: each would slow the other's measurements."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (holder := crew.holder(f"card {properties.uuid}")) is not None:
        raise CrewError(
            f"ranks {holder} and {crew.seat.rank} share one card, {properties.name} {properties.uuid}; expected a card for each process"
        )


def tune_share(
    crew: Crew,
    bench: Bench,
    work: Callable[[], Iterable[Case]],
    path: Path,
    budget: float | None = None,
    again: bool = False,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Measures this process's share of the cases, for `budget` seconds. Each row is written to the table at `path` and sent to the
    publishing process as it comes. Raises TableError, CrewError."""
    start, rows = time.monotonic(), table.read(path)
    for number, case in crew.take(work, lambda: budget is not None and time.monotonic() - start > budget):
        begun = time.perf_counter()
        outcome = outcome_of(case, bench, rows, again)
        if outcome.row is not None and outcome.why != KNOWN:
            rows[outcome.row.key] = outcome.row
            table.merge(path, bench.gpu, [outcome.row])
        crew.done(number, asdict(outcome) | {"seconds": time.perf_counter() - begun})
        done(outcome)
    registry.forget()


def tuned_by_all(told: dict[int, dict[str, Any]], bench: Bench, path: Path) -> list[Outcome]:
    """The outcomes of all cases, in order, after writing their rows to the table at `path`. told: results of the processes, by number."""
    outcomes = list(_outcomes(told))
    if rows := [outcome.row for outcome in outcomes if outcome.row is not None]:
        table.merge(path, bench.gpu, rows)
    return outcomes


def _outcomes(told: dict[int, dict[str, Any]]) -> Iterator[Outcome]:
    for number, said in told.items():
        if "lost" in said:
            yield Outcome(f"case {number + 1}", None, said["lost"])
        else:
            yield Outcome(said["label"], said["row"] and table.Row(**said["row"]), said["why"])
