"""selective_state_update without a GPU: the reference implementation, the errors, the other signatures."""

from __future__ import annotations

import inspect as pyinspect
import pickle

import pytest
import torch
from guarded_call import refused
from ssu_cases import BF16, F32, Case, assert_matches, expected, make_call, small_matrix

import ssmgen
from ssmgen.compat import mamba_ssm
from ssmgen.errors import ArgumentError

M2 = Case("m2", heads=4, groups=2, index=torch.int64)


@pytest.mark.parametrize("case", small_matrix(), ids=lambda c: c.id)
def test_reference_is_within_rounding_of_float64(case):
    call = make_call(case, "cpu")
    want = expected(call)
    ssmgen.selective_state_update(*call.args, **call.kwargs)
    assert_matches(call, want)


def test_reference_against_the_textbook_formula():
    """One head, one row, in scalars."""
    import math

    state = torch.tensor([[[[0.5, -2.0, 1.0, 3.0]]]])
    B, C = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    x, dt, A = torch.tensor([[[2.0]]]), torch.tensor([[[-1.0]]]), torch.tensor([[[-1.0, -2.0, -3.0, -4.0]]])
    D, z, bias = torch.tensor([[0.7]]), torch.tensor([[[1.5]]]), torch.tensor([[0.25]])
    step = math.log(1 + math.exp(-0.75))
    new = [s * math.exp(step * a) + step * 2.0 * b for s, a, b in zip([0.5, -2.0, 1.0, 3.0], [-1, -2, -3, -4], [1, 2, 3, 4], strict=True)]
    y = (sum(h * c for h, c in zip(new, [0.1, 0.2, 0.3, 0.4], strict=True)) + 0.7 * 2.0) * 1.5 / (1 + math.exp(-1.5))
    out = ssmgen.selective_state_update(state, x, dt, A, B, C, D, z, bias, True)
    assert out.item() == pytest.approx(y, rel=1e-6)
    assert state.flatten().tolist() == pytest.approx(new, rel=1e-6)


def test_softplus_neither_overflows_nor_loses_small_steps():
    from ssmgen.engine.recurrences.reference import softplus

    v = torch.tensor([-80.0, -30.0, -1.0, 0.0, 20.0, 100.0, 1e4], dtype=torch.float32)
    exact = torch.nn.functional.softplus(v.double(), threshold=1e9)
    assert torch.allclose(softplus(v).double()[1:5], exact[1:5], rtol=1e-6)
    assert softplus(v)[0] > 0 and softplus(v)[-1] == 1e4


# Errors.


def bad(change: dict, **case) -> str:
    call = make_call(Case("bad", heads=4, groups=2, **case), "cpu")
    named = dict(zip(("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus"), call.args, strict=True)) | call.kwargs
    return refused(call.memory, ssmgen.selective_state_update, named, change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": lambda n: n["x"][:, :3]}, "x is [5, 3, 64]; expected [batch, heads, headdim] = [5, 4, 64]"),
        ({"x": lambda n: n["x"][0]}, "x is [4, 64]; expected [batch, heads, headdim]"),
        ({"x": None}, "x is a NoneType; expected a tensor"),
        ({"dt": lambda n: n["dt"][:3]}, "dt is [3, 4, 64]"),
        ({"A": lambda n: n["A"][..., :7]}, "A is [4, 64, 7]"),
        ({"B": lambda n: n["B"][:, :, None]}, "B is [5, 2, 1, 128]; expected [batch, groups, d_state]"),
        (
            {"B": lambda n: torch.zeros(5, 3, 128), "C": lambda n: torch.zeros(5, 3, 128)},
            "B is [5, 3, 128] but heads 4 is not a multiple of its groups 3",
        ),
        ({"C": lambda n: n["C"].double()}, "C is torch.float64"),
        ({"x": lambda n: n["x"].long()}, "x is torch.int64"),
        ({"D": lambda n: n["D"].requires_grad_()}, "D requires grad"),
        ({"state_indices": torch.zeros(5)}, "state_indices is torch.float32; expected int32 or int64"),
        ({"state_indices": torch.zeros(4, dtype=torch.int32)}, "state_indices is [4]; expected [batch] = [5]"),
        ({"dst_state_indices": torch.zeros(5, dtype=torch.int32)}, "dst_state_indices is given without state_indices"),
        (
            {"state_indices": torch.zeros(5, dtype=torch.int32), "dst_state_indices": torch.zeros(5, dtype=torch.int64)},
            "state_indices is torch.int32 and dst_state_indices is torch.int64",
        ),
        ({"state": lambda n: n["state"][:3]}, "state has 3 slots; expected 5, one per sequence of the batch"),
        (
            {"state": lambda n: n["state"].transpose(2, 3).contiguous().transpose(2, 3)},
            "state has strides [32768, 8192, 1, 64]; expected dense last three axes, [8192, 128, 1]",
        ),
        ({"state": lambda n: n["state"][:1].expand(5, -1, -1, -1)}, "which overlap"),
        ({"state": lambda n: n["state"][0, 0]}, "; expected [slots, heads, headdim, d_state] or [slots, dim, d_state]"),
        ({"out": lambda n: n["out"][:1].expand(5, -1, -1)}, "two of its elements share memory"),
        ({"out": lambda n: n["x"]}, "out overlaps x in memory"),
        (
            {"out": lambda n: n["state"][:, :, :, 0]},
            "out overlaps state in memory",
        ),
        ({"dt_limit": (1.0, 0.0)}, "dt_limit is (1.0, 0.0)"),
        ({"dt_limit": [0.0, 1.0]}, "dt_limit is [0.0, 1.0]; expected a tuple (low, high) or None"),
        ({"pdl": "yes"}, "pdl is 'yes'"),
        ({"x": torch.zeros(5, 4, 64, device="meta")}, "x is on meta, state is on cpu"),
    ],
)
def test_bad_input(change, words):
    assert words in bad(change)


def test_everything_wrong_in_one_message():
    text = bad({"B": lambda n: n["B"].double(), "dt": lambda n: n["dt"][:2], "state_indices": torch.zeros(5), "pdl": 3})
    assert text.count("\n  - ") >= 4


def test_errors_survive_pickling():
    error = ArgumentError("selective_state_update", ["a", "b"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.problems == ["a", "b"] and type(again) is ArgumentError


def test_a_long_stride_is_refused():
    text = bad({"x": lambda n: torch.empty_strided((5, 4, 64), (2**31, 64, 1), device="meta")})
    assert "below 2^31" in text


def test_parameters_are_taken_without_grad_mode():
    call = make_call(M2, "cpu")
    weight = torch.nn.Parameter(torch.randn(4))
    args = (*call.args[:6], weight, *call.args[7:])
    with pytest.raises(ArgumentError, match="requires grad"):
        ssmgen.selective_state_update(*args, **call.kwargs)
    with torch.no_grad():
        ssmgen.selective_state_update(*args, **call.kwargs)


# The other signatures.


class Loaded(torch.nn.Parameter):
    """A tensor like vLLM's parameters: a subclass that intercepts functions, with ordinary memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_of_ordinary_memory_are_taken():
    x, state, weight, bias = (torch.randn(s) for s in ((2, 8), (3, 8, 3), (8, 4), (8,)))
    want = ssmgen.causal_conv1d_update(x, state.clone(), weight, bias, "silu")
    with torch.no_grad():
        got = ssmgen.causal_conv1d_update(x, state, weight, Loaded(bias, requires_grad=False), "silu")
    assert torch.equal(got, want)


def test_mamba_ssm_signature_is_that_package_s():
    names = ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "state_batch_indices"]
    parameters = pyinspect.signature(mamba_ssm.selective_state_update).parameters
    assert list(parameters) == names
    assert [p.default for p in parameters.values()][6:] == [None, None, None, False, None]


@pytest.mark.parametrize("heads", [0, 4])
def test_mamba_ssm_call(heads):
    case = Case("c", heads=heads, headdim=32, d_state=16, tied=False, z=BF16, index=torch.int32, out=None)
    call = make_call(case, "cpu")
    want = expected(call)
    out = mamba_ssm.selective_state_update(*call.args, state_batch_indices=call.kwargs["state_indices"])
    call.kwargs["out"].copy_(out)
    assert_matches(call, want)


def test_short_forms_of_tied_operands():
    """dt [batch, heads], A, D and dt_bias [heads] instead of expanded views."""
    long, short = make_call(M2, "cpu"), make_call(M2, "cpu")
    state, x, dt, A, B, C, D, z, bias, softplus = short.args
    args = (state, x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], z, bias[:, 0], softplus)
    a = ssmgen.selective_state_update(*long.args, **long.kwargs)
    b = ssmgen.selective_state_update(*args, **short.kwargs)
    assert torch.equal(a, b)


def test_warm_names_the_operators_there_are():
    with pytest.raises(ArgumentError, match=r"ssmgen\.selective_state_update"):
        ssmgen.warm(torch.add, F32)


def test_warm_is_for_cuda_tensors():
    call = make_call(M2, "cpu")
    with pytest.raises(ArgumentError, match="; expected a CUDA device, where kernels are loaded"):
        ssmgen.warm(ssmgen.selective_state_update, *call.args, **call.kwargs)


def test_explain_and_supported_of_a_call_without_a_gpu():
    call = make_call(M2, "cpu")
    found = ssmgen.explain(ssmgen.selective_state_update, *call.args, **call.kwargs, arch="sm_90a")
    assert found.chosen.rule == "smallest" and found.chosen.spec.d_state == 128 and "-> smallest" in str(found)
    assert ssmgen.supported(ssmgen.selective_state_update, *call.args, **call.kwargs, arch="sm_80") == (True, [])
    wrong = {**call.kwargs, "state_indices": torch.zeros(3)}
    yes, reasons = ssmgen.supported(ssmgen.selective_state_update, *call.args, **wrong, arch="sm_80")
    assert not yes and len(reasons) == 2
    yes, reasons = ssmgen.supported(ssmgen.selective_state_update, *call.args, **call.kwargs)
    assert not yes and ", which has no CUDA architecture; expected arch" in reasons[0]
