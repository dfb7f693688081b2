"""Calls of mamba3_chunk_scan: their float64 results, their runs in the emulator, and cuts of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from bits import all_same, same
from emulated_calls import emulate
from torch import Tensor

import ssmgen
from ssmgen.families.mamba3_chunk_scan import planning
from ssmgen.families.mamba3_chunk_scan.problem import Mamba3PromptProblem
from ssmgen.families.mamba3_chunk_scan.spec import Mamba3ScanSpec

NAN = float("nan")
INITIAL = ("initial_states", "initial_k", "initial_v", "initial_angles")
PER_TOKEN = ("x", "z", "B", "C", "dt", "A", "trap", "angle")
SISO = ("mimo_x", "mimo_z", "mimo_o")
BF16, F32 = torch.bfloat16, torch.float32
Call = dict[str, Any]


def make(*lead: int, H: int = 2, P: int = 16, N: int = 32, G: int = 1, R: int = 1, n: int = 8, x: torch.dtype = F32, seed: int = 0) -> Call:
    """A call on dense operands, raw. SISO has no axis of ranks and no mimo_*."""
    g = torch.Generator().manual_seed(seed)

    def new(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    ranks = (R,) if R > 1 else ()
    call: Call = {"x": new(*lead, H, P, dtype=x), "z": new(*lead, H, P, dtype=x)}
    call |= {name: new(*lead, *ranks, G, N, dtype=x) for name in ("B", "C")}
    call |= {name: new(*lead, H) for name in ("dt", "A", "trap")} | {"angle": new(*lead, n), "D": new(H), "dt_bias": new(H) - 1}
    call |= {name: 1 + new(N) / 4 for name in ("B_norm", "C_norm")} | {name: new(H, R, N) for name in ("B_bias", "C_bias")}
    call |= {name: (1 + new(H, R, P) / 2) / R for name in SISO} if R > 1 else {}
    return call | {"A_form": "heavy", "rotary": "halves" if R > 1 else "pairs"}


def states(call: Call, count: int, seed: int = 1, S: torch.dtype = F32, k: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random states for a call, in the order of the pools."""
    g = torch.Generator().manual_seed(seed)
    (H, P), N, n = call["x"].shape[-2:], call["B"].shape[-1], call["angle"].shape[-1]
    ranks = (call["mimo_x"].shape[1],) if "mimo_x" in call else ()
    shapes = ((H, P, N), (*ranks, H, N), (H, P), (H, n))
    return tuple(torch.randn(count, *shape, generator=g).to(d) for shape, d in zip(shapes, (S, k, k, F32), strict=True))  # type: ignore[return-value]


def cut(call: Call, *at: Any) -> Call:
    """The call with this index into its operands of tokens."""
    return {name: t[at] if name in PER_TOKEN and t is not None else t for name, t in call.items()}


def exact(call: Call, wide: Mapping[str, Tensor] = {}, **more: Any) -> dict[str, Tensor]:
    """The results of the call in float64, token by token. wide: initial states in float64, instead of the call's."""
    built = ssmgen.mamba3_chunk_scan.build(**call, **more)
    views = planning.CALLER.checked(built.operands, built.options, None)
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in views.items()}
    doubled |= {name: t.reshape(doubled[name].shape) for name, t in wide.items()}
    planning.CALLER.reference(doubled, built.options, torch.float64)
    found = {name: doubled[name] for name in planning.FAMILY.written if name in doubled}
    return found | {"out": found["out"].reshape(built.operands["out"].shape)}


def variant(kind: type[Mamba3ScanSpec] = Mamba3ScanSpec, **how: Any) -> Any:
    """A function that makes a problem's variant."""

    def of(problem: Mamba3PromptProblem) -> Mamba3ScanSpec:
        return kind(**{f.name: getattr(problem, f.name) for f in fields(Mamba3PromptProblem)}, **how)

    return of


def emulated(*, spec: Any = None, change: Any = str, **call: Any) -> Any:
    """The call's result from a kernel in the emulator."""
    return emulate(ssmgen.mamba3_chunk_scan.build(**call), spec, change=change)


def starts_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def packing_changes_no_bit(call: Call, lengths: Sequence[int], **how: Any) -> None:
    """Packed sequences have the bits, in outputs and final states, of each by itself. how: further arguments of `emulated`."""
    starts = starts_of(*lengths)
    packed, *last = emulated(**call, cu_seqlens=starts, return_final_states=True, **how)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i + 1]))
        if length:
            out, *own = emulated(**cut(cut(call, span), None), return_final_states=True, **how)
            assert same(out[0], packed[span]) and all_same((t[0] for t in own), (t[i] for t in last)), length
        else:
            assert not any(t[i].any() for t in last)
