"""chunk_delta_rule and chunk_linear_attention: the laws of their results, on a card or in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from prompt_cases import (
    BF16,
    BOUNDS,
    F16,
    F32,
    HARD,
    NAN,
    Case,
    Run,
    cut,
    error,
    exact,
    make,
    same,
    starts_of,
    states,
    tokens_of,
)  # fmt: skip
from sequence_laws import (  # noqa: F401
    a_cut_changes_no_bit,
    a_pool_is_touched_where_it_should_be,
    boundaries_that_make_no_sense_are_sequences_without_tokens,
    decoding_goes_on,
    neighbours_do_not_matter,
    packing_changes_no_bit,
    sequences_without_tokens_keep_states,
    states_of_a_pool_may_begin_elsewhere,
)
from ssu_cases import Memory
from torch import Tensor

LENGTHS = (0, 1, 63, 64, 65, 130)


def is_accurate(run: Run, case: Case, tokens: int, **kind: float) -> None:
    """Accuracy with a state to start from."""
    call = make(case, 2, tokens, **kind) | {"initial_states": states(case, 2)}
    bound = (HARD if kind else BOUNDS)[case.x]
    wanted = exact(case, call, return_final_states=True)
    out, last = run(case, **call, return_final_states=True)
    errors = error(out, wanted["out"]), error(last, wanted["final_states"])
    assert max(errors) <= bound, errors


def is_accurate_from_zeros(run: Run, case: Case, tokens: int) -> None:
    """Accuracy from zeros, for nearly equal keys, with steps of 1 and no decay. Queries unlike the keys see small values, but errors are
    not small."""
    call = make(case, 1, tokens, near=0.05, step=1.0, gate=0.0) | {"return_final_states": True}
    wanted = exact(case, call)
    out, last = run(case, **call)
    errors = error(out, wanted["out"]), error(last, wanted["final_states"])
    assert max(errors) <= HARD[case.x], errors


def segments_are_as_accurate(whole: Run, cut: Run, case: Case, tokens: int, **kind: float) -> None:
    """Errors stay within a twentieth of the one-segment errors, except states with near keys. Most of such a state's error is along the
    keys' common direction: one number per head, and random. It agrees to 2 % over 48 heads, and differs by up to 18 % for one."""
    call = make(case, 1, tokens, **kind) | {"initial_states": states(case, 1), "return_final_states": True}
    wanted = exact(case, call)
    for name, one, several in zip(("out", "final_states"), whole(case, **call), cut(case, **call), strict=True):
        least, found = error(one, wanted[name]), error(several, wanted[name])
        limit = HARD[case.x] if name == "final_states" and "near" in kind and case.per_head else 1.05 * least
        assert found <= limit, (name, least, found)


def lengths_are_accurate(run: Run, case: Case, lengths: Sequence[int]) -> None:
    """Outputs and states of packed sequences of these lengths are accurate."""
    call = make(case, sum(lengths)) | {"cu_seqlens": starts_of(lengths, case.device), "return_final_states": True}
    wanted = exact(case, call)
    out, last = run(case, **call)
    for i, (begin, length) in enumerate(zip(call["cu_seqlens"].tolist(), lengths, strict=False)):
        if length:
            bound = BOUNDS[case.x] if length > 16 else case.few
            assert error(out[begin : begin + length], wanted["out"][0, begin : begin + length]) <= bound, length
            assert error(last[i], wanted["final_states"][i]) <= bound, length
        else:
            assert not last[i].any()


def layout_changes_no_bit(run: Run, case: Case, offset: int) -> None:
    """Operands per token are slices of wider tensors, `offset` elements from multiples of 16 bytes."""
    call = make(case, 2, 70)
    wanted = run(case, **call)

    def moved(t: Tensor) -> Tensor:
        """The same, in rows that begin and end with others' numbers."""
        wide = torch.full((*t.shape[:-1], t.shape[-1] + offset), NAN, dtype=t.dtype, device=t.device)
        wide[..., offset:] = t
        return wide[..., offset:]

    out = moved(torch.full_like(call["v"], NAN))
    run(case, **{n: moved(t) if n in case.per_token else t for n, t in call.items()}, out=out)
    assert same(out, wanted)


def order_of_states_changes_no_bit(run: Run, case: Case, state: torch.dtype) -> None:
    """States in layout kv are the transposes of states in layout vk."""
    call, before = make(case, 2, 70), states(case, 2, state)
    out, last = run(case, **call, initial_states=before, return_final_states=True)
    turned = before.transpose(2, 3).contiguous()
    found, theirs = run(case, **call, initial_states=turned, return_final_states=True, state_layout="kv")
    assert same(found, out) and same(theirs.transpose(2, 3), last)


def gates(case: Case, tokens: int = 70) -> list[dict[str, Any]]:
    """Gates and betas that a function may take, in addition to the ones of `make`."""
    g = torch.Generator().manual_seed(3)
    HV, _, K = case.state

    def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(*shape, generator=g).to(case.device, dtype)

    name = next((n for n in ("g", "gk", "w") if n in case.per_token), None)
    inner = (HV,) if case.function == "chunk_comba" or case.per_head else (HV, K)
    variants: list[dict[str, Any]] = []
    if name:
        variants += [{name: -0.3 * torch.rand(1, tokens, *inner, generator=g).to(case.device, dtype)} for dtype in (BF16, F16)]
    if case.function in ("chunk_gla", "chunk_dplr_delta_rule"):
        variants.append({name: None})
    if case.function == "chunk_gated_delta_rule":
        variants.append({"g": torch.rand(1, tokens, HV, generator=g).to(case.device), "linear_gate": True})
    if case.function in ("chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "chunk_comba"):
        raw = {"g": randn(1, tokens, *inner), "A_log": -randn(HV).abs()}
        variants += [raw, raw | {"g": raw["g"].to(BF16), "dt_bias": randn(*inner)}]
        if case.function in ("chunk_kda", "chunk_gdn2"):
            variants += [raw | {"dt_bias": randn(HV * K, dtype=F16), "lower_bound": -5.0}, {"g": raw["g"], "lower_bound": -2.0}]
    if "beta" in case.per_token:
        variants += [{"beta": randn(1, tokens, HV), "beta_sigmoid": True}]
    if case.function in ("chunk_gated_delta_rule", "chunk_kda"):
        variants += [{"beta": randn(1, tokens, HV, dtype=BF16), "beta_sigmoid": True, "allow_neg_eigval": True}]
    return variants


def gates_agree(run: Run, case: Case) -> None:
    """Raw gates, bounded gates, no gates, logits of beta, and gates of all dtypes agree with the reference."""
    call = make(case, 1, 70)
    for more in gates(case):
        wanted = exact(case, call | more, return_final_states=True)
        out, last = run(case, **call | more, return_final_states=True)
        errors = error(out, wanted["out"]), error(last, wanted["final_states"])
        assert max(errors) <= BOUNDS[case.x], (errors, more.keys())


def linear_gates_agree(run: Run, case: Case) -> None:
    """A decay of 1 keeps the state, as chunk_delta_rule does, and a decay of 0 erases it."""
    plain, call = replace(case, function="chunk_delta_rule"), make(case, 1, 70)
    call["v"][:, :2] *= 100
    decays, ungated = torch.ones(1, 70, case.heads, device=case.device), {n: t for n, t in call.items() if n != "g"}
    wanted = exact(plain, ungated, return_final_states=True)
    for out, last in (
        run(case, **call | {"g": decays, "linear_gate": True}, return_final_states=True),
        run(plain, **ungated, return_final_states=True),
    ):
        assert error(out, wanted["out"]) <= BOUNDS[case.x] and error(last, wanted["final_states"]) <= BOUNDS[case.x]
    decays[:, 67] = 0
    behind = exact(case, cut(case, call | {"g": decays}, slice(None), slice(67, None)), linear_gate=True)
    out = run(case, **call | {"g": decays, "linear_gate": True})
    assert error(out[:, 67:], behind["out"]) <= BOUNDS[case.x]


def checkpoints_are_final_states(run: Run, case: Case, state: torch.dtype, lengths: Sequence[int]) -> None:
    """A checkpoint is, bit for bit, the final state of a call that ends there; positions of no chunk's end leave their rows alone."""
    memory, tokens = Memory(case.device), sum(lengths)
    call, starts = make(case, tokens), starts_of(lengths, case.device)
    before = states(case, len(lengths), state)
    ends = [(i, n) for i, k in enumerate(lengths) for n in (*range(case.chunk, k, case.chunk), k) if n]
    served = {int(starts[i]) + n: (i, n) for i, n in ends}
    others = {int(s) + 17 for s, k in zip(starts, lengths, strict=False) if k > 17} - served.keys()
    listed = [-5, 0, *sorted({*served, *others}), tokens + 1, 2**31 - 1]
    positions = torch.tensor(listed, dtype=torch.int32 if state is F32 else torch.int64, device=case.device)
    kept = memory.fill("checkpoints", torch.full((len(listed), *case.state), NAN, dtype=state, device=case.device))
    more: dict[str, Any] = {"initial_states": before, "return_final_states": True, "cu_seqlens": starts}
    plain = run(case, **call, **more)
    memory.seal()
    marked = run(case, **call, **more, checkpoint_positions=positions, checkpoints_out=kept, return_checkpoints=True)
    assert marked[2] is kept and all(same(a, b) for a, b in zip(marked, plain, strict=False))
    rows = [i for i, position in enumerate(listed) if position in served]
    assert not memory.untouched({"checkpoints": torch.tensor(rows, device=case.device)})
    for row in rows:
        s, count = served[listed[row]]
        span = slice(int(starts[s]), int(starts[s]) + count)
        _, last = run(case, **tokens_of(case, call, span), initial_states=before[s : s + 1], return_final_states=True)
        assert same(last[0], kept[row]), (s, count)


def batches_change_no_bit(run: Run, case: Case) -> None:
    """A sequence in a batch has the same bits as alone. Checkpoints are counted through the flattened batch."""
    call, end = make(case, 3, 70), case.chunk
    positions = torch.tensor([end, 70, 141, 140 + end, 210, 211], device=case.device)
    plain, last, kept = run(case, **call, return_final_states=True, checkpoint_positions=positions, return_checkpoints=True)
    assert kept.dtype == F32 and same(kept[1], last[0]) and same(kept[4], last[2])
    for i in range(3):
        out, own = run(case, **cut(case, call, slice(i, i + 1)), return_final_states=True)
        assert same(out[0], plain[i]) and same(own[0], last[i])
    _, first = run(case, **cut(case, call, slice(2, 3), slice(0, end)), return_final_states=True)
    assert same(kept[3], first[0])
    out, none = run(case, **call, checkpoint_positions=positions[:0], return_checkpoints=True)
    assert same(out, plain) and none.shape[0] == 0


def states_may_go_where_they_come_from(run: Run, case: Case, lengths: Sequence[int], state: torch.dtype = BF16) -> None:
    """Final states may replace initial states, dense or in slots, and change no bit."""
    call = make(case, sum(lengths)) | {"cu_seqlens": starts_of(lengths, case.device)}
    before = states(case, len(lengths), state)
    out, last = run(case, **call, initial_states=before, return_final_states=True)
    pool, slots = torch.empty_like(before), torch.arange(len(lengths), device=case.device).roll(1)
    pool[slots] = before
    started = torch.ones(len(lengths), dtype=torch.bool, device=case.device)
    again = run(case, **call, state=pool, state_indices=slots.int(), has_initial_state=started)
    assert same(again, out) and same(pool[slots], last)
    again, _ = run(case, **call, initial_states=before, return_final_states=True, final_states_out=before)
    assert same(again, out) and same(before, last)


def states_at_positions_are_those_on_the_way(run: Run, case: Case) -> None:
    """Positions at segments' ends and within them change no bit of the rest. Positions where no chunk ends leave their rows unchanged."""
    lengths = (330, 70)
    call = make(case, sum(lengths)) | {"cu_seqlens": starts_of(lengths, case.device), "return_final_states": True}
    positions = torch.tensor([64, 100, 128, 192, 256, 320, 330, 394, 400])
    more = {"checkpoint_positions": positions, "checkpoints_out": torch.full((9, *case.state), NAN)}
    out, last = run(case, **call)
    found, ends, kept = run(case, **call, **more, return_checkpoints=True)
    assert same(found, out) and same(ends, last) and kept[1].isnan().all()
    wanted = exact(case, call, **more | {"checkpoints_out": kept.clone()}, return_checkpoints=True)["checkpoints"]
    rows = [0, 2, 3, 4, 5, 6, 7, 8]
    assert all(error(kept[i], wanted[i]) <= BOUNDS[BF16] for i in rows) and same(kept[6], last[0]) and same(kept[8], last[1])
