"""Parts of a report: its head, its rows and failures, the slot copy, peers that may be missing, host times."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..calls import api
from ..compile import nvrtc
from ..errors import SsmgenError
from ..spec.family import records
from . import timing
from .progress import Watch
from .rows import point_of


def need_device() -> None:
    """Raises SsmgenError without a GPU."""
    if not torch.cuda.is_available():
        raise SsmgenError("torch finds no CUDA device; bench needs one")


def begin(method: str = "") -> dict[str, Any]:
    """The head of every report. Raises SsmgenError without a GPU."""
    need_device()
    torch.manual_seed(0)
    return {
        "ssmgen": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "compiler": nvrtc.build_id(),
        "ceilings_tbs": timing.ceilings_tbs(),
        "sm_mhz": timing.sm_mhz(),
        "method": " ".join(f"{timing.__doc__} {method}".split()),
        "rows": [],
        "failed": [],
    }


NOT_REACHED = "not reached: the run was interrupted"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a benchmark. report: its results so far; `failed` has the cases that were not reached."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(f"{len(report['rows'])} cases were timed, {len(report['failed'])} were not")
        self.report = report


@contextlib.contextmanager
def case(report: dict[str, Any], named: Mapping[str, Any], watch: Watch) -> Iterator[dict[str, Any]]:
    """Yields a row with the case's fields, to which measurements are added, and adds it to the report.

    A case that raises (a result that is wrong, a kernel that cannot be had, too little memory) is one of the report's failed ones, with the
    reason, and the next goes on.
    """
    words, row = point_of(report, named).words, dict(named)
    watch.case(words)
    try:
        yield row
    except (SsmgenError, torch.OutOfMemoryError) as e:
        report["failed"].append({**named, "error": str(e)})
        watch.ends(f"{words}: FAILED: {e}")
    else:
        report["rows"].append(row)
        ratios = {kind: row.get(f"{kind}_ratio") for kind in ("mul", "copy")} | row["peer_ratio"]
        said = [f"{ratio:.3f} x {name}" for name, ratio in ratios.items() if ratio is not None]
        watch.ends(", ".join([f"{words}: {row['served_us']:.2f} us", f"{row['tbs']:.2f} TB/s", *said]))


def slot_copies(state: Tensor, slots: Tensor, pdls: Sequence[bool]) -> dict[str, timing.Launch]:
    """Contenders that copy the slots of a set, a row of `slots` [sets, batch]: the ceiling of an update. None for slots that a copy cannot
    divide among its blocks."""
    (copies,) = (family.part(family.copies) for family in records() if family.copies)
    made: dict[str, timing.Launch] = copies(state, slots, pdls)
    return made


def left_out(peer: str, doing: str, error: Exception) -> None:
    warnings.warn(f"{peer} is not timed: {doing} it raised {type(error).__name__}: {error}", stacklevel=3)


@functools.cache
def imported(module: str, name: str) -> Callable[..., Any] | None:
    """A peer's function; None if its package is not installed, and with a warning if that does not import."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as e:  # whatever a broken installation raises
        if not (isinstance(e, ModuleNotFoundError) and e.name == module.partition(".")[0]):
            left_out(module, "importing", e)
        return None
    return found


def usable(peers: Mapping[str, timing.Launch | None]) -> dict[str, timing.Launch]:
    """The peers that run, called alone and in a graph; others are left out with a warning. First calls compile and tune: not timed."""
    found = {}
    for name, call in peers.items():
        if call is None:
            continue
        try:
            call(0)
            torch.cuda.synchronize()
            timing.capture(call, 1, least=1)
            found[name] = call
        except Exception as e:  # whatever it does not support
            left_out(name, "running", e)
            _forget_error()
    return found


def _forget_error() -> None:
    """A launch that was refused leaves its error for whoever asks next: here, instead of in the first capture."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def host_us(function: Callable[..., Any], call: Mapping[str, Any], peers: Mapping[str, timing.Launch]) -> dict[str, float]:
    """{name: microseconds of the host's time for an eager call, every argument at hand}: our function, the same bound, and the peers."""
    ours: dict[str, Callable[[], object]] = {"ssmgen": functools.partial(function, **call), "ssmgen_bound": api.bind(function, **call)}
    calls = ours | {name: functools.partial(peer, 0) for name, peer in peers.items()}
    return {name: timing.host_us(call) for name, call in calls.items()}


def head(report: Mapping[str, Any]) -> list[str]:
    """The first lines of a table."""
    date = f", {report['date']}" if "date" in report else ""
    return [
        f"{report['device']}, torch {report['torch']}, NVRTC {report['compiler']}{date}",
        "ceilings, TB/s: " + ", ".join(f"{name} {tbs:.2f}" for name, tbs in report["ceilings_tbs"].items()),
    ]
