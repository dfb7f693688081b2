"""What the benchmarks of all operators share: tolerances, state pools, the slot copy, peers that may be missing, the report's head."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import __version__, api, nvrtc
from ..calls.checks import NARROW
from ..engine.narrow_reference import widened
from ..errors import SsmgenError
from ..family import records
from ..render import render
from ..spec import Arch
from . import timing
from .progress import Watch
from .rows import point_of

Outcome = TypeVar("Outcome")

MIN_SETS, MAX_SETS = 4, 512
GATE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # norm error of what is stored: its rounding
GATE |= {torch.int16: 5e-5, torch.int8: 1.2e-2, torch.float8_e4m3fn: 4e-2}  # with a scale per row of normal values

HOST_BATCH = 8  # host times are of batches up to this

Peer = Callable[[int], object]  # calls another package on the i-th input set


def need_device() -> None:
    """Raises SsmgenError without a GPU."""
    if not torch.cuda.is_available():
        raise SsmgenError("bench needs a CUDA device, and torch sees none")


def begin(method: str = "") -> dict[str, Any]:
    """What every report starts with. Raises SsmgenError without a GPU."""
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


@contextlib.contextmanager
def case(report: dict[str, Any], named: Mapping[str, Any], watch: Watch, line: Callable[[Mapping[str, Any]], str]) -> Iterator[dict]:
    """Gives a row that says which case it is, for what is measured to be added to it, and takes it into the report.

    A case that raises (a result that is wrong, a kernel that cannot be had, too little memory) is one of the report's failed ones, with the
    reason, and the next goes on. line: says what a finished row says, but for its peers.
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
        watch.ends(line(row) + "".join(f", {ratio:.3f} x {name}" for name, ratio in row["peer_ratio"].items()))


def gates(gate: Callable[[Any], Outcome], variants: Sequence[Any]) -> list[Outcome]:
    """What a case's gate says of each variant: with and without PDL, or what else it takes. Raises SsmgenError that names all that fail."""
    passed, wrong = [], []
    for variant in variants:
        try:
            passed.append(gate(variant))
        except SsmgenError as e:
            wrong.append(f"with{'' if variant else 'out'} PDL: {e}" if isinstance(variant, bool) else str(e))
    if wrong:
        raise SsmgenError("; ".join(wrong))
    return passed


def normal_pool(slots: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[slots, *shape], normally distributed, in fewer bits with a deviation of 30; filled in parts, which need less memory."""
    pool = torch.empty(slots, *shape, dtype=dtype, device=device)
    for part in pool.split(max(1, slots // 16)):
        if dtype in NARROW:
            part.copy_(torch.randn(part.shape, device=device).mul_(30).clamp_(-120, 120))
        else:
            part.normal_()
    return pool


def binary_tree(batch: int, tokens: int, device: torch.device | str) -> Tensor:
    """The parents [batch, tokens] of a draft tree in which each token has two children, as long as there are tokens."""
    return ((torch.arange(tokens, device=device, dtype=torch.int32) - 1) // 2).repeat(batch, 1)


def scales_of(pool: Tensor) -> Tensor | None:
    """Scales of the rows of a pool of fewer bits, such that its numbers are of the size of one; None of any other."""
    return torch.rand(*pool.shape[:-1], device=pool.device) / 30 if pool.dtype in NARROW else None


def numbers(pool: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
    """Copies of the states of slots, as f32 numbers if they have fewer bits."""
    return pool[slots] if scale is None else widened(pool[slots], scale[slots], torch.float32)


def slot_copies(state: Tensor, slots: Tensor, pdls: Sequence[bool]) -> dict[str, timing.Launch]:
    """Contenders that copy the slots of a set, a row of `slots` [sets, batch]: the ceiling of an update. None for slots that a copy cannot
    divide among its blocks."""
    (copies,) = (family.part(family.copies) for family in records() if family.copies)
    return copies(state, slots, pdls)


def left_out(peer: str, doing: str, error: Exception) -> None:
    warnings.warn(f"{peer} is not timed: {doing} it raised {type(error).__name__}: {error}", stacklevel=3)


@functools.cache
def imported(module: str, name: str) -> Callable[..., Any] | None:
    """A peer's function; None if its package is not installed, and with a warning if that does not import."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # whatever a broken installation raises
        if not (isinstance(e, ModuleNotFoundError) and e.name == module.partition(".")[0]):
            left_out(module, "importing", e)
        return None


def usable(peers: Mapping[str, Peer | None]) -> dict[str, Peer]:
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


def host_us(operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], peers: Mapping[str, Peer]) -> dict[str, float]:
    """{name: microseconds of the host's time for an eager call, every argument at hand}: our function, the same bound, and the peers."""
    ours = {"ssmgen": functools.partial(operator, *args, **kwargs), "ssmgen_bound": api.bind(operator, *args, **kwargs)}
    calls = ours | {name: functools.partial(peer, 0) for name, peer in peers.items()}
    return {name: timing.host_us(call) for name, call in calls.items()}


def bound(case: Any, pdl: bool) -> timing.Launch:
    """The kernel that serves each set of a case (`function`, `arguments`, `sets`), with the host's part of every call done beforehand."""
    calls = [api.bind(case.function, **case.arguments(i), pdl=pdl) for i in range(case.sets)]
    return lambda i: calls[i]()


def served(operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], arch: Arch) -> dict[str, Any]:
    """The variant that serves a call, by which rule, and what compiling it takes."""
    chosen = api.explain(operator, *args, arch=str(arch), **kwargs).chosen
    compiled = nvrtc.compile_cubin(render(chosen.spec, arch), arch, str(chosen.spec))
    return {"spec": str(chosen.spec), "rule": chosen.rule, "compile_seconds": compiled.seconds}


def head(report: Mapping[str, Any]) -> list[str]:
    """The first lines of a table."""
    date = f", {report['date']}" if "date" in report else ""
    return [
        f"{report['device']}, torch {report['torch']}, NVRTC {report['compiler']}{date}",
        "ceilings, TB/s: " + ", ".join(f"{name} {tbs:.2f}" for name, tbs in report["ceilings_tbs"].items()),
    ]


LAST = f"{'MHz':>6}  rule"  # columns of all tables


def last(row: Mapping[str, Any]) -> str:
    """The cells of LAST."""
    return cell(row.get("sm_mhz"), 6, 0) + f"  {row['rule']}"


def cell(value: float | None, width: int, digits: int = 2) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"
