"""chunk_scan: operands, strided, poisoned and guarded; and the laws of its results, on a card or in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from bits import error, same
from emulated_calls import SM90, emulate
from sequence_laws import (  # noqa: F401
    NAN,
    Sequences,
    a_cut_changes_no_bit,
    a_pool_is_touched_where_it_should_be,
    boundaries_that_make_no_sense_are_sequences_without_tokens,
    decoding_goes_on,
    neighbours_do_not_matter,
    packing_changes_no_bit,
    sequences_without_tokens_keep_states,
    starts_of,
    states_of_a_pool_may_begin_elsewhere,
)
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor

import ssmgen
from ssmgen.families.chunk_scan import call as op
from ssmgen.families.chunk_scan.rules import candidates
from ssmgen.families.chunk_scan.spec import ScanProblem, ScanSpec
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch, Pdl

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 130)
BOUNDS = {BF16: 4e-3, F16: 6e-4, F32: 1e-5}  # relative L2 error: of products of operands of such a dtype

Scan = Callable[..., Any]  # as ssmgen.chunk_scan
Make = Callable[[ScanProblem], ScanSpec]


PER_TOKEN = ("x", "dt", "B", "C", "z")


@dataclass(frozen=True)
class Sizes(Sequences):
    """The sizes of a call: small for the emulator, a model's on a card."""

    heads: int = 2
    groups: int = 1
    headdim: int = 32
    d_state: int = 32
    x: torch.dtype = BF16
    device: str = "cpu"

    per_token: ClassVar = PER_TOKEN
    rows: ClassVar = "x"

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.headdim, self.d_state

    def made(self, *lead: int, slow: bool = False) -> dict[str, Any]:
        return make(self, *lead, decay=0.02 if slow else 1.0)

    def exact(self, call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
        return exact(call, **more)

    def step(self, state: Tensor, call: dict[str, Any]) -> Tensor:
        return ssmgen.selective_state_update(state, **call)

    def bound(self) -> float:
        return BOUNDS[self.x]


def emulated(
    *, function: Any = None, spec: ScanSpec | Make | None = None, arch: Arch = SM90, change: Callable[[str], str] = str, **kwargs: Any
) -> Any:
    """The call's result from a kernel in the emulator. spec: a variant, or a function of the problem that makes one; None: the registry's
    choice. `change` edits the kernel's text."""
    return emulate((function or ssmgen.chunk_scan).build(**kwargs), spec, arch, change)


def variant(**how: Any) -> Make:
    """A function that makes a problem's variant in which each warp computes its own products."""

    def of(problem: ScanProblem) -> ScanSpec:
        given = {f.name: getattr(problem, f.name) for f in fields(ScanProblem)}
        spec = ScanSpec(**given | {"tile": next(t for t in (64, 32, 16) if problem.headdim % t == 0), "pdl": Pdl.TRIGGER_LOADED} | how)
        assert not (found := spec.violations(SM90)), found
        return spec

    return of


def launched(*, spec: ScanSpec | Make, function: Any = None, **kwargs: Any) -> Any:
    """The call's result as a given variant makes it on a card."""
    call = (function or ssmgen.chunk_scan).build(**kwargs)
    problem, size, _, _ = call.problem()
    if size:
        call.launch_with(spec(problem) if callable(spec) else spec).at(call.pointers)()
    return call.result


def by_warps(problem: ScanProblem, heads: int = 128) -> ScanSpec:
    """The variant for this card in which each warp computes its own products. Warpgroup variants, which may come first, differ bitwise.
    heads: with few heads, blocks divide a sequence, which changes no bit."""
    arch = runtime.device_arch(torch.cuda.current_device())
    rules = candidates(problem, heads, arch, arch >= Arch(90))
    return next(spec for _, spec, _ in rules if type(spec) is ScanSpec and not spec.violations(arch))


def problem_of(**kwargs: Any) -> Any:
    call = ssmgen.chunk_scan.build(**kwargs)
    return call.problem()[0]


def make(sizes: Sizes, *lead: int, seed: int = 0, decay: float = 1.0, z: bool = False) -> dict[str, Any]:
    """A call on dense operands: […, H, P] and the like. decay: the scale of A, and so of the sums of dt A."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = sizes.x) -> Tensor:
        return torch.randn(*shape, generator=g).to(sizes.device, dtype)

    H, P, N = sizes.heads, sizes.headdim, sizes.d_state
    call: dict[str, Any] = {"x": randn(*lead, H, P), "dt": randn(*lead, H)}
    call |= {"A": -decay * (0.5 + torch.rand(H, generator=g)).to(sizes.device), "dt_bias": randn(H, dtype=F32), "dt_softplus": True}
    call |= {n: randn(*lead, sizes.groups, N) for n in ("B", "C")} | {"D": randn(H, dtype=F32)}
    return call | ({"z": randn(*lead, H, P)} if z else {})


def placed(views: Mapping[str, Tensor], state: int) -> dict[str, Tensor]:
    """Places operands for a token-by-token reference; state: elements of state per token. They go to the CPU, unless the state is 2 MiB of
    float64 or more: that takes the CPU milliseconds a token, and the operands stay where they are."""
    return {n: t if state >= 1 << 18 else t.cpu() for n, t in views.items()}


def exact(call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
    """The tensors that the call must write, in float64, token by token."""
    built = ssmgen.chunk_scan.build(**call, **more)
    views = op.CALLER.checked(built.operands, built.options, None)
    views = placed(views, views["x"].shape[-2] * views["x"].shape[-1] * views["B"].shape[-1])
    wanted = {n: views[n].double() for n in op.FAMILY.written if n in views}
    op.CALLER.reference(views | wanted, built.options, torch.float64)
    return {n: t.cpu() for n, t in wanted.items()}


def tokens_of(call: Mapping[str, Any], span: slice) -> dict[str, Any]:
    """The call on some of its packed tokens, as a batch of one."""
    return {n: t[span][None] if n in PER_TOKEN else t for n, t in call.items()}


# Laws.


def is_accurate(scan: Scan, sizes: Sizes, tokens: int, decay: float, *, z: bool = False, step: float = 0.0) -> None:
    """Accuracy with a state to start from. step: added to dt, whose softplus is then about as much."""
    call = make(sizes, 2, tokens, decay=decay, z=z)
    call["dt"] = call["dt"] + step
    states = torch.randn(2, sizes.heads, sizes.headdim, sizes.d_state, generator=torch.Generator().manual_seed(1))
    call["initial_states"] = states.to(sizes.device)
    wanted = exact(call, return_final_states=True)
    out, states = scan(**call, return_final_states=True)
    assert error(out, wanted["out"]) <= BOUNDS[sizes.x], error(out, wanted["out"])
    assert error(states, wanted["final_states"]) <= BOUNDS[sizes.x], error(states, wanted["final_states"])


def lengths_are_accurate(scan: Scan, sizes: Sizes, lengths: Sequence[int], decay: float = 0.1) -> None:
    """The first tokens of a sequence are accurate, for each of these counts in ascending order."""
    call = tokens_of(make(sizes, lengths[-1], decay=decay), slice(None))
    wanted = exact(call, checkpoint_positions=torch.tensor(lengths, device=sizes.device), return_checkpoints=True)
    for length, state in zip(lengths, wanted["checkpoints"], strict=True):
        own = {n: t[:, :length] if n in ("x", "dt", "B", "C") else t for n, t in call.items()}
        out, last = scan(**own, return_final_states=True)
        assert error(out, wanted["out"][:, :length]) <= BOUNDS[sizes.x] and error(last[0], state) <= BOUNDS[sizes.x], length


def layout_changes_no_bit(scan: Scan, sizes: Sizes, offset: int) -> None:
    """x, B and C are slices of one tensor, as the convolution leaves them, `offset` elements from multiples of 16 bytes."""
    H, P, G, N = sizes.heads, sizes.headdim, sizes.groups, sizes.d_state
    call = make(sizes, 2, 70, z=True)
    wanted = scan(**call)
    parts = [call["x"].flatten(2), call["B"].flatten(2), call["C"].flatten(2)]
    wide = torch.cat([torch.full_like(parts[0], NAN)[..., :offset], *parts], 2)
    x, B, C = wide[..., offset:].split([H * P, G * N, G * N], 2)
    z = torch.cat([call["z"], call["z"]], 2)[:, :, H:]
    out = torch.full((2, 70, H, P + offset), NAN, dtype=sizes.x, device=sizes.device)[..., :P]
    moved = call | {"x": x.unflatten(2, (H, P)), "B": B.unflatten(2, (G, N)), "C": C.unflatten(2, (G, N)), "z": z, "out": out}
    scan(**moved)
    assert same(out, wanted)


def ids_are_sequences(scan: Scan, sizes: Sizes, lengths: Sequence[int] = LENGTHS) -> None:
    """seq_idx gives the results of cu_seqlens; they are bit-equal for sequences that start on a chunk. Ids may occur again."""
    call = make(sizes, sum(lengths), decay=0.1)
    starts = starts_of(lengths, sizes.device)
    packed, states = scan(**call, cu_seqlens=starts, return_final_states=True)
    ids = torch.cat([torch.full((n,), i % 2) for i, n in enumerate(n for n in lengths if n)]).int().to(sizes.device)
    out, last = scan(**tokens_of(call, slice(None)), seq_idx=ids, return_final_states=True)
    assert error(out, packed.double().cpu()) <= BOUNDS[sizes.x] and error(last[0], states[-1].double().cpu()) <= BOUNDS[sizes.x]
    alone = tokens_of(call, slice(None))
    plain = scan(**alone, return_final_states=True)
    assert all(same(a, b) for a, b in zip(scan(**alone, seq_idx=torch.full_like(ids, 7), return_final_states=True), plain, strict=True))
    starts = starts_of((64, 128, sum(lengths) - 192), sizes.device)
    ids = (torch.arange(sum(lengths), device=sizes.device)[:, None] >= starts[1:3]).sum(1, dtype=torch.int32)
    packed, states = scan(**call, cu_seqlens=starts, return_final_states=True)
    out, last = scan(**alone, seq_idx=ids, return_final_states=True)
    assert same(out[0], packed) and same(last[0], states[-1])


def ids_go_on(scan: Scan, sizes: Sizes) -> None:
    """A row's first token continues from its state. No part of a sequence, however large, remains in the next one's state."""
    call = make(sizes, 2, 140, decay=0.1)
    before = 1e30 * torch.randn(2, sizes.heads, sizes.headdim, sizes.d_state, generator=torch.Generator().manual_seed(1))
    before[1] = torch.inf
    ids = torch.zeros(2, 140, dtype=torch.int32, device=sizes.device)
    ids[0, 100:] = -3
    ids[1, 64:] = 2
    call |= {"initial_states": before.to(sizes.device), "seq_idx": ids, "return_final_states": True}
    wanted = exact({n: t for n, t in call.items() if n != "return_final_states"}, return_final_states=True)
    out, states = scan(**call)
    assert error(states, wanted["final_states"]) <= BOUNDS[sizes.x]
    for b, start in enumerate((100, 64)):
        assert error(out[b, start:], wanted["out"][b, start:]) <= BOUNDS[sizes.x]
    assert error(out[0, :100], wanted["out"][0, :100]) <= BOUNDS[sizes.x] and not out[1, :64].isfinite().any()


def checkpoints_are_final_states(
    scan: Scan, sizes: Sizes, state: torch.dtype, *, ids: bool = False, lengths: Sequence[int] = LENGTHS
) -> None:
    """A checkpoint is, bit for bit, the final state of a call that ends there; positions in no sequence leave their rows alone."""
    memory, tokens = Memory(sizes.device), sum(lengths)
    call, starts = make(sizes, tokens, decay=0.1), starts_of(lengths, sizes.device)
    shape = (len(lengths), sizes.heads, sizes.headdim, sizes.d_state)
    before = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(sizes.device, state)
    picked = torch.randint(1, tokens + 1, (8,), generator=torch.Generator().manual_seed(2)).tolist()
    some = sorted({*picked, *(int(s) + n for s, k in zip(starts, lengths, strict=False) for n in (1, 64, k) if n <= k)} - {0})
    listed = [-5, 0, *some, tokens + 1, 2**31 - 1]
    positions = torch.tensor(listed, dtype=torch.int32 if state is F32 else torch.int64, device=sizes.device)
    out = memory.fill("checkpoints", torch.full((len(listed), *shape[1:]), NAN, dtype=state, device=sizes.device))
    more: dict[str, Any] = {"initial_states": before, "return_final_states": True}
    if ids:  # the whole is one row
        call, more["initial_states"] = tokens_of(call, slice(None)), before[:1]
        more["seq_idx"] = (torch.arange(tokens) // 50 % 3).int()[None].to(sizes.device)
    else:
        more["cu_seqlens"] = starts
    plain = scan(**call, **more)
    memory.seal()
    marked = scan(**call, **more, checkpoint_positions=positions, checkpoints_out=out, return_checkpoints=True)
    assert marked[2] is out and all(same(a, b) for a, b in zip(marked, plain, strict=False))
    assert not memory.untouched({"checkpoints": torch.arange(2, 2 + len(some), device=sizes.device)})
    for i, position in enumerate(some, 2):
        s = 0 if ids else next(s for s in range(len(lengths)) if int(starts[s]) < position <= int(starts[s + 1]))
        begin = 0 if ids else int(starts[s])
        per_token = {n: (t[0] if ids else t)[begin:position][None] for n, t in call.items() if n in ("x", "dt", "B", "C")}
        own = {"seq_idx": more["seq_idx"][:, :position]} if ids else {}
        _, last = scan(**call | per_token, **own, initial_states=more["initial_states"][s : s + 1], return_final_states=True)
        assert same(last[0], out[i]), (s, position - begin)


def checkpoints_of_a_batch(scan: Scan, sizes: Sizes) -> None:
    """Positions go through the flattened batch; no positions at all, and none in a row, change nothing."""
    call = make(sizes, 3, 70)
    positions = torch.tensor([70, 141, 210, 211], device=sizes.device)
    plain, last = scan(**call, return_final_states=True)
    out, states = scan(**call, checkpoint_positions=positions, return_checkpoints=True)
    assert same(out, plain) and states.dtype == F32 and same(states[0], last[0]) and same(states[2], last[2])
    _, first = scan(**{n: t[2:, :1] if n in ("x", "dt", "B", "C") else t for n, t in call.items()}, return_final_states=True)
    assert same(states[1], first[0])
    many = torch.cat([torch.arange(-1100, 0, device=sizes.device), positions])  # more than two steps of the search
    assert same(scan(**call, checkpoint_positions=many, return_checkpoints=True)[1][1100:1103], states[:3])
    out, none = scan(**call, checkpoint_positions=positions[:0], return_checkpoints=True)
    assert same(out, plain) and none.shape[0] == 0
    call["x"][2, 1:] = NAN  # tokens after a position do not reach its state
    assert same(scan(**call, checkpoint_positions=positions[1:2], return_checkpoints=True)[1], first)
