"""causal_conv1d and causal_conv1d_update without a GPU: reference, emulated kernels, laws, errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import conv_laws as laws
import pytest
import torch
from conv_cases import FIRST, I32, I64, LAST, POOL, RING, ROLL, SHORT, STATEFUL, Call, Case, UpdateCase, make, make_call, make_update
from conv_laws import LAST_AXIS, Draw, assert_matches, emulate, emulated, equal, expected
from conv_matrices import matrix, update_matrix
from emulated_calls import SM90, needs_emulator
from selection import costly, few
from ssu_cases import BF16, F16, F32
from varying import named

import ssmgen
from ssmgen.families.causal_conv1d import call as forward_op
from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d.spec import ConvProblem
from ssmgen.families.causal_conv1d_update import call as update_op
from ssmgen.families.causal_conv1d_update import spec as step
from ssmgen.families.causal_conv1d_update.operands import CHILDREN
from ssmgen.spec.kernel import Arch, KernelSpec, Pdl

# The reference.


@costly(80, 120)
@named(*matrix(), *update_matrix())
def test_reference_is_within_rounding_of_float64(case):
    call = make(case, "cpu")
    want = expected(call)
    call.run()
    assert_matches(call, want)


def test_reference_against_the_textbook_formula():
    """One channel in scalars: three tokens after two that a state remembers."""
    past, tokens, taps, bias = [0.5, -2.0], [1.0, 3.0, -0.25], [0.1, 0.2, 0.3], 0.7
    sums = [bias + sum(w * v for w, v in zip(taps, (past + tokens)[t : t + 3], strict=True)) for t in range(3)]
    want = [v / (1 + math.exp(-v)) for v in sums]
    x, state, weight = torch.tensor([[tokens]]), torch.tensor([[past]]), torch.tensor([taps])
    operands = {"weight": weight, "bias": torch.tensor([bias]), "activation": "swish"}
    out, final = ssmgen.causal_conv1d(x, **operands, initial_states=state, return_final_states=True)
    assert out.flatten().tolist() == pytest.approx(want, rel=1e-6) and final.flatten().tolist() == [3.0, -0.25]
    out = ssmgen.causal_conv1d_update(x, state, **operands)
    assert out.flatten().tolist() == pytest.approx(want, rel=1e-6) and torch.equal(state, final)


@pytest.mark.parametrize("last", [False, True])
def test_out_and_final_states_are_allocated_like_x(last):
    draw = Draw("cpu", BF16, last)
    x = draw.tokens(2, length=9)
    out, final = ssmgen.causal_conv1d(x, *draw.weights, return_final_states=True)
    assert out.shape == x.shape and out.stride() == x.stride() and out.dtype == final.dtype == BF16
    assert final.shape == (2, 24, 3) and (final.stride(1) == 1) == last
    out = ssmgen.causal_conv1d_update(x, draw.states(2), *draw.weights)
    assert out.shape == x.shape and out.stride() == x.stride()


# Emulated kernels.

forward, update = emulated(forward_op), emulated(update_op)


def features(case: Case | UpdateCase) -> set[Any]:
    """The generated text's inputs, without dtypes. Each is paired with the layout, or with the fate of the window."""
    problem = make(case, "cpu").problem
    held = {f.name: getattr(problem, f.name) for f in fields(problem) if f.name not in ("x", "weight", "bias", "silu", "state_len")}
    held["width"] = min(problem.width, 3)
    if isinstance(problem, ConvProblem):
        return {(problem.layout, problem.loads, *pair) for pair in held.items()}
    held["tokens"] = min(problem.tokens, 3)
    return {(main, *pair) for main in (problem.advance, problem.layout) for pair in held.items()}


def covering(cases: Iterable[Any]) -> list[Any]:
    """The cases that add a feature no earlier case has, and the cases whose names mark them as special."""
    seen: set[Any] = set()
    chosen = []
    for case in cases:
        new = features(case) - seen
        if new or any(word in case.id for word in ("-sequences", "none", "in-place", "packed-gaps", "longer-in")):
            chosen.append(case)
            seen |= new
    return chosen


def emulate_and_check(case: Any, spec: KernelSpec | None = None, arch: Arch = SM90) -> Call:
    call = make(case, "cpu")
    want = expected(call)
    emulate(call, spec, arch)
    assert_matches(call, want)
    return call


@needs_emulator
@named(*few([*covering(matrix()), *covering(update_matrix())]))
def test_kernels_are_within_rounding_of_float64(case):
    emulate_and_check(case)


@needs_emulator
@named(replace(FIRST, id="first", lengths=SHORT, **POOL), replace(LAST, id="last", **STATEFUL), UpdateCase("update", tokens=2))
def test_without_pdl_for_an_old_architecture(case):
    emulate_and_check(case, arch=Arch.parse("sm_80"))


SPREAD = [
    replace(FIRST, id="first-states", **STATEFUL),
    replace(FIRST, id="first-packed-shifted", layout="first_slice", lengths=(3, 0, 300, 1, 270), **POOL),
    replace(LAST, id="last-seq-idx", seq_idx=True),
    replace(LAST, id="last-odd-packed", layout="last_odd", dim=37, lengths=SHORT, **POOL),
    UpdateCase("shift-t3", tokens=3),
    UpdateCase("roll-channels-t5", ROLL, tokens=5, state="channels"),
    UpdateCase("ring-any-packed", RING, state="any", dim=37, layout="odd", lengths=(3, 1, 0, 9, 2), extra=2),
    UpdateCase("tree", tokens=6, parents=I32, saved="windows"),
]


@costly(3)
@needs_emulator
@named(*SPREAD)
def test_variants_are_bit_equal(case):
    space = conv.space if isinstance(case, Case) else step.space
    specs = [s for s in space(make(case, "cpu").problem, SM90) if s.pdl is Pdl.TRIGGER_TOP]
    chosen = {(s.vec, getattr(s, "vectors", 0)): s for s in specs[::-1] + specs[1::3]}  # the second half with other numbers of threads
    chosen = [*list(chosen.values())[::3], specs[0], specs[-1]]
    first = None
    for spec in chosen:
        call = emulate_and_check(case, spec)
        first = first or call.results()
        assert all(equal(a, b) for a, b in zip(call.results(), first, strict=True)), f"{spec} differs from {chosen[0]}"
    assert len(set(chosen)) >= 3


# Laws, by emulated kernels.


@needs_emulator
@LAST_AXIS
@pytest.mark.parametrize(("dtype", "width"), [(BF16, 4), (F32, 3)], ids=["bf16-w4", "f32-w3"])
def test_forward_equals_token_by_token_updates(dtype, width, last):
    laws.forward_equals_updates(forward, update, Draw("cpu", dtype, last, width=width))


@needs_emulator
@pytest.mark.parametrize("last", [False, True], ids=["windows", "long"])
def test_several_tokens_equal_single_ones(last):
    laws.several_tokens_equal_single_ones(update, Draw("cpu", BF16, last), 6 if last else 3, (3, 16, 20))


@needs_emulator
def test_several_tokens_in_a_ring_equal_single_ones():
    laws.several_tokens_equal_single_ones(update, Draw("cpu", BF16, True), 5, (2, 20), ring=True)


@needs_emulator
@pytest.mark.parametrize(("state_len", "tokens"), [(3, 1), (7, 3), (4, 6)])
def test_ring_equals_shift(state_len, tokens):
    laws.ring_equals_shift(update, Draw("cpu", F16, True), state_len, tokens)


@needs_emulator
@pytest.mark.parametrize(("last", "tokens"), [(False, 4), (True, 5)], ids=["windows", "channels"])
def test_speculation_equals_the_accepted_history(last, tokens):
    laws.speculation_equals_the_accepted_history(forward, update, Draw("cpu", BF16, last), tokens)


@needs_emulator
@pytest.mark.parametrize("law", [laws.a_chain_is_no_tree, laws.each_path_equals_the_path_alone, laws.the_order_of_siblings_changes_nothing])
@pytest.mark.parametrize(("last", "state_len", "width"), [(False, 3, 4), (False, 4, 4), (True, 6, 3)], ids=["runs", "longer", "channels"])
def test_draft_trees(law, last, state_len, width):
    law(update, Draw("cpu", BF16, last, width=width), state_len)


@needs_emulator
@LAST_AXIS
def test_packed_sequences_equal_each_alone(last):
    laws.packed_equals_each_sequence(forward, Draw("cpu", BF16, last))


@needs_emulator
@LAST_AXIS
def test_segments_equal_sequences(last):
    laws.segments_equal_sequences(forward, Draw("cpu", BF16, last))


@needs_emulator
@LAST_AXIS
def test_split_at_any_point_equals_the_whole(last):
    laws.split_equals_whole(forward, Draw("cpu", BF16, last), tuple(range(1, 24)), 24)
    laws.split_equals_whole(forward, Draw("cpu", BF16, last), (255, 256, 257, 511, 512, 513, 600), 601)


# Errors.


def bad(case: Any, change: dict[str, Any]) -> str:
    return make(case, "cpu").refused(change)


TREE = {name: torch.zeros(6, 2, dtype=I32) for name in CHILDREN}
WHOLE = replace(FIRST, id="whole", length=16, batch=2)
PACKED = replace(LAST, id="packed", lengths=(3, 0, 4), **POOL)
SPECULATIVE = UpdateCase("speculative", ROLL, tokens=4, batch=5)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (WHOLE, {"x": None}, "x is a NoneType; expected a tensor"),
        (WHOLE, {"x": lambda k: k["x"][0]}, "x is [12, 16]; expected [batch, dim, length]"),
        (WHOLE, {"x": lambda k: k["x"].double()}, "x is torch.float64; expected float32, float16 or bfloat16"),
        (WHOLE, {"weight": lambda k: k["weight"][:5]}, "weight is [5, 4]; expected [dim, width] = [12, 4]"),
        (WHOLE, {"weight": lambda k: k["weight"][:, 0]}, "weight is [12]; expected [dim, width]"),
        (WHOLE, {"weight": lambda k: k["weight"][:, :0]}, "weight is [12, 0]"),
        (WHOLE, {"bias": lambda k: k["bias"][:3]}, "bias is [3]; expected [dim] = [12]"),
        (WHOLE, {"bias": lambda k: k["bias"].requires_grad_()}, "bias requires grad"),
        (WHOLE, {"activation": "gelu"}, "activation is 'gelu'; expected None, 'silu' or 'swish'"),
        (WHOLE, {"activation": ["silu"]}, "activation is ['silu']"),
        (WHOLE, {"pdl": "yes"}, "pdl is 'yes'"),
        (WHOLE, {"out": lambda k: k["x"]}, "out overlaps x in memory"),
        (WHOLE, {"out": lambda k: k["out"][:1].expand(2, -1, -1)}, "two of its elements share memory"),
        (WHOLE, {"out": lambda k: k["out"].float()}, "out is float32; expected bfloat16, the dtype of x"),
        (WHOLE, {"out": lambda k: k["out"][..., :3]}, "out is [2, 12, 3]; expected [batch, dim, length]"),
        (WHOLE, {"seq_idx": torch.zeros(2, 16, dtype=I64)}, "seq_idx is int64; expected int32"),
        (WHOLE, {"seq_idx": torch.zeros(2, 15, dtype=I32)}, "seq_idx is [2, 15]; expected [batch, length] = [2, 16]"),
        (WHOLE, {"initial_states": torch.zeros(2, 12, 4, dtype=BF16)}, "initial_states is [2, 12, 4]; "
            "expected [sequences, dim, width - 1]"),
        (WHOLE, {"initial_states": torch.zeros(2, 12, 3)}, "initial_states is float32; expected bfloat16, the dtype of x"),
        (WHOLE, {"final_states_out": torch.zeros(1, 12, 3, dtype=BF16)}, "final_states_out is [1, 12, 3]"),
        (WHOLE, {"conv_state_indices": torch.zeros(2, dtype=I32)}, "conv_state_indices is given without conv_states"),
        (WHOLE, {"has_initial_state": torch.ones(2, dtype=torch.bool)}, "has_initial_state is given without conv_states"),
        (WHOLE, {"conv_states": torch.zeros(1, 12, 3, dtype=BF16)}, "conv_states has 1 slots; expected 2, one per sequence"),
        (WHOLE, {"conv_states": torch.zeros(9, 12, 6, dtype=BF16)}, ". Of longer states, pass the slice that holds the history"),
        (WHOLE, {"x": torch.zeros(2, 12, 16, dtype=BF16, device="meta")}, "weight is on cpu, x is on meta"),
        (
            replace(WHOLE, initial=True),
            {"conv_states": torch.zeros(2, 12, 3, dtype=BF16)},
            "initial_states is given with conv_states; expected one: a pool holds both states",
        ),
        (PACKED, {"x": lambda k: k["x"].expand(2, -1, -1)}, "x is [2, 40, 7]; expected [dim, tokens] or [1, dim, tokens]"),
        (PACKED, {"query_start_loc": torch.zeros(0, dtype=I32)}, "query_start_loc is empty"),
        (PACKED, {"query_start_loc": torch.zeros(4)}, "query_start_loc is torch.float32; expected int32 or int64"),
        (PACKED, {"seq_idx": lambda k: torch.zeros(1, 7, dtype=I32)}, "seq_idx and query_start_loc are both given; "
            "expected one: each divides the length"),
        (PACKED, {"has_initial_state": torch.ones(3, dtype=I32)}, "has_initial_state is int32; expected bool"),
        (PACKED, {"conv_state_indices": torch.ones(2, dtype=I32)}, "conv_state_indices is [2]; expected [sequences] = [3]"),
        (PACKED, {"conv_states": lambda k: k["conv_states"][:1].expand(9, -1, -1)}, "conv_states has strides"),
        (UpdateCase("u"), {"x": lambda k: k["x"][0]}, "x is [40]; expected [batch, dim(, T)]"),
        (UpdateCase("u"), {"out": lambda k: k["out"][:3]}, "out is [3, 40]; expected [6, 40], the shape of x"),
        (UpdateCase("u"), {"conv_state": lambda k: k["conv_state"][..., 1:]}, "of state_len 2; expected width - 1 = 3 or more"),
        (UpdateCase("u"), {"conv_state": lambda k: k["conv_state"][:, 1:]}, "; expected [slots, dim, state_len] = [slots, 40, 3 or more]"),
        (UpdateCase("u"), {"conv_state": lambda k: k["conv_state"].half()}, "conv_state is float16; expected bfloat16, the dtype of x"),
        (UpdateCase("u"), {"conv_state_indices": None, "conv_state": lambda k: k["conv_state"][:4]}, "conv_state has 4 slots; expected 6"),
        (UpdateCase("u"), {"conv_state": lambda k: k["conv_state"][:1].expand(9, -1, -1)}, "two of its elements share memory"),
        (UpdateCase("u"), {"intermediate_state_indices": torch.zeros(6, dtype=I32)}, "given without intermediate_conv_window"),
        (UpdateCase("u"), {"intermediate_conv_window": torch.zeros(6, 40, 3, dtype=BF16)}, "expected [batch, T, dim, width - 1] ="),
        (UpdateCase("u"), {"intermediate_conv_window": torch.zeros(5, 1, 40, 3, dtype=BF16)}, "[6 or more, 1 or more, 40, 3]"),
        (UpdateCase("u"), {"query_start_loc": torch.zeros(0, dtype=I32)}, "query_start_loc is empty"),
        (UpdateCase("u", lengths=(1, 2)), {"x": lambda k: k["x"][None]}, "x is [1, 3, 40]; expected [tokens, dim], as "
            "query_start_loc is given"),
        (UpdateCase("u", tokens=2), dict.fromkeys(CHILDREN[:2], torch.zeros(6, 2, dtype=I32)), "for a tree by children"),
        (UpdateCase("u", tokens=2), dict.fromkeys(("parents", *CHILDREN), torch.zeros(6, 2, dtype=I32)), "are both given; "
            "expected one: each describes the tree. Leave out one"),
        (UpdateCase("u", lengths=(1, 2)), dict.fromkeys(CHILDREN, torch.zeros(2, 2, dtype=I32)), "is given with query_start_loc; "
            "expected parents for packed sequences"),
        (UpdateCase("u", tokens=129), dict.fromkeys(CHILDREN, torch.zeros(6, 129, dtype=I32)), "tokens per sequence; "
            "expected at most 128. Pass parents"),
        (UpdateCase("u", tokens=2), TREE | {"next_siblings": torch.zeros(6, 2, dtype=I64)}, "; expected one dtype for all"),
        (UpdateCase("u", tokens=2), TREE | {"parents_out": torch.zeros(1, dtype=I32).expand(6, 2)}, "two of its elements share memory"),
        (UpdateCase("u", tokens=2), {"parents": torch.zeros(6, 3, dtype=I32)}, "parents is [6, 3]; expected [batch, T] = [6, 2]"),
        (UpdateCase("u", tokens=2), {"parents": torch.zeros(6, 2)}, "parents is torch.float32; expected int32 or int64"),
        (UpdateCase("u", tokens=2), {"parents": torch.zeros(6, 2, dtype=I32), "out": lambda k: k["x"]}, "out overlaps x in memory"),
        (UpdateCase("u", lengths=(1, 2)), {"parents": torch.zeros(2, dtype=I32)}, "parents is [2]; expected [batch, T]"),
        (UpdateCase("u", RING), {"cache_seqlens": torch.zeros(5, dtype=I32)}, "cache_seqlens is [5]; expected [batch] = [6]"),
        (UpdateCase("u", RING), {"cache_seqlens": torch.zeros(6)}, "cache_seqlens is torch.float32; expected int32 or int64"),
        (SPECULATIVE, {"conv_state": lambda k: k["conv_state"][..., 1:]}, "of state_len 5; expected width - 2 + T = 6 or more"),
        (SPECULATIVE, {"cache_seqlens": torch.zeros(5, dtype=I32)}, "cache_seqlens and num_accepted_tokens are both given; expected one"),
        (UpdateCase("u", tokens=2), {"out": lambda k: k["conv_state"][:6, :, :2]}, "out overlaps conv_state in memory"),
        (UpdateCase("u", batch=7), {"x": lambda k: k["x"][:6], "out": lambda k: k["x"][1:], "conv_state_indices": None}, "out overlaps x"),
        (UpdateCase("u", batch=4, tokens=4, dim=4), {"out": lambda k: k["x"].transpose(0, 2)}, "out overlaps x in memory"),
    ],
)  # fmt: skip
def test_bad_input(case, change, words):
    assert words in bad(case, change)


def test_everything_wrong_in_one_message():
    wrong = {
        "bias": lambda k: k["bias"].double(), "activation": "relu", "pdl": 3, "has_initial_state": torch.ones(3), "out": torch.zeros(40, 7),
        "conv_state_indices": torch.ones(2, dtype=I32), "seq_idx": torch.zeros(1, 7, dtype=I32),
    }  # fmt: skip
    assert bad(PACKED, wrong).count("\n  - ") >= 7
    wrong = {
        "weight": lambda k: k["weight"].double(), "activation": 1, "cache_seqlens": torch.zeros(5), "pdl": "no",
        "conv_state": torch.zeros(9, 40, 2, dtype=BF16), "intermediate_state_indices": torch.zeros(2, dtype=I32),
    }  # fmt: skip
    assert bad(SPECULATIVE, wrong).count("\n  - ") >= 7


def test_a_long_stride_is_refused():
    x = torch.empty_strided((2, 12, 16), (2**33, 2**32, 1), device="meta", dtype=BF16)
    assert "below 2^32" in bad(WHOLE, {"x": x})


def test_explain_and_supported_of_a_call_without_a_gpu():
    call = make_update(UpdateCase("u"), "cpu")
    found = ssmgen.explain(ssmgen.causal_conv1d_update, **call.kwargs, arch="sm_90a")
    assert found.chosen.rule == "single" and found.chosen.spec.width == 4 and "-> single" in str(found)
    whole = make_call(WHOLE, "cpu")
    assert ssmgen.supported(ssmgen.causal_conv1d, **whole.kwargs, arch="sm_80") == (True, [])
    yes, reasons = ssmgen.supported(ssmgen.causal_conv1d, **whole.kwargs | {"activation": "tanh", "pdl": 7}, arch="sm_90a")
    assert not yes and len(reasons) == 2
    wide = torch.zeros(12, 9, dtype=BF16)
    assert ssmgen.supported(ssmgen.causal_conv1d, **whole.kwargs | {"weight": wide}, arch="sm_90a") == (
        False,
        ["weight is [12, 9], of width 9; expected a width of 1 … 8"],
    )
