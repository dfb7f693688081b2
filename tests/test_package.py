"""The package as a whole: its import, generated files, the command line."""

from __future__ import annotations

import ast
import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from programs import succeeds

import ssmgen
from ssmgen.cli import main
from ssmgen.compile.render import render
from ssmgen.errors import DriftError
from ssmgen.spec.kernel import SM90, Arch, flat
from ssmgen.variants import defaults, generate
from ssmgen.variants.lock import text_of

ROOT = Path(ssmgen.__file__).parent.parent


def ssmgen_command(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


# Importing.


def test_import_touches_neither_cuda_nor_the_file_system(tmp_path):
    program = (
        "import sys\nbefore = set(sys.modules)\nimport ssmgen\n"
        "loaded = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "assert not loaded & {'torch', 'cuda', 'jinja2', 'click'}, loaded\n"
        "import ssmgen.calls.api, torch\nassert not torch.cuda.is_initialized()\n"
        "from ssmgen import selective_state_update as f\nassert callable(f) and callable(ssmgen.selective_state_update)\n"
    )
    env = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    succeeds(program, env=env)
    assert not list(tmp_path.iterdir())


def test_editors_see_the_public_names():
    """Those of the stub, each under its own name and from the module that has it."""
    seen = {}
    for node in ast.parse((ROOT / "ssmgen" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            seen |= {alias.asname: getattr(importlib.import_module(f"ssmgen.{node.module}"), alias.name) for alias in node.names}
    assert seen == {name: getattr(ssmgen, name) for name in ssmgen.__all__}


def test_public_names():
    for name in ssmgen.__all__:
        assert callable(getattr(ssmgen, name))
    with pytest.raises(AttributeError):
        ssmgen.no_such_name  # noqa: B018


# Generated files.


def test_generated_texts_are_what_the_templates_render():
    pairs = {generate.path_of(*pair): pair for pair in generate.default_variants()}
    texts = {str(path.relative_to(ROOT / "generated")): path.read_text() for path in (ROOT / "generated").glob("*/*.cu")}
    assert texts and set(texts) <= set(pairs)
    assert not [name for name, text in texts.items() if text != render(*pairs[name])]


def test_default_variants_show_every_form_of_all_operators():
    """By the first part of their names. Fewer would leave a branch of a template unseen, and many would hide it."""
    found = [spec for spec, arch in generate.default_variants() if str(arch) == "sm_90a"]
    stems = {spec.stem.rpartition("_h")[0] for spec in found}
    assert {"delta_g", "delta_gk", "la_g", "lowrank_gk", "ssu"} <= stems
    assert max(Counter(spec.kind for spec in found).values()) <= 21
    served = {
        (family, name): {(arch, s) for arch in (SM90, Arch(90, "a")) for s in default.specs(arch)}
        for family, name, default in defaults.named()
    }
    for asked, specs in served.items():
        assert specs.difference(*(others for other, others in served.items() if other != asked)), f"{asked} shows what others do"
    linear = [spec for spec in found if spec.family == "linear_attention"]
    for holds in ("frozen", "intermediates", "interleaved", "prefetch", "commit", "low_rank", "l2norm"):
        assert {bool(getattr(spec, holds)) for spec in linear} == {True, False}, holds
    assert any(spec.ringed() for spec in linear)
    assert {(spec.philox_rounds > 0, spec.interleaved, spec.several) for spec in linear} >= {
        (True, False, False),
        (True, True, False),
        (True, False, True),
    }
    conv = [spec for spec in found if spec.family == "causal_conv1d"]
    for holds in ("layout", "loads", "shifted", "ragged", "seq_idx", "pool", "final", "silu"):
        assert len({getattr(spec, holds) for spec in conv}) == 2, holds
    update = [spec for spec in found if spec.family == "causal_conv1d_update"]
    for holds, kinds in ("layout", 3), ("advance", 3), ("count", 3), ("tokens", 3), ("loads", 2), ("saved", 2), ("parents", 2):
        assert len({getattr(spec, holds) for spec in update}) == kinds, holds
    scans = [spec for spec, _ in generate.default_variants() if spec.family == "chunk_scan"]  # on sm_90a most are by warpgroups
    for holds in ("z", "pool", "final", "initial", "ragged", "dt_softplus", "dt_limit", "copy", "state_loads", "state"):
        assert len({getattr(spec, holds) for spec in scans}) == 2, holds
    assert len({spec.stages for spec in scans}) == 4
    assert {spec.terms for spec in scans} == {1, 3} and len({spec.x for spec in scans}) == 3
    combined = [spec for spec in found if spec.family == "combine_splits"]
    for holds in ("pair", "indexed", "sink", "mask", "lse_out", "skip_single", "in_place", "loads", "loops", "vec"):
        assert len({getattr(spec, holds) for spec in combined}) == 2, holds
    layers = [spec for spec in found if spec.family in ("mamba2_layer", "delta_layer")]
    one = [spec for spec in layers if not spec.several]
    for holds, kinds in ("conv_layout", 3), ("conv_len", 2), ("conv_loads", 2), ("conv_bias", 2), ("norm", 2), ("state", 2), ("index", 2):
        assert len({flat(spec)[holds] for spec in one}) == kinds, holds
    deltas = [spec for spec in layers if spec.family == "delta_layer"]
    for function in ("gdn_layer", "kda_layer"):
        forms = {(spec.norm_inside, spec.clustered) for spec in deltas if spec.function == function and not spec.several}
        assert forms == {(False, False), (True, False), (True, True)}, function
    for holds in ("operand_loads", "gate", "conv_loads"):
        assert len({flat(spec)[holds] for spec in deltas if spec.function == "kda_layer" and not spec.several}) == 2, holds
    for function, counts in {
        "mamba2_layer": {"update": 3, "conv_windows": 3, "conv_rows": 2, "conv_layout": 3, "norm": 2, "z": 2, "index": 2},
        "gdn_layer": {"update": 2},
        "kda_layer": {"update": 3, "philox_rounds": 2, "conv_windows": 3, "intermediate_indices": 2, "conv_layout": 2, "gate": 2},
    }.items():
        several = [spec for spec in layers if spec.stem.startswith(f"{function}_t")]
        for holds, kinds in counts.items():
            assert len({flat(spec)[holds] for spec in several}) == kinds, (function, holds)
    assert {min(spec.unit, 64) for spec in combined} == {16, 32, 64} and {spec.axes for spec in combined} == {1, 2, 3}


def test_drift_is_found(tmp_path, monkeypatch):
    few = [(spec, arch) for spec, arch in generate.default_variants() if str(arch) == "sm_90a" and spec.stem.startswith("ssu")][:4]
    monkeypatch.setattr(generate, "default_variants", lambda: few)
    generate.write(tmp_path)
    path = next(tmp_path.glob("sm_90a/ssu*.cu"))
    path.write_text(path.read_text().replace("kIlp", "kILP"))
    lock = json.loads((tmp_path / generate.LOCK).read_text())
    other = next(p for p in lock["variants"] if p != str(path.relative_to(tmp_path)))
    (major,) = lock["compilers"]
    lock["variants"][other]["resources"][major]["registers"] += 1
    (tmp_path / generate.LOCK).write_text(text_of(lock))
    with pytest.raises(DriftError) as e:
        generate.check(tmp_path)
    assert "differs from what the template renders" in str(e.value) and "resources are" in str(e.value) and len(e.value.problems) == 2
    lock["compilers"][major] = f"CL-0 V{major}.0.0"
    (tmp_path / generate.LOCK).write_text(json.dumps(lock))
    generate_again = CliRunner().invoke(main, ["generate", "--check", "--dir", str(tmp_path)])
    assert generate_again.exit_code == 3 and "resources are" not in generate_again.output


# The command line.


def test_build_then_hit(own_cache):
    few = ("build", "--model", "nemotron-h-8b", "--op", "selective_state_update", "--tp", "8", "--index", "i32", "--arch", "sm_80")
    first = json.loads(ssmgen_command(*few, "--json"))
    again = json.loads(ssmgen_command(*few, "--json"))
    assert first["variants"] and not any(v["hit"] for v in first["variants"]) and all(v["hit"] for v in again["variants"])
    assert all(v["resources"]["spill_stores"] == 0 and v["error"] is None for v in first["variants"])
    assert "found, 0 failed" in ssmgen_command(*few)


def test_build_of_linear_attention(own_cache):
    def built(*args: str) -> set[str]:
        call = ["--model", "qwen3.5-397b-a17b", "--op", "linear_attention", "--state", "bf16", "--index", "i32"]
        rows = json.loads(ssmgen_command("build", *call, "--json", *args))
        assert all(v["resources"]["spill_stores"] == 0 and v["error"] is None for v in rows["variants"])
        return {v["name"].partition("_l")[0] for v in rows["variants"]}

    assert built("--tp", "8") == {"delta_g_h8v128k128g2_bf16", "delta_g_h8v128k128g2_bf16_ragged"}  # ragged: vLLM, in addition to prompts
    assert built("--tokens", "4", "--intermediates") == {"delta_g_h64v128k128g16_bf16_many"}
    assert built("--tokens", "4", "--no-update") == {"delta_g_h64v128k128g16_bf16_frozen"}
    assert built("--tokens", "4", "--no-update", "--ring", "store") == {"delta_g_h64v128k128g16_bf16_frozen_ring"}
    assert built("--ring", "commit", "--layers") == {"delta_g_h64v128k128g16_bf16_many_commit"}
    assert built("--layout", "kv", "--no-pdl") == {"delta_g_h64v128k128g16_bf16"}


def test_build_of_all_models_of_an_operator(own_cache, one_compile):
    args = ["build", "--all", "--op", "linear_attention", "--index", "i32", "--max-batch", "1", "--no-pdl", "--json"]
    rows = json.loads(ssmgen_command(*args))
    assert {v["spec"].partition(":")[0] for v in rows["variants"]} == {"linear_attention"} and len(rows["variants"]) > 8


@pytest.mark.matrix
def test_built_layer_can_be_shipped(own_cache, tmp_path, monkeypatch):
    """All of the model's operators, with one type of states and one of slots: the other types take as long again, and are built alike."""
    layer, model = tmp_path / "layer", ["--model", "mamba-130m", "--arch", "sm_90a", "--state", "bf16", "--index", "i32", "--json"]
    built = json.loads(ssmgen_command("build", *model, "--out", str(layer)))
    assert not own_cache.exists() and len({v["spec"].partition(":")[0] for v in built["variants"]}) >= 3
    monkeypatch.setenv("SSMGEN_CACHE_PATH", str(layer))
    monkeypatch.setenv("SSMGEN_COMPILE", "deny")
    again = json.loads(ssmgen_command("build", *model))
    assert [v["key"] for v in again["variants"]] == [v["key"] for v in built["variants"]] and all(v["hit"] for v in again["variants"])
    denied = CliRunner().invoke(main, ["build", "--model", "mamba-370m"])
    assert denied.exit_code == 1 and "SSMGEN_COMPILE=deny" in denied.output


def test_a_spill_fails_the_build_unless_allowed(own_cache):
    spec = "selective_state_update:d_state=128,headdim=64,state=bf16,lanes=16,vec=8,min_blocks=16"
    failed = CliRunner().invoke(main, ["build", "--spec", spec])
    assert failed.exit_code == 1 and "spills" in failed.output and "--max-spill" in failed.output
    assert "0 failed" in ssmgen_command("build", "--spec", spec, "--max-spill", "4096")


@pytest.mark.parametrize(
    "args",
    [
        ["build"],
        ["build", "--all", "--model", "x"],
        ["build", "--model", "mamba-130m", "--arch", "sm90"],
        ["build", "--spec", "slot_copy:slot_bytes=4096", "--op", "selective_state_update"],
        ["build", "--model", "mamba-130m", "--tokens", "4"],
        ["explain", "kda"],
        ["explain", "Ring", "--model", "kimi-k3"],
        ["show"],
        ["bench", "softmax"],
    ],
)
def test_wrong_command_lines_exit_with_2(args):
    assert CliRunner().invoke(main, args).exit_code == 2


def test_unknown_model_exits_with_1():
    assert "'x' is not a known model" in ssmgen_command("build", "--model", "x", code=1)


def test_list_show_diff_and_stats(own_cache):
    names = [row["name"] for row in json.loads(ssmgen_command("list", "--json"))]
    wide = next(n for n in names if n.startswith("ssu_h128p64n128g8_bf16") and "pf" in n)
    narrow = next(n for n in names if n.startswith("ssu_h1p1536"))
    assert ssmgen_command("show", wide).startswith("// selective_state_update for sm_90a")
    assert ".entry" in ssmgen_command("show", wide, "--ptx")
    assert "LDG.E.128" in ssmgen_command("show", wide, "--sass")
    stats = json.loads(ssmgen_command("show", wide, "--stats", "--json"))
    assert stats["registers"] <= 64 and stats["local_memory"] == 0 and stats["global_stores_16_byte"] == 4
    assert "kDState = 16" in ssmgen_command("diff", wide, narrow, code=1)
    assert ssmgen_command("diff", wide, wide) == ""
    assert "several variants match" in ssmgen_command("show", "ssu_", code=1)
    verify = next(n for n in names if "_frozen_" in n and "ring" not in n)
    assert ssmgen_command("show", verify).startswith("// linear_attention for sm_90a") and "HMMA" in ssmgen_command(
        "show", verify, "--sass"
    )
    assert "cached" in ssmgen_command("list")


def test_explain_and_models():
    text = ssmgen_command("explain", "selective_state_update", "--model", "nemotron-h-8b", "--batch", "256", "--index", "i32")
    assert "-> bandwidth" in text and "MiB; the rule is for at most" in text
    rows = json.loads(ssmgen_command("explain", "selective_state_update", "--model", "mamba-130m", "--arch", "sm_80,sm_90a", "--json"))
    assert {r["arch"] for r in rows} == {"sm_80", "sm_90a"}
    listed = {m["name"]: m for m in json.loads(ssmgen_command("models", "--json"))}
    assert listed["falcon-mamba-7b"]["function"] == "selective_state_update" and listed["kimi-k3"]["gate"] == "bounded"
    assert [listed[name]["layer_function"] for name in ("nemotron-h-8b", "qwen3.5-9b", "kimi-k3", "mamba-130m")] == [
        "mamba2_layer",
        "gdn_layer",
        "kda_layer",
        None,
    ]
    assert "(unverified)" in ssmgen_command("models")


def test_explain_of_linear_attention():
    text = ssmgen_command("explain", "gated_delta_rule", "--model", "qwen3-next-80b-a3b", "--batch", "8", "--index", "i32")
    assert text.startswith("linear_attention, batch 8") and "-> latency: linear_attention:dim_k=128" in text
    (row,) = json.loads(ssmgen_command("explain", "kda", "--model", "kimi-k3", "--index", "i64", "--tokens", "4", "--json"))
    assert row["operator"] == "linear_attention" and "tokens=many" in row["problem"]


@pytest.mark.parametrize(
    ("op", "model", "function"),
    [
        ("gla", "minimax-text-01", "lightning_attn"),
        ("selective_state_update", "kimi-k3", "kda"),
        ("kda", "mamba-130m", "selective_state_update"),
    ],
)
def test_a_model_of_another_operator_is_named(op, model, function):
    assert f"{model} is decoded by {function}, not by {op}" in ssmgen_command("explain", op, "--model", model, code=1)


def test_cache_commands(own_cache):
    ssmgen_command("build", "--spec", "slot_copy:slot_bytes=4096")
    assert ssmgen_command("cache", "path").strip() == str(own_cache)
    (row,) = json.loads(ssmgen_command("cache", "ls", "--json"))
    assert row["name"].startswith("slot_copy") and "slot_copy" in ssmgen_command("cache", "ls")
    assert ssmgen_command("cache", "verify") == "0 damaged\n"
    path = Path(row["path"])
    path.write_bytes(path.read_bytes()[:-5])
    assert "has another digest than it records: truncated or altered" in ssmgen_command("cache", "verify", code=1)
    assert "removed 1 files" in ssmgen_command("cache", "gc")
    ssmgen_command("build", "--spec", "slot_copy:slot_bytes=8192")
    assert "removed 1 files" in ssmgen_command("cache", "clear")


def test_env():
    facts = json.loads(ssmgen_command("env", "--json"))
    assert facts["ssmgen"] == ssmgen.__version__ and facts["nvrtc_build"].startswith("CL-") and facts["cache_layers"]
    assert "nvrtc_build" in ssmgen_command("env")


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_bench_without_a_gpu_says_so():
    assert "torch finds no CUDA device; bench needs one" in ssmgen_command("bench", "selective_state_update", code=1)
