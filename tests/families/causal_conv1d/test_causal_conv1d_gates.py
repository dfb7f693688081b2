"""causal_conv1d_update with gates: the bits of a multiplication before it and one after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_laws import Draw, emulated, equal, needs_emulator
from selection import costly

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.families.causal_conv1d_update import call as update_op
from ssmgen.families.causal_conv1d_update import spec as step
from ssmgen.families.causal_conv1d_update.spec import UpdateSpec
from ssmgen.spec.kernel import Arch, Index

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FUNCTIONS = ["reference", pytest.param("emulator", marks=needs_emulator)]
GATES = [("input_gate", "output_gate"), ("input_gate",), ("output_gate",)]
# Sequences of one or several tokens, and where their history is.
FORMS: dict[str, dict[str, Any]] = {
    "one": {"tokens": 1}, "some": {"tokens": 3}, "many": {"tokens": 18}, "longer": {"tokens": 1, "entries": 5},
    "longer-some": {"tokens": 3, "entries": 5}, "ring": {"tokens": 2, "entries": 4, "position": "cache_seqlens"},
    "rolling": {"tokens": 3, "entries": 4, "position": "num_accepted_tokens"},
    "packed": {"lengths": (3, 0, 6), "entries": 7, "position": "num_accepted_tokens"}, "saved": {"tokens": 3, "saved": True},
}  # fmt: skip


def make(form: dict[str, Any], draw: Draw, gates: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of three sequences, of which one is padding."""
    lengths, tokens = form.get("lengths"), form.get("tokens", 0)

    def rows() -> torch.Tensor:
        if lengths:
            return draw(sum(lengths), draw.dim)
        return draw(3, draw.dim) if tokens == 1 else draw.tokens(3, length=tokens)

    call = {"x": rows(), "conv_state": draw.states(5, form.get("entries")), "weight": draw.weights[0], "bias": draw.weights[1]}
    call |= {"conv_state_indices": draw.ints([3, -1, 0])} | {name: rows() for name in gates}
    call |= {form["position"]: draw.ints([2, 1, 1])} if "position" in form else {}
    call |= {"query_start_loc": draw.ints([0, 3, 3, 9])} if lengths else {}
    return call | ({"intermediate_conv_window": draw(3, tokens, draw.dim, draw.width - 1)} if "saved" in form else {})


def gates_are_multiplications(update: Any, call: dict[str, Any], gates: tuple[str, ...]) -> None:
    """The bits are those of the call without gates, and of multiplications before and after it."""
    plain = {n: t.clone(memory_format=torch.preserve_format) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    around = {name: plain.pop(name) for name in gates}
    if "input_gate" in around:
        plain["x"] = plain["x"] * around["input_gate"]
    want = update(**plain, activation=None)
    got = update(**call, activation=None)
    if "output_gate" in around:
        want = torch.where(want == 0, want, want * around["output_gate"])  # padding is 0, also of a negative gate
    assert equal(got, want)
    for name in ("conv_state", "intermediate_conv_window"):
        assert name not in call or equal(call[name], plain[name])


@costly(27, 54)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gates", GATES, ids="-".join)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "last", "dim"), [(BF16, True, 24), (F16, False, 24), (F32, True, 17)])
def test_gates_are_multiplications_around_the_call(function, gates, form, dtype, last, dim):
    update = ssmgen.causal_conv1d_update if function == "reference" else emulated(update_op)
    gates_are_multiplications(update, make(FORMS[form], Draw("cpu", dtype, last, dim, width=3), gates), gates)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gates_are_slices_of_one_row(function):
    """The gates lie as a projection leaves them. An x that is not a slice may also be the output."""
    update = ssmgen.causal_conv1d_update if function == "reference" else emulated(update_op)
    draw = Draw("cpu", BF16, True, 40, width=3)
    b, c, x = draw(4, 3 * 40 + 1)[:, 1:].chunk(3, 1)
    state = draw.states(4)
    before, kept = state.clone(), state.clone(memory_format=torch.preserve_format)
    want = c * update(b * x, kept, draw.weights[0])
    assert equal(update(x, state, draw.weights[0], input_gate=b, output_gate=c), want) and equal(state, kept)
    state.copy_(before)
    x = x.clone()
    assert update(x, state, draw.weights[0], input_gate=b, output_gate=c, out=x) is x and equal(x, want) and equal(state, kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_gate": torch.zeros(3, 23)}, r"input_gate is \[3, 23\]; expected \[3, 24\], the shape of x"),
        ({"output_gate": torch.zeros(3, 24, dtype=F16)}, "output_gate is float16; expected float32, the dtype of x"),
        ({"input_gate": 2.0}, "input_gate"),
    ],
)  # fmt: skip
def test_gates_that_do_not_fit(change, words):
    call = make(FORMS["one"], Draw("cpu", F32, True, width=3), ("input_gate",)) | change
    with pytest.raises(ArgumentError, match=words):
        ssmgen.causal_conv1d_update(**call)


def test_gates_of_a_draft_tree_are_refused():
    call = make(FORMS["some"], Draw("cpu", F32, True, width=3), ("input_gate",)) | {"parents": torch.zeros(3, 3, dtype=torch.int32)}
    with pytest.raises(ArgumentError, match="input_gate is given with a draft tree; expected None"):
        ssmgen.causal_conv1d_update(**call)
    spec = UpdateSpec(width=4, state_len=3, vec=4, tokens=2, parents=Index.I32, input_gate=True)
    assert "input_gate or output_gate is yes with a draft tree; expected no" in spec.violations(Arch.parse("sm_90a"))
    assert step.UpdateProblem(width=4).gates == ()
