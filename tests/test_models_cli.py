"""What the command line makes of models: build and explain, by operator and by option."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

import ssmgen
from ssmgen.cli import main
from ssmgen.cli.options import problems_of
from ssmgen.engine.recurrences.attention.problem import Layout
from ssmgen.errors import ModelError
from ssmgen.models import Ask, Wanted, ask_for, find_model
from ssmgen.spec import DType


def ran(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_build_chooses_by_operator(own_cache):
    def families(*args: str) -> set[str]:
        rows = json.loads(ran("build", "--model", "mamba-130m", "--index", "i32", "--no-pdl", "--json", *args))["variants"]
        assert all(v["resources"]["spill_stores"] == 0 and v["error"] is None for v in rows)
        return {v["spec"].partition(":")[0] for v in rows}

    assert families() == {"selective_state_update", "selective_scan", "selective_scan_roles", "causal_conv1d", "causal_conv1d_update"}
    norms = json.loads(ran("build", "--model", "kimi-linear-48b-a3b", "--op", "gated_rms_norm", "--no-pdl", "--json"))["variants"]
    assert norms and {v["spec"].partition(":")[0] for v in norms} == {"gated_rms_norm"}
    assert "does not use gated_rms_norm" in ran("build", "--model", "mamba-130m", "--op", "gated_rms_norm", code=1)
    assert families("--op", "selective_state_update") == {"selective_state_update"}
    tokens = json.loads(ran("build", "--model", "falcon-h1-7b", "--op", "selective_state_update", "--tokens", "4", "--json"))["variants"]
    assert {v["spec"].partition(":")[0] for v in tokens} == {"selective_state_update"} and all(",several=yes" in v["spec"] for v in tokens)
    assert "does not take --tokens" in ran("build", "--model", "mamba-130m", "--tokens", "4", code=2)
    assert families("--op", "causal_conv1d_update", "--tokens", "4") == {"causal_conv1d_update"}
    assert "does not use linear_attention" in ran("build", "--model", "mamba-130m", "--op", "linear_attention", code=1)
    assert "does not use causal_conv1d" in ran("build", "--model", "rwkv7-0.1b", "--op", "causal_conv1d", code=1)
    assert "does not take --ring" in ran("build", "--model", "kimi-k3", "--op", "causal_conv1d", "--ring", "store", code=2)


def test_build_and_explain_of_layers(own_cache):
    model = ("--model", "nemotron-h-8b", "--tp", "8")
    rows = json.loads(ran("build", *model, "--op", "mamba2_layer", "--no-pdl", "--index", "i32", "--max-batch", "1", "--json"))["variants"]
    assert {v["spec"].partition(":")[0] for v in rows} == {"mamba2_layer", "layer_gated_norm"}
    assert "does not use gdn_layer" in ran("build", *model, "--op", "gdn_layer", code=1)
    assert "does not take --pool" in ran("build", *model, "--op", "mamba2_layer", "--pool", "split", "--tokens", "2", code=2)
    some = ("--no-pdl", "--index", "i32", "--max-batch", "1", "--state", "bf16", "--json")
    rows = json.loads(ran("build", *model, "--op", "mamba2_layer", "--tokens", "2", *some))["variants"]
    assert {v["spec"].partition(":")[0] for v in rows} == {"mamba2_layer", "layer_gated_norm"}
    assert "9 tokens are not 1 … 8" in ran("build", *model, "--op", "mamba2_layer", "--tokens", "9", code=1)
    assert "does not take --layout" in ran("build", *model, "--op", "mamba2_layer", "--layout", "kv", code=2)
    text = ran("explain", "mamba2_layer", *model, "--batch", "4", "--index", "i32")
    assert text.startswith("mamba2_layer, batch 4, sm_90a") and "conv_layout=channels" in text and "conv_len=4" in text
    text = ran("explain", "mamba2_layer", *model, "--batch", "4", "--index", "i32", "--tokens", "4", "--no-update", "--intermediates")
    assert text.startswith("mamba2_layer, batch 4, sm_90a") and "conv_windows=runs" in text and "update=none" in text
    assert "layout=kv" in ran("explain", "gdn_layer", "--model", "qwen3.5-397b-a17b", "--layout", "kv")
    assert "nemotron-h-8b has no layers that gdn_layer is for" in ran("explain", "gdn_layer", *model, code=1)
    kimi = ("--model", "kimi-k3", "--tp", "8", "--op", "kda_layer")
    rows = json.loads(ran("build", *kimi, "--tokens", "3", *some))["variants"]
    assert {v["spec"].partition(":")[0] for v in rows} == {"delta_layer", "layer_gated_norm"}
    assert "does not take --ring" in ran("build", *kimi, "--tokens", "3", "--ring", "store", code=2)
    text = ran("explain", "gdn_layer", "--model", "qwen3.5-397b-a17b", "--layout", "kv", "--tokens", "3", "--index", "i32")
    assert "layout=kv" in text and text.startswith("delta_layer, batch") and "update=each" in text


class PrefillAsk(Ask):
    """What a family would bring in its `models.py`: nothing else knows of it."""

    operator = "prefill"
    options = frozenset(("layout",))

    def used_by(self, model):
        return model.kind == "mamba2"

    def problems(self, model, wanted):
        return [("prefill", model.name, model.nheads, wanted.io, wanted.layout)]


def test_a_family_joins_by_what_it_asks(monkeypatch):
    known = ssmgen.models.asks()
    monkeypatch.setattr("ssmgen.models.asks", lambda: known | {"prefill": PrefillAsk()})
    monkeypatch.setattr("ssmgen.cli.options.asks", ssmgen.models.asks)
    given = {"states": (), "io": "f16", "indices": (), "pools": (), "no_update": False, "tokens": None, "intermediates": False}
    given |= {"layout": None, "ring": None, "layers": False, "replay": None, "window": None}
    rank = ("prefill", "nemotron-h-8b", 64, DType.F16, Layout.VK)
    assert [p for p in problems_of("nemotron-h-8b", None, 2, **given) if isinstance(p, tuple)] == [rank]
    kv = given | {"layout": "kv"}
    assert problems_of("nemotron-h-8b", "prefill", 2, **kv) == [(*rank[:4], Layout.KV)]
    with pytest.raises(click.UsageError, match="prefill of nemotron-h-8b does not take --ring, --tokens"):
        problems_of("nemotron-h-8b", "prefill", 1, **kv | {"ring": "store", "tokens": 2})
    assert problems_of("kimi-k3", "prefill", 1, **kv | {"ring": "store"}) == [], "a model that does not use it asks it nothing"
    model = find_model("kimi-k3")
    assert not any(isinstance(p, tuple) for p in model.asked(Wanted()))
    with pytest.raises(ModelError, match="kimi-k3 has nothing that prefill is for"):
        ask_for(model, "prefill")


def test_explain_of_norms():
    text = ran("explain", "gated_rms_norm", "--model", "qwen3.5-397b-a17b", "--batch", "8")
    assert text.startswith("gated_rms_norm, groups 512, sm_90a") and "norm_first=True" in text
    words = ran("explain", "gated_rms_norm", "--model", "mamba2-2.7b", "--tp", "2", code=1)
    assert "mamba2-2.7b has no gated norm that a rank could compute by itself" in words


def test_explain_of_convolutions():
    text = ran("explain", "causal_conv1d_update", "--model", "nemotron-h-8b", "--batch", "8", "--index", "i32")
    assert text.startswith("causal_conv1d_update, batch 8") and "layout=runs" in text and "layout=channels" in text
    for more, kib in ([], 20 * 2048), (["--tokens", "100", "--batch", "2"], 20 * 200), (["--tp", "8", "--io", "f32"], 5 * 2048):
        assert f"causal_conv1d, KiB of x {kib}, sm_90a" in ran("explain", "causal_conv1d", "--model", "nemotron-h-8b", *more)
    assert "rwkv7-0.1b has no short convolution" in ran("explain", "causal_conv1d", "--model", "rwkv7-0.1b", code=1)
