"""chunk_delta_rule: operands, strided, poisoned and guarded; and the laws of its results, for whatever runs a call: a card, or the
emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chain_cases import written_by
from delta_images import images_of, pack
from scan_cases import NAN, SM90, error, placed, same, starts_of
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor

import ssmgen
from ssmgen.compile.render import render
from ssmgen.emulator import run_source
from ssmgen.families.chunk_delta_rule import planning as op
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch

LENGTHS = (0, 1, 63, 64, 65, 130)
BOUNDS = {BF16: 6e-3, F16: 1.5e-3}  # relative L2 error, random operands
FEW = {BF16: 8e-3, F16: 1.5e-3}  # of a few tokens: T, P, u and the output are rounded, each by up to 2^-9, and nothing averages that
STORED = {F32: 0.0, BF16: 2.0**-9, F16: 2.0**-12}  # a state's rounding
HARD = {BF16: 1.5e-2, F16: 4e-3}  # keys that are nearly one, steps of 1 and 2, decays of nothing and of all

Run = Callable[..., Any]  # as ssmgen.chunk_gated_delta_rule
Make = Callable[[DeltaProblem], Any]
PER_TOKEN = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: small for the emulator, a model's on a card."""

    heads: int = 2
    key_heads: int = 1
    head_k: int = 32
    head_v: int = 32
    x: torch.dtype = BF16
    device: str = "cpu"

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_v, self.head_k


def make(sizes: Sizes, *lead: int, seed: int = 0, gate: float = 1.0, near: float = 0.0, step: float | None = None) -> dict[str, Any]:
    """A call on dense operands: […, HV, V] and the like. gate: factor of the log decays; near: keys are one key and this much
    noise (0: all noise); step: beta of all tokens, else between 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    (HV, V, K), HK = sizes.state, sizes.key_heads

    def randn(*inner: int) -> Tensor:
        return torch.randn(*lead, *inner, generator=g)

    keys = randn(HK, K)
    if near:
        keys = torch.randn(HK, K, generator=g) + near * keys
    beta = torch.rand(*lead, HV, generator=g)
    call = {"q": randn(HK, K), "k": keys, "v": randn(HV, V)}
    call = {name: t.to(sizes.device, sizes.x) for name, t in call.items()}
    logs = -gate * torch.rand(*lead, HV, generator=g) * 0.2
    beta = beta if step is None else torch.full_like(beta, step)
    return call | {"g": logs.to(sizes.device), "beta": beta.to(sizes.device), "use_qk_l2norm": True}


ADVERSARIAL: dict[str, dict[str, float]] = {
    "near keys": {"near": 0.05, "gate": 0.01},
    "near keys, beta 1": {"near": 0.05, "step": 1.0, "gate": 0.01},
    "beta 1, no decay": {"step": 1.0, "gate": 0.0},
    "beta 2": {"step": 1.99, "gate": 0.01},
    "slow": {"gate": 0.01},
    "fast": {"gate": 40.0},
}


# Calls and the functions that run them.


def views_of(call: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = call.caller.checked(call.operands, call.options, None)
    return found


def emulated(
    *, function: Any = None, spec: Any = None, arch: Arch = SM90, change: Callable[[str], str] = str, prepared: bool = False, **kwargs: Any
) -> Any:
    """The call's result from its kernels in the emulator. spec: a variant, or a function of the problem that makes one; None: the
    registry's choice. `change` edits the kernels' texts. prepared: float64 images, rounded, replace the first kernel."""
    call = (function or ssmgen.chunk_gated_delta_rule).build(**kwargs)
    views, family = views_of(call), call.caller.family
    where = {n: t.data_ptr() for n, t in call.operands.items()}
    problem, size = family.problem_of(views, where, call.options), family.size_of(views)
    if size:
        spec = spec(problem) if callable(spec) else spec or registry.select(op.OPERATOR, problem, size, arch, arch >= Arch(90))
        call.operands["workspace"].fill_(0xFF)  # NaN in every dtype
        if prepared:
            packed = pack(images_of(views, call.options), views["v"].dtype)
            call.operands["workspace"][: len(packed)] = packed
        for part in spec.kernels[1 if prepared else 0 :]:
            launch_emulated(part, views, call, arch, change)
    return call.result


def launch_emulated(part: Any, views: Mapping[str, Tensor], call: Any, arch: Arch = SM90, change: Callable[[str], str] = str) -> None:
    """One kernel of a call in the emulator."""
    family = call.caller.family
    named = {n: call.operands[n] for n in part.operands()}
    packed = Arguments(part, family.values_of(part, views, call.options)).at([t.data_ptr() for t in named.values()])
    writable = tuple(n for role, n in zip(part.roles(), part.operands(), strict=True) if role in written_by(part))
    launch = part.name, family.grid_of(part, views), part.threads_per_block, packed, named, writable, part.dynamic_bytes
    run_source(change(render(part, arch)), *launch, early=part.early_operands(), cluster=part.cluster_blocks)


def launched(*, spec: Any, function: Any = None, **kwargs: Any) -> Any:
    """The call's result as a given variant makes it on a card."""
    call = (function or ssmgen.chunk_gated_delta_rule).build(**kwargs)
    problem, size, _, _ = call.problem()
    if size:
        call.launch_with(spec(problem) if callable(spec) else spec).at(call.pointers)()
    return call.result


def problem_of(function: Any = None, **kwargs: Any) -> DeltaProblem:
    found: DeltaProblem = (function or ssmgen.chunk_gated_delta_rule).build(**kwargs).problem()[0]
    return found


def exact(call: Mapping[str, Any], function: Any = None, **more: Any) -> dict[str, Tensor]:
    """The tensors that the call must write, in float64, token by token."""
    built = (function or ssmgen.chunk_gated_delta_rule).build(**call, **more)
    views = views_of(built)
    views = placed(views, views["v"].shape[-2] * views["v"].shape[-1] * views["k"].shape[-1])
    wanted = {n: views[n].double() for n in op.FAMILY.written if n in views and n != "workspace"}
    op.run_reference(views | wanted, built.options, torch.float64)
    return {n: t.cpu() for n, t in wanted.items()}


# Laws.


def tokens_of(call: Mapping[str, Any], span: slice) -> dict[str, Any]:
    """The call on some of its packed tokens, as a batch of one."""
    return {n: t[span][None] if n in PER_TOKEN else t for n, t in call.items()}


def states(sizes: Sizes, count: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    return torch.randn(count, *sizes.state, generator=torch.Generator().manual_seed(seed)).to(sizes.device, dtype)


def is_accurate(run: Run, sizes: Sizes, tokens: int, **kind: float) -> None:
    """Accuracy with a state to start from."""
    call = make(sizes, 2, tokens, **kind)
    call["initial_states"] = states(sizes, 2)
    bound = (HARD if kind else BOUNDS)[sizes.x]
    wanted = exact(call, return_final_states=True)
    out, last = run(**call, return_final_states=True)
    assert error(out, wanted["out"]) <= bound, ("out", error(out, wanted["out"]))
    assert error(last, wanted["final_states"]) <= bound, ("states", error(last, wanted["final_states"]))


def segments_are_as_accurate(whole: Run, cut: Run, sizes: Sizes, tokens: int, **kind: float) -> None:
    """Errors stay within a twentieth of the one-segment errors, except states with near keys. Most of such a state's error is along the
    keys' common direction: one number per head, and random. It agrees to 2 % over 48 heads, and differs by up to 18 % for one."""
    call = make(sizes, 1, tokens, **kind) | {"initial_states": states(sizes, 1), "return_final_states": True}
    wanted = exact(call)
    for name, one, several in zip(("out", "final_states"), whole(**call), cut(**call), strict=True):
        least, found = error(one, wanted[name]), error(several, wanted[name])
        limit = HARD[sizes.x] if name == "final_states" and "near" in kind else 1.05 * least
        assert found <= limit, (name, least, found)


def lengths_are_accurate(run: Run, sizes: Sizes, lengths: Sequence[int]) -> None:
    """Outputs and states of packed sequences of these lengths are accurate."""
    call = make(sizes, sum(lengths)) | {"cu_seqlens": starts_of(lengths, sizes.device), "return_final_states": True}
    wanted = exact(call)
    out, last = run(**call)
    for i, (begin, length) in enumerate(zip(call["cu_seqlens"].tolist(), lengths, strict=False)):
        if length:
            bound = (BOUNDS if length > 16 else FEW)[sizes.x]
            assert error(out[begin : begin + length], wanted["out"][0, begin : begin + length]) <= bound, length
            assert error(last[i], wanted["final_states"][i]) <= bound, length
        else:
            assert not last[i].any()


def packing_changes_no_bit(run: Run, sizes: Sizes, lengths: Sequence[int] = LENGTHS) -> None:
    call = make(sizes, sum(lengths))
    starts = starts_of(lengths, sizes.device)
    packed, last = run(**call, cu_seqlens=starts, return_final_states=True)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i + 1]))
        if length:
            out, own = run(**tokens_of(call, span), return_final_states=True)
            assert same(out[0], packed[span]) and same(own[0], last[i]), length
        else:
            assert not last[i].any()


def a_cut_changes_no_bit(run: Run, sizes: Sizes, tokens: int, cut: int) -> None:
    call = make(sizes, tokens)
    whole, last = run(**tokens_of(call, slice(None)), return_final_states=True)
    first, state = run(**tokens_of(call, slice(0, cut)), return_final_states=True)
    second, end = run(**tokens_of(call, slice(cut, None)), initial_states=state, return_final_states=True, final_states_out=state)
    assert same(torch.cat([first, second], 1), whole) and same(end, last) and end is state


def a_pool_is_touched_where_it_should_be(run: Run, sizes: Sizes, state: torch.dtype, layout: str = "vk") -> None:
    """NaN fills unused slots, slots of empty sequences, slots of sequences that start from zeros, and tokens outside every sequence."""
    lengths, slots, started = (65, 7, 0, 16, 64), (3, 20, 7, 0, -1), (True, True, True, False, True)
    memory, tokens = Memory(sizes.device), sum(lengths) + 9
    call = make(sizes, tokens)
    for name in PER_TOKEN:
        call[name][-9:] = NAN
        call[name] = memory.fill(name, call[name])
    HV, V, K = sizes.state
    shape = (9, HV, K, V) if layout == "kv" else (9, HV, V, K)
    pool = memory.fill("state", torch.full(shape, NAN, dtype=state, device=sizes.device))
    pool[3] = torch.randn(shape[1:], generator=torch.Generator().manual_seed(1)).to(sizes.device, state)
    out = memory.fill("out", torch.full_like(call["v"], NAN))
    call |= {"cu_seqlens": starts_of(lengths, sizes.device, torch.int64), "state": pool, "out": out, "state_layout": layout}
    call |= {"state_indices": torch.tensor(slots).int().to(sizes.device), "has_initial_state": torch.tensor(started).to(sizes.device)}
    wanted = exact(call)
    memory.seal()
    run(**call)
    assert not memory.untouched({"state": torch.tensor([3, 0], device=sizes.device), "out": torch.arange(tokens - 9, device=sizes.device)})
    for begin, end, slot in ((0, 65, 3), (72, 88, 0)):
        assert error(out[begin:end], wanted["out"][0, begin:end]) <= BOUNDS[sizes.x]
        assert error(pool[slot], wanted["state"][slot]) <= BOUNDS[sizes.x] + STORED[state]
    assert not out[65:72].any() and not out[88:152].any()


def neighbours_do_not_matter(run: Run, sizes: Sizes, lengths: Sequence[int]) -> None:
    """NaN in all other sequences, and in tokens outside every sequence, changes no bit of a sequence or of its state."""
    call = make(sizes, sum(lengths) + 9)
    starts = starts_of((4, *lengths), sizes.device)[1:]
    plain, last = run(**call, cu_seqlens=starts, return_final_states=True)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i]) + length)
        poisoned = {n: torch.full_like(call[n], NAN) for n in PER_TOKEN}
        for name, t in poisoned.items():
            t[span] = call[name][span]
        out, own = run(**call | poisoned, cu_seqlens=starts, return_final_states=True)
        assert same(out[span], plain[span]) and same(own[i], last[i]), length


def states_of_a_pool_may_begin_elsewhere(run: Run, sizes: Sizes, state: torch.dtype, index: torch.dtype | None) -> None:
    """Dense states into a pool give the bits of a call without a pool. A sequence without a slot or without tokens changes no slot."""
    lengths = (65, 7, 0, 16)
    memory, call = Memory(sizes.device), make(sizes, sum(lengths))
    call |= {"cu_seqlens": starts_of(lengths, sizes.device), "initial_states": states(sizes, len(lengths), state)}
    wanted, last = run(**call, return_final_states=True)
    slots = [0, 1, 2, 3] if index is None else [4, 9, 1, 0]
    pool = memory.fill("state", torch.full((9, *sizes.state), NAN, dtype=state, device=sizes.device))
    given = {} if index is None else {"state_indices": torch.tensor(slots, dtype=index, device=sizes.device)}
    memory.seal()
    out = run(**call, state=pool, **given)
    served = [i for i in range(4) if lengths[i] and slots[i] < 9]
    assert not memory.untouched({"state": torch.tensor([slots[i] for i in served], device=sizes.device)})
    assert all(same(pool[slots[i]], last[i]) for i in served)
    if index is not None:
        assert not out[65:72].any()
        wanted[65:72] = 0
    assert same(out, wanted)


def layout_changes_no_bit(run: Run, sizes: Sizes, offset: int) -> None:
    """q, k and v are slices of one tensor, as the convolution leaves them, `offset` elements from multiples of 16 bytes."""
    (HV, V, K), HK = sizes.state, sizes.key_heads
    call = make(sizes, 2, 70)
    wanted = run(**call)
    parts = [call[name].flatten(2) for name in ("q", "k", "v")]
    wide = torch.cat([torch.full_like(parts[0], NAN)[..., :offset], *parts], 2)
    q, k, v = wide[..., offset:].split([HK * K, HK * K, HV * V], 2)
    out = torch.full((2, 70, HV, V + offset), NAN, dtype=sizes.x, device=sizes.device)[..., :V]
    gates = {n: torch.cat([call[n], call[n]], 2)[:, :, HV:] for n in ("g", "beta")}
    run(**call | gates | {"q": q.unflatten(2, (HK, K)), "k": k.unflatten(2, (HK, K)), "v": v.unflatten(2, (HV, V)), "out": out})
    assert same(out, wanted)


def order_of_states_changes_no_bit(run: Run, sizes: Sizes, state: torch.dtype) -> None:
    """States in layout kv are the transposes of states in layout vk."""
    call, before = make(sizes, 2, 70), states(sizes, 2, state)
    out, last = run(**call, initial_states=before, return_final_states=True)
    turned = before.transpose(2, 3).contiguous()
    found, theirs = run(**call, initial_states=turned, return_final_states=True, state_layout="kv")
    assert same(found, out) and same(theirs.transpose(2, 3), last)


def gates_agree(run: Run, plain: Run, sizes: Sizes) -> None:
    """A raw gate, a linear gate and a log decay agree, and so do a logit of beta and beta. A decay of 0 erases the state, a decay of 1
    keeps it. plain: as ssmgen.chunk_delta_rule."""
    call = make(sizes, 1, 70)
    call["v"][:, :2] *= 100
    raw = torch.randn(1, 70, sizes.heads, generator=torch.Generator().manual_seed(3)).to(sizes.device)
    A_log, bias = (torch.tensor([0.3, -1.0] * sizes.heads, device=sizes.device)[: sizes.heads] * f for f in (1.0, 0.5))
    variants: list[dict[str, Any]] = [
        {"g": raw, "A_log": A_log, "dt_bias": bias},
        {"g": raw, "A_log": A_log},
        {"g": torch.rand(1, 70, sizes.heads, generator=torch.Generator().manual_seed(4)).to(sizes.device), "linear_gate": True},
        {"beta": raw, "beta_sigmoid": True},
        {"beta": raw.to(BF16), "g": call["g"].to(F16), "beta_sigmoid": True, "allow_neg_eigval": True},
    ]
    for more in variants:
        wanted = exact(call | more, return_final_states=True)
        out, last = run(**call | more, return_final_states=True)
        assert error(out, wanted["out"]) <= BOUNDS[sizes.x] and error(last, wanted["final_states"]) <= BOUNDS[sizes.x], more
    decays = torch.ones(1, 70, sizes.heads, device=sizes.device)
    ungated = {n: t for n, t in call.items() if n != "g"}
    wanted = exact(ungated, ssmgen.chunk_delta_rule, return_final_states=True)
    for out, last in (
        run(**call | {"g": decays, "linear_gate": True}, return_final_states=True),
        plain(**ungated, return_final_states=True),
    ):
        assert error(out, wanted["out"]) <= BOUNDS[sizes.x] and error(last, wanted["final_states"]) <= BOUNDS[sizes.x]
    decays[:, 67] = 0
    behind = exact({n: t[:, 67:] if n in PER_TOKEN else t for n, t in (call | {"g": decays}).items()}, linear_gate=True)
    out = run(**call | {"g": decays, "linear_gate": True})
    assert error(out[:, 67:], behind["out"]) <= BOUNDS[sizes.x]


def decoding_goes_on(run: Run, sizes: Sizes, tokens: int) -> None:
    """The state that a prompt leaves is the one that the next step reads."""
    call = make(sizes, 2, tokens + 1)
    wanted = exact(call, return_final_states=True)
    _, state = run(**{n: t[:, :-1] if n in PER_TOKEN else t for n, t in call.items()}, return_final_states=True)
    out = ssmgen.gated_delta_rule(state, **{n: t[:, -1] if n in PER_TOKEN else t for n, t in call.items()})
    assert error(out, wanted["out"][:, -1]) <= BOUNDS[sizes.x] and error(state, wanted["final_states"]) <= BOUNDS[sizes.x]


def checkpoints_are_final_states(run: Run, sizes: Sizes, state: torch.dtype, lengths: Sequence[int] = LENGTHS) -> None:
    """A checkpoint is, bit for bit, the final state of a call that ends there; positions of no chunk's end leave their rows alone."""
    memory, tokens = Memory(sizes.device), sum(lengths)
    call, starts = make(sizes, tokens), starts_of(lengths, sizes.device)
    before = states(sizes, len(lengths), state)
    served = {int(s) + n: (i, n) for i, (s, k) in enumerate(zip(starts, lengths, strict=False)) for n in (*range(64, k, 64), k) if n}
    others = {int(s) + 17 for s, k in zip(starts, lengths, strict=False) if k > 17} - served.keys()
    listed = [-5, 0, *sorted({*served, *others}), tokens + 1, 2**31 - 1]
    positions = torch.tensor(listed, dtype=torch.int32 if state is F32 else torch.int64, device=sizes.device)
    kept = memory.fill("checkpoints", torch.full((len(listed), *sizes.state), NAN, dtype=state, device=sizes.device))
    more: dict[str, Any] = {"initial_states": before, "return_final_states": True, "cu_seqlens": starts}
    plain = run(**call, **more)
    memory.seal()
    marked = run(**call, **more, checkpoint_positions=positions, checkpoints_out=kept, return_checkpoints=True)
    assert marked[2] is kept and all(same(a, b) for a, b in zip(marked, plain, strict=False))
    rows = [i for i, position in enumerate(listed) if position in served]
    assert not memory.untouched({"checkpoints": torch.tensor(rows, device=sizes.device)})
    for row in rows:
        s, count = served[listed[row]]
        span = slice(int(starts[s]), int(starts[s]) + count)
        _, last = run(**tokens_of(call, span), initial_states=before[s : s + 1], return_final_states=True)
        assert same(last[0], kept[row]), (s, count)


def checkpoints_of_a_batch(run: Run, sizes: Sizes) -> None:
    """Positions go through the flattened batch; no positions at all change nothing."""
    call = make(sizes, 3, 70)
    positions = torch.tensor([64, 70, 141, 204, 210, 211], device=sizes.device)
    plain, last = run(**call, return_final_states=True)
    out, kept = run(**call, checkpoint_positions=positions, return_checkpoints=True)
    assert same(out, plain) and kept.dtype == F32 and same(kept[1], last[0]) and same(kept[4], last[2])
    _, first = run(**{n: t[2:, :64] if n in PER_TOKEN else t for n, t in call.items()}, return_final_states=True)
    assert same(kept[3], first[0])
    out, none = run(**call, checkpoint_positions=positions[:0], return_checkpoints=True)
    assert same(out, plain) and none.shape[0] == 0
