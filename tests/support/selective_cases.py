"""selective_scan: operands, poisoned and guarded; and the laws of its results, on a card or in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scan_cases import F32, NAN, SM90, error, launched, same, starts_of
from ssu_cases import BF16, F16, Memory
from torch import Tensor

import ssmgen
from ssmgen.compile.render import render
from ssmgen.emulator import run_source
from ssmgen.families.selective_scan import planning as op
from ssmgen.families.selective_scan.problem import OPERATOR, SelectiveProblem
from ssmgen.families.selective_scan.spec import SelectiveSpec
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, changed

__all__ = ["BF16", "F16", "F32", "NAN", "SM90", "error", "launched", "same", "starts_of"]
LENGTHS = (0, 1, 2, 63, 64, 65, 513)
BOUNDS = {BF16: 4e-3, F16: 6e-4, F32: 1e-5}  # relative L2 error by dtype; dense final states are f32

Scan = Callable[..., Any]  # as ssmgen.selective_scan


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: small for the emulator, a model's on a card."""

    dim: int = 24
    groups: int = 1
    d_state: int = 16
    x: torch.dtype = BF16
    device: str = "cpu"


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
    call = ssmgen.selective_scan.build(**kwargs)
    views = call.caller.checked(call.operands, call.options, None)
    where = {n: t.data_ptr() for n, t in call.operands.items()}
    if op.FAMILY.size_of(views):
        made = (spec or variant())(op.FAMILY.problem_of(views, where, call.options))
        packed = Arguments(made, op.FAMILY.values_of(made, views, call.options)).at([where[n] for n in made.operands()])
        launch = made.name, op.FAMILY.grid_of(made, views), made.threads_per_block, packed, call.operands, op.FAMILY.written
        run_source(change(render(made, arch)), *launch, made.dynamic_bytes, cluster=made.cluster_blocks)
    return call.result


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


PER_TOKEN = ("u", "delta", "z", "B", "C")


def states(sizes: Sizes, count: int, dtype: torch.dtype = F32) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, sizes.dim, sizes.d_state, generator=g).to(sizes.device, dtype)


def exact(call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
    """The tensors that the call must write, in float64, token by token."""
    built = ssmgen.selective_scan.build(**call, **more)
    views = {n: t.cpu() for n, t in op.CALLER.checked(built.operands, built.options, None).items()}
    wanted = {n: views[n].double() for n in op.FAMILY.written if n in views}
    op.run_reference(views | wanted, built.options, torch.float64)
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


def packing_changes_no_bit(scan: Scan, sizes: Sizes, lengths: Sequence[int]) -> None:
    call, starts = make(sizes, sum(lengths)), starts_of(lengths, sizes.device)
    packed, last = scan(**call, cu_seqlens=starts, return_final_states=True)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i + 1]))
        if length:
            out, own = scan(**tokens_of(call, span), return_final_states=True)
            assert same(out[0], packed[span]) and same(own[0], last[i])


def a_cut_changes_no_bit(scan: Scan, sizes: Sizes, tokens: int, cut: int) -> None:
    call = make(sizes, tokens)
    whole, last = scan(**tokens_of(call, slice(None)), return_final_states=True)
    first, state = scan(**tokens_of(call, slice(0, cut)), return_final_states=True)
    second, end = scan(**tokens_of(call, slice(cut, None)), initial_states=state, return_final_states=True, final_states_out=state)
    assert same(torch.cat([first, second], 1), whole) and same(end, last) and end is state


def a_pool_is_touched_where_it_should_be(scan: Scan, sizes: Sizes, state: torch.dtype) -> None:
    """NaN fills unused slots, slots of empty sequences, slots of sequences that start from zeros, and tokens outside every sequence."""
    lengths, slots, started = (33, 7, 0, 16, 30), (3, 20, 7, 0, -1), (True, True, True, False, True)
    memory, tokens = Memory(sizes.device), sum(lengths) + 9
    call = make(sizes, tokens)
    for name in PER_TOKEN:
        call[name][-9:] = NAN
        call[name] = memory.fill(name, call[name])
    pool = memory.fill("state", torch.full((9, sizes.dim, sizes.d_state), NAN, dtype=state, device=sizes.device))
    pool[3] = states(sizes, 1, state)[0]
    out = memory.fill("out", torch.full_like(call["u"], NAN))
    call |= {"cu_seqlens": starts_of(lengths, sizes.device, torch.int64), "state": pool, "out": out}
    call |= {"state_indices": torch.tensor(slots).int().to(sizes.device), "has_initial_state": torch.tensor(started).to(sizes.device)}
    wanted = exact(call)
    memory.seal()
    scan(**call)
    assert not memory.untouched({"state": torch.tensor([3, 0], device=sizes.device), "out": torch.arange(tokens - 9, device=sizes.device)})
    for begin, end, slot in ((0, 33, 3), (40, 56, 0)):
        assert error(out[begin:end], wanted["out"][0, begin:end]) <= BOUNDS[sizes.x]
        assert error(pool[slot], wanted["state"][slot]) <= BOUNDS[state]
    assert not out[33:40].any() and not out[56:86].any()


def neighbours_do_not_matter(scan: Scan, sizes: Sizes, lengths: Sequence[int]) -> None:
    """NaN in all other sequences, and in tokens outside every sequence, changes no bit of a sequence or of its state."""
    call = make(sizes, sum(lengths) + 9)
    starts = starts_of((4, *lengths), sizes.device)[1:]
    plain, last = scan(**call, cu_seqlens=starts, return_final_states=True)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i]) + length)
        poisoned = {n: torch.full_like(call[n], NAN) for n in PER_TOKEN}
        for name, t in poisoned.items():
            t[span] = call[name][span]
        out, own = scan(**call | poisoned, cu_seqlens=starts, return_final_states=True)
        assert same(out[span], plain[span]) and same(own[i], last[i]), length


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


def decoding_goes_on(scan: Scan, sizes: Sizes, tokens: int) -> None:
    """The state that a prompt leaves is the one that the next step reads."""
    call = make(sizes, 2, tokens + 1)
    wanted = exact(call, return_final_states=True)
    _, state = scan(**{n: t[:, :-1] if n in PER_TOKEN else t for n, t in call.items()}, return_final_states=True)
    named = {"u": "x", "delta": "dt", "delta_bias": "dt_bias", "delta_softplus": "dt_softplus"}
    step = {named.get(n, n): t[:, -1] if n in PER_TOKEN else t for n, t in call.items()}
    out = ssmgen.selective_state_update(state, **step)
    assert error(out, wanted["out"][:, -1]) <= BOUNDS[sizes.x] and error(state, wanted["final_states"]) <= BOUNDS[F32]
