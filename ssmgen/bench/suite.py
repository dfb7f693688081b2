"""`ssmgen bench all`: every operator's benchmark in turn, in full, quickly, or for the operators of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..select.models import find_model
from . import bench_of, benchmarks
from . import report as reports
from .progress import PRINTING, Watch
from .rows import Failure, Row, failures_of, rows_of

QUICK_ROUNDS = 3


@dataclass
class Suite:
    """The results of several benchmarks, as a run returns them and a file holds them."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)  # operators that made no report: {"op", "error"}

    def as_dict(self) -> dict[str, Any]:
        return {"reports": self.reports, "failed": self.failed}


def tasks(quick: bool = False, model: str | None = None, tp: int = 1) -> dict[str, dict[str, Any]]:
    """operator -> options of its `run`. Raises ModelError for a model that is not known or cannot be divided."""
    options = {op: dict(bench_of(op).quick) if quick else {} for op in benchmarks()}
    if model is None:
        return options
    divided = find_model(model).divided(tp)
    named = {op: bench_of(op).of_model(divided, tp, quick) for op in options}
    return {op: {**options[op], **own} for op, own in named.items() if own is not None}


def run(work: Mapping[str, Mapping[str, Any]], rounds: int = 7, peers: bool = True, watch: Watch = PRINTING) -> Suite:
    """Runs what `tasks` gives. An operator whose benchmark raises is one of the failed, with the reason, and the next goes on; an
    interruption by the keyboard ends all of it, and keeps the reports that are there.

    Raises SsmgenError without a GPU.
    """
    reports.need_device()
    suite, ops = Suite(), list(work)
    for i, op in enumerate(ops):
        try:
            suite.reports.append(bench_of(op).run(**work[op], rounds=rounds, peers=peers, watch=watch))
        except reports.Interrupted as e:
            suite.reports.append(e.report)
            suite.failed += [{"op": left, "error": "interrupted"} for left in ops[i + 1 :]]
            break
        except KeyboardInterrupt:
            suite.failed += [{"op": left, "error": "interrupted"} for left in ops[i:]]
            break
        except Exception as e:  # whatever it is, a lost device included: the others' results are worth having
            suite.failed.append({"op": op, "error": f"{type(e).__name__}: {e}"})
            watch.say(f"{op}: FAILED: {suite.failed[-1]['error']}")
        torch.cuda.empty_cache()
    return suite


def stitched(suites: Sequence[Suite]) -> Suite:
    """Several in one."""
    return Suite([r for s in suites for r in s.reports], [f for s in suites for f in s.failed])


def rows_and_failures(suite: Suite) -> tuple[list[Row], list[Failure]]:
    failures = [failure for report in suite.reports for failure in failures_of(report)]
    failures += [Failure(entry["op"], "", "", "", entry["error"]) for entry in suite.failed]
    return [row for report in suite.reports for row in rows_of(report)], failures
