"""token_shift: the laws that hold for every variant."""

from __future__ import annotations

import pytest
import torch

import ssmgen
from ssmgen import emulator
from ssmgen.families.token_shift import call as op
from ssmgen.families.token_shift.reference import token_shift as reference
from ssmgen.families.token_shift.spec import space
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, Pdl

SM90 = Arch.parse("sm_90a")
NAN = float("nan")


def operands(dtype: torch.dtype, dim: int, offset: int = 0) -> dict[str, torch.Tensor]:
    """6 slots for 3 rows, one of them padding; unused memory is poisoned. `offset`: elements by which rows are shifted in memory."""
    torch.manual_seed(0)
    state = torch.full((6, dim), NAN, dtype=dtype)
    state[4], state[1] = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    x = torch.randn(3, 2 * dim + offset).to(dtype)[:, offset : offset + dim]
    return {
        "state": state, "x": x, "mix": torch.rand(dim), "state_indices": torch.tensor([4, -1, 1], dtype=torch.int32),
        "out": torch.full((3, dim), NAN, dtype=dtype),
    }  # fmt: skip


def emulate(spec, named) -> None:
    values = op.kernel_values(spec, named, op.Options())
    packed = Arguments(spec, values).at([named[n].data_ptr() for n in spec.operands()])
    emulator.run(spec, SM90, 3 * spec.blocks, packed, named)


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
@pytest.mark.parametrize(("dtype", "dim", "offset"), [(torch.bfloat16, 640, 0), (torch.float32, 96, 0), (torch.float16, 90, 1)])
def test_variants_are_bit_equal_and_within_rounding_of_float64(dtype, dim, offset):
    named = operands(dtype, dim, offset)
    problem = op.problem_of(named, {n: t.data_ptr() for n, t in named.items()}, op.Options())
    exact = named | {n: named[n].double() for n in ("state", "out")}
    reference(**exact, dtype=torch.float64)
    results = []
    for spec in (s for s in space(problem, SM90) if s.pdl is Pdl.TRIGGER_LOADED):
        fresh = named | {n: named[n].clone() for n in ("state", "out")}
        emulate(spec, fresh)
        results.append((fresh["out"], fresh["state"]))
        assert torch.equal(fresh["state"].nan_to_num(), exact["state"].to(dtype).nan_to_num())  # copies of inputs; other slots as they were
        assert torch.allclose(fresh["out"].double(), exact["out"], rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert len(results) >= 3 and all(torch.equal(out, results[0][0]) for out, _ in results)


def test_padded_rows_are_zero_and_touch_nothing():
    named = operands(torch.float32, 64)
    before = named["state"].clone()
    y = ssmgen.token_shift(named["state"], named["x"], named["mix"], state_indices=named["state_indices"])
    assert y[1].count_nonzero() == 0 and torch.equal(named["state"][5].isnan(), before[5].isnan())
    assert torch.equal(named["state"][4], named["x"][0])


def test_everything_wrong_is_in_one_message():
    with pytest.raises(ssmgen.errors.ArgumentError) as e:
        ssmgen.token_shift(torch.zeros(4, 8), torch.zeros(2, 8).half(), torch.zeros(9))
    assert len(e.value.problems) == 2


def test_what_serves_a_call_is_explained():
    named = operands(torch.bfloat16, 640)
    found = ssmgen.explain(ssmgen.token_shift, **named, arch="sm_90a")
    assert found.chosen.rule == "few-rows" and found.chosen.spec.vec == 8


@pytest.mark.gpu
def test_on_a_card():
    named = {n: t.cuda() for n, t in operands(torch.bfloat16, 640).items()}
    expected = named | {n: named[n].clone() for n in ("state", "out")}
    reference(**expected)
    y = ssmgen.token_shift(named["state"], named["x"], named["mix"], state_indices=named["state_indices"])
    assert torch.allclose(y.float(), expected["out"].float(), rtol=0.01)
    assert torch.equal(named["state"].nan_to_num(), expected["state"].nan_to_num())
