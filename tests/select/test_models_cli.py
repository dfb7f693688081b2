"""Models on the command line: build and explain, by operator and by option."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ssmgen
from ssmgen.cli import main
from ssmgen.cli.options import CARDS, ArchType, problems_of
from ssmgen.errors import CompilerMissingError, ModelError, NotBuiltError
from ssmgen.select.models import Ask, Client, Wanted, ask_for, find_model
from ssmgen.spec.kernel import Arch, DType, Layout


def ran(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_build_chooses_by_operator(own_cache, one_compile):
    def families(*args: str) -> set[str]:
        rows = json.loads(ran("build", "--model", "mamba-130m", "--index", "i32", "--no-pdl", "--json", *args))["variants"]
        assert all(v["resources"]["registers"] > 0 and v["error"] is None for v in rows)
        return {v["spec"].partition(":")[0] for v in rows}

    assert families() == {"selective_state_update", "selective_scan", "selective_scan_roles", "causal_conv1d", "causal_conv1d_update"}
    norms = json.loads(ran("build", "--model", "kimi-linear-48b-a3b", "--op", "gated_rms_norm", "--no-pdl", "--json"))["variants"]
    assert norms and {v["spec"].partition(":")[0] for v in norms} == {"gated_rms_norm"}
    assert "--op is gated_rms_norm, which mamba-130m does not use" in ran(
        "build", "--model", "mamba-130m", "--op", "gated_rms_norm", code=1
    )
    assert families("--op", "selective_state_update") == {"selective_state_update"}
    tokens = json.loads(ran("build", "--model", "falcon-h1-7b", "--op", "selective_state_update", "--tokens", "4", "--json"))["variants"]
    assert {v["spec"].partition(":")[0] for v in tokens} == {"selective_state_update"} and all(",several=yes" in v["spec"] for v in tokens)
    assert "does not take --tokens" in ran("build", "--model", "mamba-130m", "--tokens", "4", code=2)
    assert families("--op", "causal_conv1d_update", "--tokens", "4") == {"causal_conv1d_update"}
    assert "--op is linear_attention, which" in ran("build", "--model", "mamba-130m", "--op", "linear_attention", code=1)
    assert "--op is causal_conv1d, which" in ran("build", "--model", "rwkv7-0.1b", "--op", "causal_conv1d", code=1)
    assert "does not take --ring" in ran("build", "--model", "kimi-k3", "--op", "causal_conv1d", "--ring", "store", code=2)


def test_build_and_explain_of_layers(own_cache, one_compile):
    model = ("--model", "nemotron-h-8b", "--tp", "8")
    rows = json.loads(ran("build", *model, "--op", "mamba2_layer", "--no-pdl", "--index", "i32", "--max-batch", "1", "--json"))["variants"]
    assert {v["spec"].partition(":")[0] for v in rows} == {"mamba2_layer", "layer_gated_norm"}
    assert "--op is gdn_layer, which" in ran("build", *model, "--op", "gdn_layer", code=1)
    assert "does not take --pool" in ran("build", *model, "--op", "mamba2_layer", "--pool", "split", "--tokens", "2", code=2)
    some = ("--no-pdl", "--index", "i32", "--max-batch", "1", "--state", "bf16", "--json")
    rows = json.loads(ran("build", *model, "--op", "mamba2_layer", "--tokens", "2", *some))["variants"]
    assert {v["spec"].partition(":")[0] for v in rows} == {"mamba2_layer", "layer_gated_norm"}
    assert "conv_tokens is 9; expected 0 … 8" in ran("build", *model, "--op", "mamba2_layer", "--tokens", "9", code=1)
    assert "does not take --layout" in ran("build", *model, "--op", "mamba2_layer", "--layout", "kv", code=2)
    text = ran("explain", "mamba2_layer", *model, "--batch", "4", "--index", "i32")
    assert text.startswith("mamba2_layer, batch 4, sm_90a") and "conv_layout=channels" in text and "conv_len=4" in text
    text = ran("explain", "mamba2_layer", *model, "--batch", "4", "--index", "i32", "--tokens", "4", "--no-update", "--intermediates")
    assert text.startswith("mamba2_layer, batch 4, sm_90a") and "conv_windows=runs" in text and "update=none" in text
    assert "layout=kv" in ran("explain", "gdn_layer", "--model", "qwen3.5-397b-a17b", "--layout", "kv")
    assert "nemotron-h-8b has no layer that gdn_layer computes" in ran("explain", "gdn_layer", *model, code=1)
    kimi = ("--model", "kimi-k3", "--tp", "8", "--op", "kda_layer")
    rows = json.loads(ran("build", *kimi, "--tokens", "3", *some))["variants"]
    assert {v["spec"].partition(":")[0] for v in rows} == {"delta_layer", "layer_gated_norm"}
    assert "does not take --ring" in ran("build", *kimi, "--tokens", "3", "--ring", "store", code=2)
    text = ran("explain", "gdn_layer", "--model", "qwen3.5-397b-a17b", "--layout", "kv", "--tokens", "3", "--index", "i32")
    assert "layout=kv" in text and text.startswith("delta_layer, batch") and "update=each" in text


class PrefillAsk(Ask):
    """The contents of a family's `models.py`: no other module knows of it."""

    operator = "prefill"
    options = frozenset(("layout",))

    def used_by(self, model):
        return model.kind == "mamba2"

    def problems(self, model, wanted):
        return [("prefill", model.name, model.nheads, wanted.io, wanted.layout)]


def test_a_family_joins_by_what_it_asks(monkeypatch):
    known = ssmgen.select.models.asks()
    monkeypatch.setattr("ssmgen.select.models.asks", lambda: known | {"prefill": PrefillAsk()})
    monkeypatch.setattr("ssmgen.cli.options.asks", ssmgen.select.models.asks)
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
    with pytest.raises(ModelError, match="kimi-k3 has no layer that prefill computes"):
        ask_for(model, "prefill")


def test_explain_of_norms():
    text = ran("explain", "gated_rms_norm", "--model", "qwen3.5-397b-a17b", "--batch", "8")
    assert text.startswith("gated_rms_norm, groups 512, sm_90a") and "norm_first=True" in text
    words = ran("explain", "gated_rms_norm", "--model", "mamba2-2.7b", "--tp", "2", code=1)
    assert "mamba2-2.7b has no gated norm that one rank can compute" in words


def test_explain_of_convolutions():
    text = ran("explain", "causal_conv1d_update", "--model", "nemotron-h-8b", "--batch", "8", "--index", "i32")
    assert text.startswith("causal_conv1d_update, batch 8") and "layout=runs" in text and "layout=channels" in text
    for more, kib in ([], 20 * 2048), (["--tokens", "100", "--batch", "2"], 20 * 200), (["--tp", "8", "--io", "f32"], 5 * 2048):
        assert f"causal_conv1d, KiB of x {kib}, sm_90a" in ran("explain", "causal_conv1d", "--model", "nemotron-h-8b", *more)
    assert "rwkv7-0.1b has no short convolution" in ran("explain", "causal_conv1d", "--model", "rwkv7-0.1b", code=1)


SMALL = ("--model", "kimi-linear-48b-a3b", "--op", "gated_rms_norm")


def foretold(*args: str) -> list[dict]:
    return json.loads(ran("build", *args, "--dry-run", "--json"))["variants"]


def test_a_build_has_what_calls_take_and_what_one_caller_takes(own_cache):
    model = ("--model", "nemotron-h-8b")
    every, both = foretold(*model), foretold(*model, "--pdl", "both")
    assert not any(",pdl=off" in v["spec"] for v in every) and len(both) > 1.85 * len(every)
    assert foretold(*model, "--pdl") == every and {v["spec"] for v in foretold(*model, "--no-pdl")} <= {v["spec"] for v in both}
    parts = {caller: foretold(*model, "--caller", caller.value) for caller in Client}
    assert all(0 < 2 * len(part) < len(every) for part in parts.values())
    assert all(v in every for part in parts.values() for v in part), "without --caller it is what any of them calls"
    assert "--caller engines fixes slots and layout. Leave out --index" in ran(
        "build", *model, "--caller", "engines", "--index", "i32", code=2
    )
    assert "makes no call" in ran("build", "--model", "rwkv7-0.1b", "--caller", "transformers", code=1)
    text = ran("build", *model, "--caller", "transformers", "--dry-run")
    assert "chunk_scan: the recurrence over prompts" in text and Client.TRANSFORMERS.left in text and "Nothing was compiled." in text
    assert not own_cache.exists() or not list(own_cache.rglob("*.cubin*")), "a dry run keeps nothing"


def test_a_dry_run_says_what_the_cache_has(own_cache):
    count = len(foretold(*SMALL))
    text = ran("build", *SMALL)
    assert f"building: {count} of {count} variants" in text, "progress without a terminal"
    assert f"{count} compiled, 0 found, 0 failed" in text and "gated_rms_norm: " in text and " s each" in text
    assert all(v["hit"] for v in foretold(*SMALL))
    assert f"{count} found, 0 would be compiled" in ran("build", *SMALL, "--dry-run")


@pytest.mark.parametrize(
    ("given", "arch"), [("sm_90", "sm_90a"), ("H100", "sm_90a"), ("b200", "sm_100a"), ("L40S", "sm_89"), ("RTX 4090", "sm_89")]
)
def test_kernels_are_built_for_what_devices_look_up(given, arch):
    assert ArchType(looked_up=True).convert(given, None, None) == [Arch.parse(arch)]
    assert ArchType(looked_up=True).convert(f"{given},{arch}", None, None) == [Arch.parse(arch)], "once"


def test_architectures_that_are_none_are_refused():
    assert "sm_90 becomes sm_90a" in ran("build", *SMALL, "--arch", "sm_90", "--dry-run")
    text = ran("build", *SMALL, "--arch", "h1000", code=2)
    assert "'h1000' is unknown; expected an architecture" in text and "h100, " in text
    assert ArchType().convert("sm_90", None, None) == [Arch(90)], "a variant may be shown for any"
    assert all(Arch.of_capability(*capability).number >= 80 for capability in CARDS.values())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Nemotron-H-8B", "nemotron-h-8b"), ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"), ("state-spaces/mamba-130m-hf", "mamba-130m"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"), ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nemotron-nano-9b-v2"),
        ("ai21labs/AI21-Jamba-1.5-Mini", "jamba-1.5-mini"), ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b-a3b"),
    ],
)  # fmt: skip
def test_checkpoints_name_their_models(given, name):
    assert find_model(given).name == name


def test_other_names_are_refused_with_near_ones():
    with pytest.raises(ModelError, match=r"'nemotron-h-9b' is not a known model. Did you mean nemotron-h-8b"):
        find_model("nemotron-h-9b")
    with pytest.raises(ModelError, match=r"'tiiuae/Falcon-H1-1.5B-Deep-Base' is not a known model. Did you mean .*falcon-h1-1.5b"):
        find_model("tiiuae/Falcon-H1-1.5B-Deep-Base")  # a model of other shapes
    with pytest.raises(ModelError, match=r"'zzz' is not a known model\. `ssmgen models` lists all"):
        find_model("zzz")


def test_a_missing_compiler_is_one_error(own_cache, monkeypatch):
    def missing():
        raise CompilerMissingError("no library")

    monkeypatch.setattr("ssmgen.cache.store.nvrtc.build_id", missing)
    text = ran("build", *SMALL, code=1)
    assert text.count("NVRTC could not be loaded") == 1 and "variants" not in text


def test_a_cache_that_takes_nothing_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="in memory only"):
        text = ran("build", *SMALL, code=1)
    assert (
        text.count("the cache cannot be written") == 1
        and "Nothing was compiled." in text
        and "variants in" not in text
        and "-" not in text[:1]
    )


def test_generate_refuses_a_checkout_of_others(tmp_path):
    package = Path(ssmgen.__file__).parents[1]
    (tmp_path / "ssmgen").mkdir()
    (tmp_path / "ssmgen" / "__init__.py").touch()
    (tmp_path / "generated").mkdir()
    for more in (["--check"], []):
        text = ran("generate", *more, "--dir", str(tmp_path / "generated"), code=1)
        assert "OtherCheckoutError" in text and "Nothing was compared or written." in text and str(package) in text.replace("\n", "")
    assert not list((tmp_path / "generated").iterdir())


def test_a_kernel_that_is_not_built_names_the_models_line(own_cache, monkeypatch):
    from ssmgen.cache.store import Cache
    from ssmgen.launch.runtime import entry_of
    from ssmgen.select.model_variants import specs_for

    arch = Arch.parse("sm_90a")
    spec = specs_for(find_model("qwen3.5-397b-a17b").divided(4).problems(), arch, (True,))[0]
    monkeypatch.setenv("SSMGEN_COMPILE", "deny")
    with pytest.raises(NotBuiltError, match=r"ssmgen build --model qwen3\.5-397b-a17b --tp 4 --arch sm_90a") as error:
        entry_of(spec, arch, Cache(own_cache))
    line = str(error.value).rpartition("ssmgen build ")[2]
    assert str(spec) in {v["spec"] for v in foretold(*line.split())}


def test_commands_say_what_they_read():
    assert "these files cannot be read:\n  - nofile.json: No such file or directory" in ran("bench", "render", "nofile.json", code=1)
    assert "state is 'fp16'; expected one of f32, f16, bf16, i16, i8, e4m3" in ran("check", "selective_state_update:state=fp16", code=1)
