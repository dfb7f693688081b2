"""gated_rms_norm: error messages, and the kernels that serve a call."""

from __future__ import annotations

import pytest
import torch
from norm_cases import BF16, F16, F32, NAN

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.spec.kernel import Pdl


def operands(*shape: int, dtype: torch.dtype = F32) -> dict[str, torch.Tensor]:
    shape = shape or (2, 4, 64)
    return {"x": torch.randn(shape).to(dtype), "gate": torch.randn(shape).to(dtype), "weight": torch.randn(shape[-1])}


def problems(**changes) -> list[str]:
    with pytest.raises(ArgumentError) as e:
        ssmgen.gated_rms_norm(**operands() | changes)
    return e.value.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, "x is a NoneType; expected a tensor"),
        ({"gate": 1.0}, "gate is a float; expected a tensor"),
        ({"x": torch.zeros(2, 4, 64, dtype=torch.float64)}, "x is torch.float64; expected float32, float16 or bfloat16"),
        ({"weight": torch.zeros(64, dtype=torch.int32)}, "weight is torch.int32; expected float32"),
        ({"x": torch.zeros(())}, "x is []; expected [*rows, groups, size]"),
        ({"x": torch.zeros(2, 16388)}, "x is [2, 16388], with groups of 16388 elements; expected 1 … 16384"),
        ({"group_size": 48}, "x is [2, 4, 64] and group_size 48; expected a divisor of the last axis"),
        ({"group_size": 0}, ", with groups of 0 elements; expected 1 …"),
        ({"group_size": 32.0}, "group_size is 32.0; expected an integer or None"),
        ({"gate": torch.zeros(2, 256)}, "gate is [2, 256]; expected the shape of x = [2, 4, 64]"),
        ({"out": torch.zeros(4, 2, 64)}, "out is [4, 2, 64]; expected the shape of x = [2, 4, 64]"),
        ({"weight": torch.zeros(128)}, "weight is [128]; expected [size] = [64] or [groups * size] = [256] or [groups, size] = [4, 64]"),
        ({"x": torch.zeros(2, 4, 128)[..., ::2]}, "x has strides [512, 128, 2]; expected 1 for its last axis. Pass a contiguous tensor."),
        ({"weight": torch.zeros(128)[::2]}, "weight has strides [2]; expected 1 for its last axis. Pass a contiguous tensor."),
        ({"out": torch.zeros(1, 1, 64).expand(2, 4, 64)}, "two of its elements share memory"),
        ({"eps": -1e-5}, "eps is -1e-05; expected a number of 0 or more"),
        ({"eps": NAN}, "eps is nan; expected a number of 0 or more"),
        ({"eps": None}, "eps is None; expected a number of 0 or more"),
        ({"norm_before_gate": "yes"}, "norm_before_gate is 'yes'; expected True or False"),
        ({"activation": "gelu"}, "activation is 'gelu'; expected 'silu', 'swish' or 'sigmoid'"),
        ({"activation": ["silu"]}, "activation is ['silu']; expected 'silu'"),
        ({"pdl": 1.5}, "pdl is 1.5; expected True, False or None"),
        ({"x": torch.zeros(2, 4, 64, requires_grad=True)}, "x requires grad"),
        ({"out": torch.zeros(2, 4, 64, device="meta")}, "out is on meta, x is on cpu"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_words(change, words):
    assert any(words in problem for problem in problems(**change)), problems(**change)


def test_all_that_is_wrong_at_once_and_nothing_is_written():
    out = torch.full((2, 4, 64), 7.0)
    found = problems(out=out, eps=-1, activation="relu", norm_before_gate=2, gate=torch.zeros(3), weight=torch.zeros(9), pdl="yes")
    assert len(found) >= 5 and (out == 7).all()


def test_rows_that_one_stride_cannot_describe():
    x = torch.randn(2, 5, 4, 64)[:, :3]
    assert any(
        "; expected one distance between rows over its axes [2, 3]" in p for p in problems(x=x, gate=None, out=torch.empty(2, 3, 4, 64))
    )
    want = ssmgen.gated_rms_norm(x.contiguous())
    assert torch.equal(ssmgen.gated_rms_norm(x[:1]), want[:1]) and torch.equal(ssmgen.gated_rms_norm(x[:, 0]), want[:, 0])
    wide = torch.randn(2, 3, 512)[..., :256]  # nested rows with gaps between them
    assert torch.equal(ssmgen.gated_rms_norm(wide, group_size=64), ssmgen.gated_rms_norm(wide.contiguous(), group_size=64))


def test_overlap_and_in_place():
    call = operands()
    wide = torch.randn(3, 4, 64)
    assert any("out overlaps x in memory" in p for p in problems(x=wide[:2], out=wide[1:]))
    assert any("out overlaps x in memory" in p for p in problems(out=call["x"].view(-1).as_strided((2, 4, 64), (64, 128, 1)), x=call["x"]))
    assert any("out overlaps weight in memory" in p for p in problems(weight=wide[0, 0], out=wide[:2]))
    for name in ("x", "gate"):
        call = operands()
        want = ssmgen.gated_rms_norm(**call)
        assert ssmgen.gated_rms_norm(**call, out=call[name]) is call[name] and torch.equal(call[name], want)


# The registry.


def chosen(*args, **kwargs) -> tuple[str, object]:
    found = ssmgen.explain(ssmgen.gated_rms_norm, *args, arch="sm_90a", **kwargs).chosen
    return found.rule, found.spec


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_rules():
    few, spec = chosen(empty(1, 32, 128), empty(1, 32, 128), empty(128))
    assert few == "few-groups" and (spec.vec, spec.team, spec.threads, spec.grouped) == (8, 16, 32, True)
    many, spec = chosen(empty(512, 32, 128), empty(512, 32, 128), empty(128))
    assert many == "many-groups" and (spec.vec, spec.team, spec.threads) == (4, 16, 128)
    rule, spec = chosen(empty(1, 5120), empty(1, 5120), empty(5120))
    assert rule == "few-groups" and (spec.team, spec.passes, spec.grouped) == (640, 1, False)
    pdls = [chosen(empty(rows, 5120), empty(rows, 5120), empty(5120))[1].pdl for rows in (64, 129, 256)]
    assert pdls == [Pdl.TRIGGER_FIRST, Pdl.TRIGGER_LOADED, Pdl.TRIGGER_LOADED]
    some, spec = chosen(empty(64, 32, 128), empty(64, 32, 128), empty(128))
    assert some == "some-groups" and (spec.vec, spec.team, spec.threads) == (4, 32, 128)
    assert chosen(empty(1, 8192), empty(1, 8192), group_size=1024)[1].team == 256
    assert chosen(empty(256, 8192), empty(256, 8192), group_size=1024)[1].team == 128
    text = str(ssmgen.explain(ssmgen.gated_rms_norm, empty(512, 32, 128), arch="sm_90a"))
    assert "groups 16384" in text and "a call has 16384 groups; the rule is for at most" in text
    assert ssmgen.supported(ssmgen.gated_rms_norm, empty(3, 66), arch="sm_90a")[0] is True
    assert ssmgen.supported(ssmgen.gated_rms_norm, empty(3, 16388), arch="sm_90a")[0] is False


def test_what_the_problem_depends_on():
    def problem(*args, **kwargs):
        return ssmgen.gated_rms_norm.build(*args, **kwargs).problem()[0]

    x, z = empty(3, 256), empty(3, 1000)[:, 8:264]
    base = problem(x, z)
    assert base == problem(x[:1], z[:1]) == problem(x, z, eps=0.1) and not base.grouped
    assert problem(x, group_size=64).grouped and not problem(x, group_size=256).grouped
    assert problem(x) == problem(x, norm_before_gate=True, activation="sigmoid")  # of no gate
    assert problem(x, z, activation="swish") == base != problem(x, z, activation="sigmoid")
    assert base.loads.value == "vector" and problem(x, empty(3, 1001)[:, 8:264]).loads.value == "element"
    assert problem(x, z, empty(513)[1:257]).loads.value == "element"


def test_sizes_of_calls():
    call = operands(dtype=F16)
    assert ssmgen.gated_rms_norm.build(**call).problem()[1:3] == (8, torch.device("cpu"))
    assert ssmgen.gated_rms_norm(torch.empty(0, 64)).shape == (0, 64)
