"""Constant multipliers of Falcon-H1, which accelerated models have in the launches of their products."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, in_dtype
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.compat.hf import gated, linears, projections, scaled
from ssmgen.errors import NotBuiltError
from tools.demo import ops

IDS = torch.arange(3, 13).view(2, 5)
SIZES = {"mamba_n_heads": 8, "mamba_d_ssm": 128}  # so that all of in_proj's sizes are multiples of 8
MULTIPLIED = SIZES | {"mlp_multipliers": [0.5, 3.0], "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 3.0]}


def test_tokens_are_those_of_the_model():
    model = built("falcon_h1", **MULTIPLIED)
    want = [model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False) for ids in (IDS[:1], IDS)]
    with ssmgen.accelerate(model) as fast:
        assert len(fast._linears.mlps) == 2
        assert all(torch.equal(fast.generate(ids, 8), w) for ids, w in zip((IDS[:1], IDS), want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_as_near_to_float64_as_the_models_own(dtype):
    model = in_dtype(built("falcon_h1", **MULTIPLIED), dtype)
    block = model.model.layers[0]
    x = torch.randn(1, 1, 32).to(dtype)
    with torch.no_grad():
        exact = block.feed_forward.double()(x.double())
        vector = block.mamba.mup_vector.double()
        wide = block.mamba.in_proj.double()(x.double() * block.mamba.ssm_in_multiplier) * vector
        block.to(dtype)
        own = block.feed_forward(x)
        plain = projections.falcon_h1(block.mamba, x)
        made = linears.Linears(model)
        got, projected = block.feed_forward(x), projections.falcon_h1(block.mamba, x)
    assert projected.dtype == plain.dtype and got.dtype == own.dtype
    for ours, theirs, want in ((got, own, exact), (projected, plain, wide)):
        assert (ours - want).abs().max() <= 1.5 * (theirs - want).abs().max() + 1e-6
        assert not torch.allclose(ours.double(), want * 1.01, rtol=1e-3, atol=1e-6)
    made.undo()


def test_multipliers_cost_no_launch_and_one_is_none():
    counts = {name: ops.listed(built("falcon_h1", **more)).per_layer(False) for name, more in (("ones", SIZES), ("others", MULTIPLIED))}
    assert counts["ones"] == counts["others"]


def test_a_multiplier_that_changes_is_the_one_that_multiplies():
    model = built("falcon_h1", **MULTIPLIED)
    block, x = model.model.layers[0], torch.randn(1, 1, 32)
    with torch.no_grad():
        made = linears.Linears(model)
        assert block.mamba.in_proj in made.modules and block.feed_forward in made.mlps
        before = projections.falcon_h1(block.mamba, x)
        block.mamba.mup_vector.mul_(2)
        assert torch.equal(projections.falcon_h1(block.mamba, x), 2 * before)
        block.mamba.ssm_in_multiplier *= 2
        assert torch.equal(projections.falcon_h1(block.mamba, x), 4 * before)
        h = block.feed_forward(x)
        block.feed_forward.down_multiplier *= 2
        assert torch.equal(block.feed_forward(x), 2 * h)
    made.undo()


def test_a_kernel_that_may_not_be_compiled_is_a_warning_and_a_multiplication(monkeypatch):
    model = built("falcon_h1", **MULTIPLIED)
    block, x = model.model.layers[0], torch.randn(1, 1, 32)
    with torch.no_grad():
        plain = projections.falcon_h1(block.mamba, x)
        made = linears.Linears(model)

        def refused(x, weight, *rest, **more):
            raise NotBuiltError("skinny_linear:k=32", "sm_90a")

        monkeypatch.setattr(scaled, "skinny_linear", refused)
        with pytest.warns(RuntimeWarning, match="a multiplier or a sum after a linear layer is an operation of its own"):
            got = projections.falcon_h1(block.mamba, x)
        torch.testing.assert_close(got, plain)
        torch.testing.assert_close(projections.falcon_h1(block.mamba, x), plain)
    made.undo()


class Multiplied(torch.nn.Module):
    def __init__(self, bias=False, times=2.0):
        super().__init__()
        self.gate, self.up = torch.nn.Linear(16, 24, bias=bias), torch.nn.Linear(16, 24, bias=bias)
        self.down, self.act, self.m, self.n = torch.nn.Linear(24, 16), torch.nn.SiLU(), times, 0.25

    def forward(self, x):
        y = self.up(x) * self.act(self.gate(x) * self.m)
        y = self.down(y) * self.n
        return y


def test_which_mlps_with_multipliers_are_served():
    assert gated.parts(Multiplied) == ("gate", "up", "down", "act", "m", "n")
    for mlp, served in ((Multiplied(), True), (Multiplied(bias=True), False), (Multiplied(times=torch.ones(24)), False)):
        with torch.no_grad():
            x = torch.randn(1, 16)
            want = mlp(x)
            made = linears.Linears(mlp)
            assert (made.mlps == [mlp]) == served
            torch.testing.assert_close(mlp(x), want)
        made.undo()
