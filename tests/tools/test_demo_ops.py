"""`python -m tools.demo --ops` counts the launches of an accelerated model's token without a GPU. The counts may not rise."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

import transformers
from hf_cases import built

from ssmgen.compat.hf import found
from tools.demo import ops
from tools.demo.__main__ import demo
from tools.demo.ops import AROUND
from tools.demo.presets import presets

# {model: {kind of layers: (kernels of ssmgen, operations of torch)} of one layer, or around the layers}, with transformers 5.24
MOST = {
    "mamba2": {"layer": (5.25, 0.25), AROUND: (1, 4)},
    "nemotron_h": {"linear_attention": (5.25, 0), "mlp": (3, 0), "full_attention": (4, 0), AROUND: (1, 4)},
    "falcon_h1": {"layer, FalconH1MLP": (10.25, 0), AROUND: (1, 6)},
    "qwen3_5": {"linear_attention, Qwen3_5MLP": (7.33, 0), "full_attention, Qwen3_5MLP": (7, 0), AROUND: (1, 4)},
    "kimi_linear": {
        "linear_attention, KimiLinearMLP": (11, 0),
        "linear_attention, KimiLinearMoE": (10, 35),
        "full_attention, KimiLinearMoE": (7, 41),
        AROUND: (1, 4),
    },
    "granitemoehybrid": {"linear_attention": (8.33, 22), "full_attention": (7, 22), AROUND: (1, 5)},
    "zamba2": {"layer": (7.5, 1.25), AROUND: (1, 4)},
    "qwen3_5_moe": {
        "linear_attention, Qwen3_5MoeSparseMoeBlock": (7.33, 27),
        "full_attention, Qwen3_5MoeSparseMoeBlock": (7, 27),
        AROUND: (1, 4),
    },
}

newest = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) != found.TESTED, reason="the counts are of another transformers"
)


@newest
@pytest.mark.parametrize("name", MOST)
def test_a_token_launches_no_more_than_it_did(name):
    """At real widths, on tensors without memory."""
    listed = ops.listed(presets()[name].build(4, torch.bfloat16, "meta"))
    ours, torchs = listed.per_layer(True), listed.per_layer(False)
    got = {kind: (round(ours[kind], 2), round(torchs[kind], 2)) for kind in (*listed.layers, AROUND)}
    assert got.keys() == MOST[name].keys()
    more = {kind: (got[kind], most) for kind, most in MOST[name].items() if got[kind][0] > most[0] or got[kind][1] > most[1]}
    assert not more, "a token launches more than before: (now, before) by kind"
    assert got == MOST[name], "a token launches less than before: lower the table's numbers"


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_tensors_with_and_without_memory_launch_the_same(name):
    model = built(name)
    want = ops.listed(model)
    got = ops.listed(built(name).to("meta"))
    assert got.layers == want.layers and got.ops == want.ops


def test_an_operation_more_is_seen_in_its_layer():
    model, x = built("mamba2"), torch.ones(2, 3)
    before = ops.listed(model).per_layer(False)
    for planted in (lambda: x + 1, lambda: x.t().contiguous()):
        hook = model.backbone.layers[1].mixer.register_forward_pre_hook(lambda module, args, f=planted: None if f() is not None else args)
        after = ops.listed(model).per_layer(False)
        hook.remove()
        assert after == {**before, "layer": pytest.approx(before["layer"] + 1 / 3)}


def test_views_and_allocations_are_free():
    seen: list[ops.Op] = []
    with ops._Watch(seen, [ops.Site(AROUND, "none")]):
        x = torch.empty(2, 4)
        x.view(8).unsqueeze(0).expand(3, 8)[1:, :4].transpose(0, 1)
        x.contiguous(), x.to(torch.float32), x.reshape(4, 2), x.new_empty(3), x.split(2, dim=1)
        assert not seen
        x.t().reshape(8)
        x.add_(1)
        x.sum().item()
    assert [op.name for op in seen] == ["clone", "add_", "sum", "_local_scalar_dense"]


def test_the_list_names_kernels_shapes_and_bytes():
    text = CliRunner().invoke(demo, ["--ops", "--model", "mamba2", "--layers", "2"], catch_exceptions=False).output
    assert "mamba2, as wide as Mamba-Codestral-7B, batch 1" in text and "layer (2 layers):" in text
    assert "mamba2_layer_h128p64n128g8_f32" in text and "bf16[18560, 4096]" in text and f"{AROUND}:" in text
    refused = CliRunner().invoke(demo, ["--ops", "--model", "mamba2", "--prompt", "8"])
    assert refused.exit_code and "remove --prompt" in refused.output
