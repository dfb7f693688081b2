"""How a linear-attention call finds the plan of one like it, without a GPU: what is launched is recorded."""

from __future__ import annotations

import pytest
import torch
from test_ring import BF16, Step

import ssmgen
from ssmgen import runtime
from ssmgen.errors import ArgumentError
from ssmgen.ops import linear_attention_call as op


class Launched(list):
    """{operand: pointer} of each launch."""

    made = 0  # signatures


@pytest.fixture
def launched(monkeypatch) -> Launched:
    calls = Launched()

    class Fake:
        def __init__(self, names):
            self.names = names

        def at(self, pointers):
            return lambda: calls.append(dict(zip(self.names, pointers, strict=True)))

    def new_signature(call, views, named, given, places, constants=()):
        calls.made += 1
        return runtime.Signature(given, lambda pointers: Fake(tuple(named)), places, constants)

    op._signatures.clear()
    monkeypatch.setattr(op, "_on_card", lambda call: True)
    monkeypatch.setattr(op, "_new_signature", new_signature)
    yield calls
    op._signatures.clear()


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


def test_a_new_output_is_made_each_time(launched):
    step = Step("gated_delta_rule", BF16)
    outs = [step.function(step.state, **step.inputs, **step.options) for _ in range(3)]
    assert [call["out"] for call in launched] == [out.data_ptr() for out in outs] and launched.made == 1


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
    """Which of the two places it came from cannot be told, so such calls are found by their operands, apart from the others."""
    step = Step("delta_rule", BF16)
    twice = step.inputs | {"k": step.inputs["q"]}
    for inputs in (twice, step.inputs, twice, {n: t[:, :2] for n, t in step.inputs.items()}):
        step.function(step.state, **inputs, **step.options)
    assert [call["k"] == call["q"] for call in launched] == [True, False, True, False] and launched.made == 3
    assert launched[1]["k"] == step.inputs["k"].data_ptr()
    assert launched[0] | {"out": 0} == launched[2] | {"out": 0}


def test_a_wrong_call_is_not_taken_for_a_right_one_bound_before(launched):
    """Without its gate a gated delta rule has the operands of a plain one; and an option that is objected to may change nothing else."""
    step = Step("delta_rule", BF16)
    options = {"state_indices": step.options["state_indices"], "use_qk_l2norm": True}
    ssmgen.bind(ssmgen.delta_rule, step.state, **step.inputs, **options)
    with pytest.raises(ArgumentError, match="g is a NoneType"):
        ssmgen.bind(ssmgen.gated_delta_rule, step.state, **step.inputs, g=None, **options)
    with pytest.raises(ArgumentError, match="allow_neg_eigval doubles"):
        ssmgen.bind(ssmgen.delta_rule, step.state, **step.inputs, **options, allow_neg_eigval=True)
    assert launched.made == 1
