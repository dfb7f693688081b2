"""selective_state_update of several tokens without a GPU: the reference, the errors, and the kernels emulated."""

from __future__ import annotations

from dataclasses import replace

import decode_cases as laws
import pytest
import ssu_token_cases as of
import torch
from bits import same as equal
from emulated_calls import SM90, emulate, needs_emulator
from la_cases import I32, I64
from selection import costly, few
from ssu_cases import BF16, F16, F32
from ssu_token_cases import Call, Case, make_call, matrix

import ssmgen
from ssmgen.engine.stochastic_reference import stored
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.selective_state_update import planning as op
from ssmgen.families.selective_state_update.spec import space
from ssmgen.select import registry

pytestmark = pytest.mark.usefixtures("one_thread")
WRITTEN = ("state", "out", "intermediate_states")


@costly(12)
@pytest.mark.parametrize("case", few(matrix()), ids=lambda c: c.id)
def test_reference_is_within_rounding_of_float64(case):
    laws.is_within_rounding(of, case, lambda call: call.run(), any_order=True)


@costly(6)
@needs_emulator
@pytest.mark.parametrize("case", few(matrix()), ids=lambda c: c.id)
def test_within_rounding_of_float64(case):
    laws.is_within_rounding(of, case)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("name", ["t4-bf16", "t4-no-pool", "ragged-f32"])
def test_prefetch_stays_within_the_pool(name):
    laws.prefetch_stays_within_the_pool(of, next((c for c in matrix() if c.id == name), Case("no-pool", index=None, batch=2)))


SMALL = {"heads": 2, "groups": 1, "headdim": 32, "d_state": 64, "index": None, "batch": 2, "out": F32}
VARIED = [
    Case("f32", **SMALL, kept=F32, z=True), Case("bf16-t9", **SMALL, state=BF16, tokens=9),
    Case("n96", **SMALL | {"d_state": 96}, state=F16),
    Case("noisy", **SMALL, state=F16, kept=BF16, seed="slots"), Case("noisy-tree", **SMALL, state=BF16, kept=F16, parents=I32, seed="one"),
]  # fmt: skip


@costly(1)
@needs_emulator
@pytest.mark.parametrize("case", VARIED, ids=lambda c: c.id)
def test_variants_are_bit_equal(case):
    laws.variants_are_equal(of, case, laws.lane_maps(space(make_call(case, "cpu").problem, SM90), 6))


STEPS = [
    Case("plain"), Case("gate", z=True, x=F32), Case("limit", limit=(0.01, 0.1)),
    Case("bare", D=False, dt_bias=False, softplus=False, x=F16),
]  # fmt: skip


@costly(2)
@needs_emulator
@pytest.mark.parametrize("case", STEPS, ids=lambda c: c.id)
def test_token_t_equals_single_steps(case):
    laws.tokens_equal_single_steps(of, replace(case, **SMALL, tokens=9, kept=F32), of.one_token)


@needs_emulator
def test_a_sequence_in_company_equals_it_alone():
    """A sequence gives equal results in a packed batch and alone, in a call with a tokens axis."""
    case = Case("c", **SMALL | {"batch": 4}, lengths=(3, 0, 10, 1), z=True)
    packed, apart = make_call(case, "cpu"), make_call(case, "cpu")
    emulate(packed)
    for b, s in enumerate(apart.sequences):
        span = slice(s.start, s.start + s.tokens)
        kwargs = {n: v[None, span] if n in ("x", "dt", "B", "C", "z", "out") else v for n, v in apart.kwargs.items() if n != "cu_seqlens"}
        if s.tokens:
            emulate(Call(replace(case, lengths=()), apart.memory, kwargs | {"state": apart.kwargs["state"][b : b + 1]}, [s]))
    assert equal(packed.kwargs["out"], apart.kwargs["out"]) and equal(packed.kwargs["state"][:4], apart.kwargs["state"][:4])


@needs_emulator
def test_siblings_in_a_tree_are_alike_and_a_chain_of_f32_states_is_none():
    case = Case("c", **SMALL, tokens=4, kept=BF16, parents=I32)
    call = make_call(case, "cpu")
    for n in ("x", "dt", "B", "C"):  # tokens 1, 2 and 3 are the same, and all follow token 0
        call.kwargs[n][:, 1:] = call.kwargs[n][:, 1:2]
    call.kwargs["parents"][:] = torch.tensor([-1, 0, 0, 0])
    emulate(call)
    out, kept = call.kwargs["out"], call.kwargs["intermediate_states"]
    assert all(equal(out[:, 1], out[:, t]) and equal(kept[:2, 1], kept[:2, t]) for t in (2, 3)) and not equal(out[:, 0], out[:, 1])
    chain, plain = make_call(replace(case, kept=F32), "cpu"), make_call(replace(case, kept=F32, parents=None), "cpu")
    chain.kwargs["parents"][:] = torch.tensor([0, 0, 1, 2])
    emulate(chain)
    emulate(plain)
    assert all(equal(chain.kwargs[n], plain.kwargs[n]) for n in WRITTEN)


@costly(2)
@needs_emulator
@pytest.mark.parametrize("columns", [1, 4])
def test_every_count_of_accepted_tokens(columns):
    """A count from 1 to the last column names the initial slot; any other count is padding."""
    counts = torch.tensor([-(2**31), -1, *range(columns + 2), 2**31 - 1], dtype=I32)
    case = Case("c", **SMALL | {"batch": len(counts), "index": I32}, tokens=2, update=False)
    call = make_call(replace(case, kept=F32), "cpu")
    table = torch.arange(len(counts) * columns, dtype=I32).view(-1, columns)
    state = torch.randn(len(counts) * columns, *call.kwargs["state"].shape[1:])
    picked = call.kwargs | {"state": state, "state_indices": table, "num_accepted_tokens": counts}
    kept = call.kwargs["intermediate_states"]
    emulate(Call(case, call.memory, picked, []))
    out, states = call.kwargs["out"].clone(), kept.clone()
    valid = (counts >= 1) & (counts <= columns)
    start = torch.where(valid, table.gather(1, (counts.long() - 1).clamp(0, columns - 1)[:, None])[:, 0], -1).int()
    kept.fill_(7.0)
    emulate(Call(case, call.memory, call.kwargs | {"state": state, "state_indices": start}, []))
    assert valid.sum() == columns and equal(out, call.kwargs["out"]) and equal(states, kept)
    assert not out[~valid].any() and (kept[: len(counts)][~valid] == 7).all() and out[valid].all()


NOISY = [
    Case("t1-f16", **SMALL | {"index": I32, "batch": 6}, tokens=None, state=F16, seed="slots"),
    Case("t1-bf16-dst", **SMALL | {"index": I32, "batch": 6}, tokens=None, state=BF16, dst="row", seed="slots", rounds=1),
    Case("t3-bf16", **SMALL | {"index": I64, "batch": 6}, tokens=3, state=BF16, kept=F16, seed="slots"),
    Case("t3-f16-each", **SMALL | {"index": I32, "batch": 6}, tokens=3, state=F16, dst="token", seed="one", rounds=4, kept=BF16),
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("case", NOISY, ids=lambda c: c.id)
def test_noise_is_that_of_the_seed_and_the_element(case):
    """Bit for bit: the f32 states of the same call without noise, from the same 16-bit ones, rounded by the reference."""
    call, plain = make_call(case, "cpu"), make_call(replace(case, seed="", state=F32, kept=F32 if case.kept else None), "cpu")
    plain.kwargs["state"].copy_(call.kwargs["state"])
    emulate(call)
    emulate(plain)
    seeds, rounds = call.views["rand_seed"], case.rounds
    for s in call.sequences:
        for slot in s.targets.values():
            want = stored(plain.kwargs["state"][slot], case.state, int(seeds[slot]), rounds, slot)
            assert equal(call.kwargs["state"][slot], want), f"slot {slot}"
        for t in range(s.tokens if case.kept and s.slot >= 0 else 0):
            want = stored(plain.kwargs["intermediate_states"][s.kept, t], case.kept, int(seeds[s.slot]), rounds, s.slot, 1 + t)
            assert equal(call.kwargs["intermediate_states"][s.kept, t], want), f"sequence {s.kept}, token {t}"


@pytest.mark.parametrize("tokens", [None, 3])
def test_no_seed_or_no_rounds_is_to_nearest(tokens):
    case = Case("c", **SMALL, tokens=tokens, state=BF16)
    plain, off = make_call(case, "cpu"), make_call(case, "cpu")
    off.kwargs |= {"rand_seed": torch.tensor([3]), "philox_rounds": 0}
    plain.run()
    off.run()
    assert equal(plain.kwargs["state"], off.kwargs["state"])
    noisy = make_call(replace(case, seed="one"), "cpu")
    noisy.run()
    assert not equal(plain.kwargs["state"], noisy.kwargs["state"]) and equal(plain.kwargs["out"], noisy.kwargs["out"])


# Errors.

INT = torch.zeros(6, dtype=I32)
TREE = {"parents": torch.zeros(6, 4, dtype=I32)}
KEPT = torch.zeros(6, 4, 4, 64, 128)
WRONG = [
    ({"x": lambda n: n["x"][:, :3]}, "dt is [6, 4, 4]; expected [batch, tokens, heads, headdim] = [6, 3, 4, 64] or [batch, "
        "tokens, heads] = "),
    ({"x": lambda n: n["x"][None]}, "x is [1, 6, 4, 4, 64]; expected [batch, tokens, heads, headdim]"),
    ({"B": lambda n: n["B"][:, 0]}, "; expected a tokens axis in both or in neither"),
    ({"B": lambda n: n["B"][:, :, :1].expand(-1, -1, 3, -1)}, "B is [6, 4, 3, 128] but heads 4 is not a multiple of its groups 3"),
    ({"state": lambda n: n["state"][:, 0]}, "; expected [slots, heads, headdim, d_state]"),
    ({"state": lambda n: n["state"][:1].expand(8, -1, -1, -1)}, "which overlap"),
    ({"state_indices": None, "state": lambda n: n["state"][:5]}, "state has 5 slots; expected 6, one per sequence"),
    ({"dst_state_indices": INT.long()}, "state_indices is torch.int32 and dst_state_indices is torch.int64"),
    ({"dst_state_indices": INT[:, None]}, "dst_state_indices is [6, 1]; expected [batch] = [6] or [batch, tokens] = [6, 4]"),
    ({"dst_state_indices": INT, "update_state": False}, "dst_state_indices is given with update_state=False, which writes no state"),
    ({"dst_state_indices": INT, "state_indices": None}, "dst_state_indices is given without state_indices"),
    ({"num_accepted_tokens": INT}, "state_indices is [6]; expected [batch, columns]"),
    ({"num_accepted_tokens": INT, "state_indices": INT[:, None].expand(6, 4)}, "columns of state_indices; expected a slot to write"),
    ({"num_accepted_tokens": INT.float()}, "num_accepted_tokens is torch.float32; expected int32 or int64"),
    ({"cu_seqlens": INT}, "with cu_seqlens; expected packed sequences,"), (TREE, "parents is given without intermediate_states"),
    (TREE | {"intermediate_states": KEPT, "parents": INT}, "parents is [6]; expected [batch, tokens] = [6, 4]"),
    (TREE | {"intermediate_states": KEPT, "parents": TREE["parents"].bool()}, "parents is torch.bool; expected int32 or int64"),
    ({"intermediate_state_indices": INT}, "intermediate_state_indices is given without intermediate_states; expected both"),
    ({"intermediate_states": KEPT[:, :3]}, "intermediate_states is [6, 3, 4, 64, 128]; expected [batch or more, tokens or more"),
    ({"intermediate_states": KEPT[:5]}, "intermediate_states is [5, 4, 4, 64, 128]; expected [batch or more, tokens or more"),
    ({"intermediate_states": KEPT.double()}, "intermediate_states is torch.float64"), ({"update_state": 2}, "update_state is 2"),
    ({"intermediate_states": KEPT[:, :1].expand(-1, 4, -1, -1, -1)}, "two of its elements share memory"),
    ({"out": lambda n: n["x"]}, "out overlaps x in memory"), ({"dt_limit": (1.0, 0.0)}, "dt_limit is (1.0, 0.0)"),
    ({"rand_seed": torch.zeros(1, dtype=I32)}, "rand_seed is int32; expected int64"),
    ({"rand_seed": torch.zeros(1, dtype=I64)}, "rand_seed is given and no written state is rounded"),
    ({"rand_seed": torch.zeros(2, dtype=I64), "intermediate_states": KEPT.half()}, "rand_seed is [2]; expected [slots] = ["),
    ({"rand_seed": torch.zeros(1, dtype=I64), "philox_rounds": -1}, "philox_rounds is -1; expected 0 … 32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_bad_input(change, words):
    call = make_call(Case("bad"), "cpu")
    named = call.kwargs | {k: v(call.kwargs) if callable(v) else v for k, v in change.items()}
    with pytest.raises(ArgumentError) as e:
        ssmgen.selective_state_update(**named)
    assert not call.memory.untouched({}), "something was written"
    assert words in str(e.value) and "Nothing was launched and the state is unchanged." in str(e.value)


@pytest.mark.parametrize("change", [{"seed": "one", "state": F32}, {"seed": "one", "state": BF16, "update": False, "kept": F32}])
@pytest.mark.parametrize("tokens", [None, 2])
def test_noise_for_nothing_is_refused(change, tokens):
    with pytest.raises(ArgumentError, match="rand_seed is given and no written state is rounded"):
        make_call(Case("c", **SMALL, tokens=tokens, **change), "cpu")


def test_mamba_1_has_one_token():
    x, A, B = torch.zeros(2, 3, 16), torch.zeros(16, 8), torch.zeros(2, 3, 8)
    with pytest.raises(ArgumentError, match="everal tokens need heads"):
        ssmgen.selective_state_update(torch.zeros(2, 16, 8), x, x, A, B, B)
    with pytest.raises(ArgumentError, match="everal tokens need heads"):
        ssmgen.selective_state_update(torch.zeros(2, 16, 8), x, x, A, B, B, update_state=False)


def test_untied_operands_have_no_kernel():
    call = make_call(Case("c", **SMALL), "cpu")
    untied = call.kwargs | {"A": call.kwargs["A"][:, None, None].repeat(1, 32, 64)}
    assert ssmgen.supported(ssmgen.selective_state_update, **call.kwargs, arch="sm_90a") == (True, [])
    yes, reasons = ssmgen.supported(ssmgen.selective_state_update, **untied, arch="sm_90a")
    assert not yes and "A, dt or dt_bias differs within a head; expected one value per head for several tokens" in reasons[0]
    problem = replace(call.problem, tied=False)
    with pytest.raises(UnsupportedError, match="A, dt or dt_bias differs within a head; expected one value per head for several tokens"):
        registry.select(op.OPERATOR, problem, 2, SM90, True)


@pytest.mark.parametrize("packed", [False, True])
def test_no_sequences_and_no_tokens(packed):
    state, empty = torch.ones(3, 2, 8, 8), torch.zeros(0, 2, 8)
    more = {"cu_seqlens": torch.zeros(3, dtype=I32)} if packed else {"update_state": False}
    out = ssmgen.selective_state_update(state, empty, empty[..., 0], -torch.ones(2), empty, empty, **more)
    assert out.shape == (0, 2, 8) and (state == 1).all()


def test_bind_and_explain():
    call, eager = make_call(Case("c", **SMALL, kept=BF16), "cpu"), make_call(Case("c", **SMALL, kept=BF16), "cpu")
    assert ssmgen.bind(ssmgen.selective_state_update, **call.kwargs)() is call.kwargs["out"]
    eager.run()
    assert all(equal(call.kwargs[n], eager.kwargs[n]) for n in WRITTEN)
    found = ssmgen.explain(ssmgen.selective_state_update, **call.kwargs, arch="sm_90a")
    assert found.operator == op.OPERATOR and found.chosen.spec.intermediate_states.value == "bf16"
    fresh = {n: v for n, v in call.kwargs.items() if n != "out"}
    assert ssmgen.bind(ssmgen.selective_state_update, **fresh)().shape == call.kwargs["x"].shape


# Registration with torch.


# Kernels, each broken by one edit, which the check must catch.

NINE = Case("nine", **SMALL, tokens=9)
BY_NAME = {c.id: c for c in matrix()}
ROUND = "for (auto& row : h) for (auto& part : row) { Pack<State, kVec> r; pack(part, r); unpack(r, part); }"
EDITS = {
    "no wait": (NINE, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "no padding": (BY_NAME["t4-f32"], "if (u64(slot) >= u64(slots) || slot == pad_slot_id)", "if (false)", "outside of every operand"),
    "no barrier before a chunk": (NINE, "if (first) {\n      __syncthreads();", "if (first) {", "in shared memory"),
    "no barrier after staging": (NINE, "    __syncthreads();\n\n    for (u32 c", "    for (u32 c", "in shared memory"),
    "wrong decay": (NINE, "exp2_approx(delta * kLog2E", "exp2_approx(0.999f * delta * kLog2E", "off by"),
    "wrong group": (BY_NAME["t4-f32"], "group = head / kHeadsPerGroup", "group = head % 2", "off by"),
    "rounded between tokens": (replace(NINE, state=BF16), "const u32 t = first + c;", f"const u32 t = first + c;{ROUND}", "off by"),
    "first column": (BY_NAME["t4-accepted"], "column * state_indices_column", "0 * state_indices_column", "off by"),
    "states kept past the last": (BY_NAME["ragged-accepted"], "if (t < kept_columns)", "if (true)", "changed outside"),
    "row that is not there": (BY_NAME["t4-kept-wide"], "u64(kept_row) < u64(kept_rows)", "true", "outside"),
    "later parents": (BY_NAME["tree-f32"], "u64(chunk.parent) < earlier", "u64(chunk.parent) < 99", "off by"),
    "no parents": (BY_NAME["tree-f32"], "parent >= 0) {", "parent >= 99) {", "off by"),
    "destinations past the last": (BY_NAME["ragged-each"], "t < dst_columns ? ", "true ? ", "changed outside"),
    "ungated": (BY_NAME["t4-gate"], "result = result * z_staged[c * kTile + row_in_tile];", "", "off by"),
}  # fmt: skip


@costly(4)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    case, *edit = EDITS[edit]
    laws.a_mistake_is_found(of, case, tuple(edit))
