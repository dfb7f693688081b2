"""Plans of repeated calls are found without a GPU: launches are recorded."""

from __future__ import annotations

import pytest
import torch
from test_ops import Loaded
from test_ring import BF16, Step

import ssmgen
from ssmgen.calls import fast_path
from ssmgen.calls import operator as calls
from ssmgen.errors import ArgumentError


class Launched(list):
    """{operand: pointer} of each launch."""

    made = 0  # patterns


@pytest.fixture
def launched(monkeypatch, way) -> Launched:
    record = Launched()

    class Fake:
        def __init__(self, names):
            self.names = names

        def at(self, pointers):
            return lambda: record.append(dict(zip(self.names, pointers, strict=True)))

    def resolving(caller, named, options, pdl, objections=()):
        caller.checked(named, options, pdl, objections)
        record.made += 1
        return lambda pointers: Fake(named)

    monkeypatch.setattr(calls, "on_card", lambda call: True)
    monkeypatch.setattr(fast_path, "resolving", resolving)
    return record


def pointers(step: Step, **more: torch.Tensor) -> dict[str, int]:
    tensors = {"state": step.state, **step.inputs, **{n: t for n, t in step.options.items() if isinstance(t, torch.Tensor)}, **more}
    return {n: t.data_ptr() for n, t in tensors.items()}


def rings(step: Step) -> dict[str, torch.Tensor]:
    return {f"ring_{n}": t for n, t in zip(("k", "v", "g", "beta"), step.ring, strict=True) if t is not None}


def test_keywords_positions_and_rings_bring_the_same_pointers(launched):
    step = Step("gated_delta_rule", BF16)
    out = torch.empty_like(step.inputs["v"])
    for _ in range(2):
        assert step.function(state=step.state, **step.inputs, **step.options, out=out) is out
        step.function(step.state, *step.inputs.values(), **step.options, out=out)
        step.function(step.state, *step.inputs.values(), **step.options, out=out, update_state=False, ring=step.ring)
    assert launched.made == 3 and len(launched) == 6
    plain = pointers(step, out=out)
    assert launched[0] == launched[1] == launched[3] == plain
    assert launched[2] == launched[5] == pointers(step, out=out, **rings(step))


def test_keywords_in_any_order(launched):
    """Kernels take pointers in a separate, fixed order."""
    step = Step("gated_delta_rule", BF16)
    out = torch.empty_like(step.inputs["v"])
    named = {"state": step.state, **step.inputs, **step.options, "out": out}
    for _ in range(3):
        assert step.function(**named) is out
        assert step.function(**dict(reversed(named.items()))) is out
    for _ in range(3):
        assert step.function(**dict(reversed(named.items()))) is out
    assert len(launched) == 9 and all(call == pointers(step, out=out) for call in launched)


def test_as_many_arguments_by_other_names(launched):
    """Neither is taken for the one before it."""
    x, other, out = torch.zeros(3, 16), torch.zeros(3, 16), torch.zeros(3, 16)
    for _ in range(3):
        ssmgen.rms_norm(x, residual=other, out=out)
    with pytest.raises(TypeError, match="unexpected keyword 'resdual'"):
        ssmgen.rms_norm(x, resdual=other, out=out)
    conv = torch.zeros(3, 24), torch.zeros(3, 24, 3), torch.zeros(24, 4)
    for name in ("bias", "bias", "bias", "conv_state_indices", "bias"):
        given = torch.zeros(24) if name == "bias" else torch.zeros(3, dtype=torch.int32)
        ssmgen.causal_conv1d_update(*conv, **{name: given})
        assert launched[-1][name] == given.data_ptr() and len({"bias", "conv_state_indices"} & set(launched[-1])) == 1


def test_a_new_output_is_made_each_time(launched):
    step = Step("gated_delta_rule", BF16)
    outs = [step.function(step.state, **step.inputs, **step.options) for _ in range(3)]
    assert [call["out"] for call in launched] == [out.data_ptr() for out in outs] and launched.made == 1


def test_a_call_of_a_single_tensor(launched):
    """Each of them has rows that are not tensors of the call."""
    x = torch.randn(3, 16)
    for given in (x, x, x + 1, torch.randn(4, 16)):
        out = ssmgen.rms_norm(given)
        assert launched[-1] == {"x": given.data_ptr(), "out": out.data_ptr()} and out.shape == given.shape
    assert launched.made == 2


@pytest.mark.parametrize("again", [1, 3])
def test_calls_in_turn_of_one_form(launched, again):
    """The same names, other numbers of rows and other types: neither is taken for the one before it, however often that came."""
    one, two = Step("gated_delta_rule", BF16), Step("gated_delta_rule", BF16)
    fewer = {n: t[:2] for n, t in two.inputs.items()}
    options = two.options | {"state_indices": two.options["state_indices"][:2]}
    for _ in range(3):
        for _ in range(again):
            one.function(one.state, **one.inputs, **one.options, num_accepted_tokens=None)
            assert launched[-1] | pointers(one) == launched[-1]
        for _ in range(again):
            out = one.function(two.state, **fewer, **options, num_accepted_tokens=None)
            assert launched[-1]["q"] == two.inputs["q"].data_ptr() and len(out) == 2
        with pytest.raises(ArgumentError, match="num_accepted_tokens is a list"):
            one.function(one.state, **one.inputs, **one.options, num_accepted_tokens=[1])
    assert launched.made == 2 and len(launched) == 6 * again


def test_commits(launched):
    step, accepted = Step("kda", BF16), torch.tensor([1, 2, 3])
    for _ in range(3):
        assert ssmgen.kda_commit(step.state, step.ring, accepted, **step.options) is step.state
        assert ssmgen.kda_commit(step.state, ring=step.ring, num_accepted_tokens=accepted, **step.options) is step.state
    k, v, gk, beta = step.ring
    want = {"state": step.state, "k": k, "v": v, "gk": gk, "beta": beta, "num_accepted_tokens": accepted}
    want |= {n: t for n, t in step.options.items() if isinstance(t, torch.Tensor)}
    assert launched.made == 2 and all(call == {n: t.data_ptr() for n, t in want.items()} for call in launched)


@pytest.mark.parametrize("change", [{"scale": 0.5}, {"pad_slot_id": 3}, {"use_qk_l2norm": False}, {"pdl": False}, {"update_state": False}])
def test_what_is_no_tensor_tells_calls_apart(launched, change):
    step = Step("gated_delta_rule", BF16)
    defaults = {"scale": 1.0, "pad_slot_id": -1, "pdl": None, "update_state": True}
    for _ in range(2):
        for options in (defaults, defaults | change):
            step.function(step.state, **step.inputs, **step.options | options)
    assert launched.made == 2 and len(launched) == 4


def test_a_tensor_given_twice_is_not_taken_for_two(launched):
    step = Step("delta_rule", BF16)
    twice = step.inputs | {"k": step.inputs["q"]}
    for inputs in (twice, step.inputs, twice, {n: t[:, :2] for n, t in step.inputs.items()}):
        step.function(step.state, **inputs, **step.options)
    assert [call["k"] == call["q"] for call in launched] == [True, False, True, False]
    assert launched[1]["k"] == step.inputs["k"].data_ptr()
    assert launched[0] | {"out": 0} == launched[2] | {"out": 0}


def test_a_wrong_call_is_not_taken_for_a_right_one_bound_before(launched):
    """Without its gate a gated delta rule has the operands of a plain one; and an option that is objected to may change nothing else."""
    step = Step("delta_rule", BF16)
    options = {"state_indices": step.options["state_indices"], "use_qk_l2norm": True}
    ssmgen.delta_rule(step.state, **step.inputs, **options)
    ssmgen.bind(ssmgen.delta_rule, step.state, **step.inputs, **options)
    for run in (lambda f, *args, **kwargs: f(*args, **kwargs), ssmgen.bind):
        with pytest.raises(ArgumentError, match="g is a NoneType"):
            run(ssmgen.gated_delta_rule, step.state, **step.inputs, g=None, **options)
        with pytest.raises(ArgumentError, match="allow_neg_eigval is True and beta_sigmoid is False; expected both"):
            run(ssmgen.delta_rule, step.state, **step.inputs, **options, allow_neg_eigval=True)
    assert launched.made == 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"dt_limit": (0.0, 1.0)}, {"dt_limit": [0.0, 1.0]}), ({"dt_limit": (0.0, 1.0)}, {"dt_limit": (False, True)}),
        ({"pad_slot_id": 1}, {"pad_slot_id": 1.0}), ({"pad_slot_id": 1}, {"pad_slot_id": True}),
        ({"dt_softplus": True}, {"dt_softplus": 1}), ({"pdl": False}, {"pdl": 0}),
    ],
)  # fmt: skip
def test_what_equals_a_right_option_is_no_right_one(launched, right, wrong):
    x, bc = torch.zeros(3, 4, 8), torch.zeros(3, 1, 16)
    args = (torch.zeros(3, 4, 8, 16), x, torch.zeros(3, 4), -torch.ones(4), bc, bc.clone())
    ssmgen.selective_state_update(*args, **right)
    ssmgen.bind(ssmgen.selective_state_update, *args, **right)
    for run in (ssmgen.selective_state_update, lambda *args, **kwargs: ssmgen.bind(ssmgen.selective_state_update, *args, **kwargs)):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} is "):
            run(*args, **wrong)
    assert len(launched) == 1


def named(**tensors: torch.Tensor | None) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in tensors.items() if t is not None}


def test_a_convolution_in_place(launched):
    x, other = torch.zeros(3, 24), torch.zeros(3, 24)
    state, weight = torch.zeros(3, 24, 3), torch.zeros(24, 4)
    for out in (x, None, x, other, None):
        got = ssmgen.causal_conv1d_update(x, state, weight, activation="silu", out=out)
        assert launched[-1] == named(x=x, conv_state=state, weight=weight, out=got) and (out is None or got is out)
    assert launched.made == 2  # with an output and without


def test_pairs_and_two_results(launched):
    o, lse = [torch.zeros(5, 2, 64) for _ in range(2)], [torch.zeros(5, 2) for _ in range(2)]
    for _ in range(3):
        out, lse_out = ssmgen.combine_splits(o, lse, return_lse=True)
        assert out.shape == (5, 2, 64) and lse_out.shape == (5, 2)
        assert launched[-1] == named(o=o[0], o_other=o[1], lse=lse[0], lse_other=lse[1], out=out, lse_out=lse_out)
    assert launched.made == 1
    turned = ssmgen.combine_splits((o[1], o[0]), (lse[1], lse[0]))
    assert launched[-1] == named(o=o[1], o_other=o[0], lse=lse[1], lse_other=lse[0], out=turned) and launched.made == 2
    dense = ssmgen.combine_splits(torch.stack(o), torch.stack(lse))
    assert dense.shape == (5, 2, 64) and set(launched[-1]) == {"o", "lse", "out"} and launched.made == 3


@pytest.mark.parametrize("tokens", [None, 2])
def test_steps_of_one_token_and_of_several(launched, tokens):
    lead = (3,) if tokens is None else (3, tokens)
    x, bc, dt = torch.zeros(*lead, 4, 8), torch.zeros(*lead, 1, 16), torch.zeros(*lead, 4)
    state, A = torch.zeros(3, 4, 8, 16), -torch.ones(4)
    for _ in range(2):
        out = ssmgen.selective_state_update(state, x, dt, A, bc, bc.clone(), dt_softplus=True)
    assert launched[-1]["out"] == out.data_ptr() and launched[-1]["x"] == x.data_ptr() and launched.made == 1
    with pytest.raises(ArgumentError, match="dt is"):
        ssmgen.selective_state_update(state, x, dt[:1], A, bc, bc.clone(), dt_softplus=True)


def test_what_lies_between_two_kernels_is_made_each_time(launched):
    B, T, H, P, N = 2, 3, 2, 16, 32
    state, x, bc = torch.zeros(B, H, P, N), torch.zeros(B, T, H, P, dtype=BF16), torch.zeros(B, T, 1, N, dtype=BF16)
    old = torch.zeros(B, T, H, P, dtype=BF16), torch.zeros(B, 2, T, 1, N, dtype=BF16), *[torch.zeros(B, 2, H, T) for _ in range(2)]
    counts = [torch.zeros(B, dtype=torch.int32) for _ in range(2)]
    args = (state, *old, *counts, x, torch.zeros(B, T, H), -torch.ones(H), bc, bc.clone())
    for two in (True, False, True, False):
        out = ssmgen.replay_selective_state_update(*args, dt_softplus=True, two_kernels=two)
        assert launched[-1]["out"] == out.data_ptr() and ({"mix", "sums"} <= set(launched[-1])) is two
        assert launched[-1]["x"] == x.data_ptr()
    assert launched.made == 2


def test_a_product_ahead_of_the_kernels_is_made_each_time(launched, monkeypatch):
    """GDN-2's weighed v: of the tensors of each call, also where two of them are one, and of a call that is found again."""
    made = []
    monkeypatch.setattr(torch, "mul", lambda a, b, out: made.append((a.data_ptr(), b.data_ptr(), out.data_ptr())) or out)
    q, k, g, b = (torch.zeros(2, 5, 2, 32, dtype=BF16) for _ in range(4))
    v, w, other = (torch.zeros(2, 5, 2, 32, dtype=BF16) for _ in range(3))
    for weights in (w, other, w, v, v, other, other.float(), w.float()):
        out = ssmgen.chunk_gdn2(q, k, v, g, b, weights, scale=1.0)
        product = launched[-1]["v"]
        assert made[-1] == (v.data_ptr(), weights.data_ptr(), product) and len(made) == len(launched)
        assert product not in (v.data_ptr(), weights.data_ptr()) and launched[-1] | named(q=q, erase=b, out=out) == launched[-1]
    assert launched.made == 3  # with weights of v's dtype, with v itself, and with weights of f32
    for wrong, words in (({"w": w[:, :4]}, "w is"), ({"w": None}, "w is a NoneType"), ({"v": v.float()}, "float32")):
        with pytest.raises(ArgumentError, match=words):
            ssmgen.chunk_gdn2(**{"q": q, "k": k, "v": v, "g": g, "b": b, "w": w} | wrong, scale=1.0)
    assert len(made) == len(launched) == 8


def test_an_argument_that_is_no_operand_is_compared(launched):
    """A seed without rounds reaches no kernel. A call with it is found again, and differs from calls without it or with another type."""
    x, bc, state, A = torch.zeros(3, 4, 8), torch.zeros(3, 1, 16), torch.zeros(3, 4, 8, 16), -torch.ones(4)
    seeds = [torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), None]
    for seed in (*seeds, *seeds):
        out = ssmgen.selective_state_update(state, x, torch.zeros(3, 4), A, bc, bc.clone(), rand_seed=seed, philox_rounds=0)
        assert launched[-1]["out"] == out.data_ptr() and "rand_seed" not in launched[-1]
    assert launched.made == 3


def test_what_nothing_compares_is_not_taken_on_trust(launched):
    """A call with an object of an unknown type is planned each time."""

    class Number:
        def __index__(self):
            return 1

    x, window, weight = torch.zeros(3, 24), torch.zeros(3, 24, 3), torch.zeros(24, 4)
    for _ in range(2):
        assert ssmgen.causal_conv1d_update(x, window, weight, pad_slot_id=Number()).shape == x.shape
    assert not launched.made


def test_numbers_of_other_libraries_are_compared(launched):
    numpy = pytest.importorskip("numpy")
    x, window, weight = torch.zeros(3, 24), torch.zeros(3, 24, 3), torch.zeros(24, 4)
    for slot in (numpy.int64(7), numpy.int64(7), numpy.int32(7), 7, numpy.int64(8)):
        ssmgen.causal_conv1d_update(x, window, weight, pad_slot_id=slot)
    assert launched.made == 4 and len(launched) == 5


def test_a_subclass_of_ordinary_memory_is_found_again(launched):
    x, state, weight, bias = (torch.randn(s) for s in ((2, 8), (3, 8, 3), (8, 4), (8,)))
    bias = Loaded(bias, requires_grad=False)
    for _ in range(2):
        ssmgen.causal_conv1d_update(x, state, weight, bias, "silu", out=x)
    ssmgen.causal_conv1d_update(x, state, weight, bias.detach(), "silu", out=x)
    assert launched[0] == launched[1] == launched[2] and launched[0]["bias"] == bias.data_ptr() and launched.made == 2


def test_what_is_remembered_is_bounded(launched, monkeypatch):
    """New shapes and new options do not fill the memory of a process that runs for months."""
    monkeypatch.setattr(fast_path.Table, "limit", 8)
    window, weight = torch.zeros(40, 24, 3), torch.zeros(24, 4)
    for batch in range(1, 40):
        ssmgen.causal_conv1d_update(torch.zeros(batch, 24), window, weight)
    for pad_slot_id in range(-200, -1):
        ssmgen.causal_conv1d_update(torch.zeros(3, 24), window, weight, pad_slot_id=pad_slot_id)
    assert len(launched) == 39 + 199
    tables = [table.rows for table in fast_path._tables if table.rows]
    assert tables and all(len(rows) <= 8 for rows in tables)
    assert max(len(entries) for rows in tables for entries in rows.values()) == 64
