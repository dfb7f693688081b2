"""selective_scan: operands, poisoned and guarded; and the laws of its results, on a card or in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from emulated_calls import emulate
from scan_cases import F32, NAN, SM90, error, launched, same, starts_of
from sequence_laws import (  # noqa: F401
    Sequences,
    a_cut_changes_no_bit,
    a_pool_is_touched_where_it_should_be,
    boundaries_that_make_no_sense_are_sequences_without_tokens,
    decoding_goes_on,
    neighbours_do_not_matter,
    packing_changes_no_bit,
    sequences_without_tokens_keep_states,
    states_of_a_pool_may_begin_elsewhere,
)
from ssu_cases import BF16, F16
from torch import Tensor

import ssmgen
from ssmgen.families.selective_scan import planning as op
from ssmgen.families.selective_scan.problem import OPERATOR, SelectiveProblem
from ssmgen.families.selective_scan.spec import SelectiveSpec
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, changed

__all__ = ["BF16", "F16", "F32", "NAN", "SM90", "error", "launched", "same", "starts_of"]
LENGTHS = (0, 1, 2, 63, 64, 65, 513)
BOUNDS = {BF16: 4e-3, F16: 6e-4, F32: 1e-5}  # relative L2 error by dtype; dense final states are f32

Scan = Callable[..., Any]  # as ssmgen.selective_scan


PER_TOKEN = ("u", "delta", "z", "B", "C")
OF_STEPS = {"u": "x", "delta": "dt", "delta_bias": "dt_bias", "delta_softplus": "dt_softplus"}  # what the decode step calls them


@dataclass(frozen=True)
class Sizes(Sequences):
    """The sizes of a call: small for the emulator, a model's on a card."""

    dim: int = 24
    groups: int = 1
    d_state: int = 16
    x: torch.dtype = BF16
    device: str = "cpu"

    per_token: ClassVar = PER_TOKEN
    rows: ClassVar = "u"
    room: ClassVar = (33, 7, 0, 16, 30)

    @property
    def state(self) -> tuple[int, ...]:
        return self.dim, self.d_state

    def made(self, *lead: int, slow: bool = False) -> dict[str, Any]:
        return make(self, *lead)

    def exact(self, call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
        return exact(call, **more)

    def step(self, state: Tensor, call: dict[str, Any]) -> Tensor:
        return ssmgen.selective_state_update(state, **{OF_STEPS.get(n, n): t for n, t in call.items()})

    def bound(self) -> float:
        return BOUNDS[self.x]

    def state_bound(self, dtype: torch.dtype) -> float:
        return BOUNDS[dtype]


def variant(**how: Any) -> Callable[[SelectiveProblem], SelectiveSpec]:
    """A function that makes a problem's variant with small blocks, which runs fast in the emulator."""

    def of(problem: SelectiveProblem) -> SelectiveSpec:
        chosen: Any = registry.select(OPERATOR, problem, 10_000, SM90, True)  # channels: more than the roles kernel takes
        spec = changed(chosen, **{"lanes": min(4, chosen.padded // 4), "warps": 1, "tile": 16, "min_blocks": 1} | how)
        assert not (found := spec.violations(SM90)), found
        return spec

    return of


def emulated(*, spec: Any = None, arch: Arch = SM90, change: Callable[[str], str] = str, **kwargs: Any) -> Any:
    """The call's result from a kernel in the emulator: a small variant, or the one that `spec` makes for its problem."""
    return emulate(ssmgen.selective_scan.build(**kwargs), spec or variant(), arch, change)


def make(sizes: Sizes, *lead: int, seed: int = 0, step: float = 0.05, decay: float = 1.0, z: bool = True) -> dict[str, Any]:
    """A call on dense operands, channels last. A is log-uniform, `decay` times 0.1 … 16, and no powers of anything. Steps of delta after
    softplus are about `step`."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = sizes.x) -> Tensor:
        return torch.randn(*shape, generator=g).to(sizes.device, dtype)

    D, N = sizes.dim, sizes.d_state
    call: dict[str, Any] = {"u": randn(*lead, D), "delta": randn(*lead, D)}
    call["A"] = -decay * torch.exp(torch.rand(D, N, generator=g) * math.log(160) + math.log(0.1)).to(sizes.device)
    inner = (sizes.groups, N) if sizes.groups > 1 else (N,)
    call |= {n: randn(*lead, *inner) for n in ("B", "C")} | {"D": randn(D, dtype=F32)}
    call |= {"delta_bias": randn(D, dtype=F32) + math.log(math.expm1(step)), "delta_softplus": True}
    return call | ({"z": randn(*lead, D)} if z else {})


def states(sizes: Sizes, count: int, dtype: torch.dtype = F32) -> Tensor:
    return sizes.states(count, dtype)


def exact(call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
    """The tensors that the call must write, in float64, token by token."""
    built = ssmgen.selective_scan.build(**call, **more)
    views = {n: t.cpu() for n, t in op.CALLER.checked(built.operands, built.options, None).items()}
    wanted = {n: views[n].double() for n in op.FAMILY.written if n in views}
    op.CALLER.reference(views | wanted, built.options, torch.float64)
    return wanted


def tokens_of(call: Mapping[str, Any], span: slice) -> dict[str, Any]:
    """The call on some of its packed tokens, as a batch of one."""
    return {n: t[span][None] if n in PER_TOKEN else t for n, t in call.items()}


def channels_first(call: Mapping[str, Any], dense: bool) -> dict[str, Any]:
    """The same call with the token axis after the channel axis; dense: contiguous in that order."""
    turned = {n: t.movedim(1, -1) for n, t in call.items() if n in PER_TOKEN}
    return {**call, **{n: t.contiguous() if dense else t for n, t in turned.items()}, "channels_first": True}


# Laws.


def is_accurate(scan: Scan, sizes: Sizes, tokens: int, **kind: Any) -> None:
    call = make(sizes, 2, tokens, **kind) | {"initial_states": states(sizes, 2), "return_final_states": True}
    wanted = exact(call)
    out, last = scan(**call)
    assert error(out, wanted["out"]) <= BOUNDS[sizes.x], error(out, wanted["out"])
    assert error(last, wanted["final_states"]) <= BOUNDS[F32], error(last, wanted["final_states"])


def lengths_are_accurate(scan: Scan, sizes: Sizes, lengths: Sequence[int] = LENGTHS) -> None:
    call = make(sizes, sum(lengths)) | {"cu_seqlens": starts_of(lengths, sizes.device), "return_final_states": True}
    wanted = exact(call)
    out, last = scan(**call)
    for i, length in enumerate(lengths):
        span = slice(sum(lengths[:i]), sum(lengths[:i]) + length)
        if length == 0:
            assert not last[i].any()
            continue
        assert error(out[span], wanted["out"][0, span]) <= BOUNDS[sizes.x], length
        assert error(last[i], wanted["final_states"][i]) <= BOUNDS[F32], length


def layout_changes_no_bit(scan: Scan, sizes: Sizes, tokens: int) -> None:
    """Channels or tokens contiguous, slices of wider tensors that begin at any element, and a mixture."""
    call = make(sizes, 2, tokens) | {"return_final_states": True}
    wanted = scan(**call)
    forms = [channels_first(call, dense) for dense in (True, False)]
    for offset in (1, 2, 4):
        cut = {n: torch.cat([torch.full_like(t, NAN)[..., :offset], t], -1)[..., offset:] for n, t in call.items() if n in PER_TOKEN}
        forms.append(call | cut)
        forms.append(channels_first(call, True) | {n: t.contiguous() for n, t in channels_first(cut, False).items() if n in ("B", "u")})
    mixed = channels_first(call, False)
    forms.append(mixed | {"delta": mixed["delta"].contiguous(), "C": mixed["C"].contiguous()})
    for form in forms:
        out, last = scan(**form)
        assert same(out.mT if "channels_first" in form else out, wanted[0]) and same(last, wanted[1])
