"""tools.serving_sglang, as far as it goes without SGLang and a GPU: engines are stand-ins."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.serving.models import MODELS, config_of
from tools.serving_sglang import __main__ as program
from tools.serving_sglang import plugin
from tools.serving_sglang.proof import SETTINGS, build
from tools.serving_sglang.worker import LAYERS, Server, arguments, as_sglang_reads, said, write_config, write_entry_point


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs the program with stand-ins; returns click's result and the content of its JSON file."""
    stand_in = functools.partial(program.Arm, module="tests.support.sglang_stand_in")
    monkeypatch.setattr(program, "measure", functools.partial(program.measure, start=stand_in))
    monkeypatch.setattr(program, "Arm", stand_in)
    monkeypatch.setattr(program.metadata, "version", lambda name: "0.5.23")

    def run(*options: str, fails: str = ""):
        monkeypatch.setenv("SERVING_FAILS", fails)
        file = tmp_path / "results.json"
        given = ["--batch", "4", "--steps", "10", "--rounds", "2", "--json", str(file), "--folder", str(tmp_path / "logs"), *options]
        result = CliRunner().invoke(program.serving, given)
        return result, json.loads(file.read_text())

    return run


def test_both_engines_are_timed_and_compared(compare, tmp_path):
    result, told = compare("--model", "mamba2", "--prompt", "100")
    assert result.exit_code == 0, result.output
    assert "mamba2, 4 layers, bfloat16: 16 of 16 equal" in result.stdout
    assert "  served: scan 3 times\n  refused: scan 1 times\n  scan refuses 7\n" in result.stdout
    assert "| mamba2, 4 layers | decode, 4 | 4 000 | 8 000 | 2.00 |" in result.stdout
    assert "| mamba2, 4 layers | 8 prompts of 100 | 1 000 000 | 1 000 000 | 1.00 |" in result.stdout
    (model,) = told["models"]
    assert [len(rates[side]) for rates in model["rates"] for side in ("own", "ssmgen")] == [2, 2, 2, 2]
    assert (model["taken"], model["refused"]) == ({"scan": 3}, {"scan": 1})
    logs = {folder.name: (folder / "log").read_text() for folder in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["mamba2-own", "mamba2-ssmgen"]
    for log in logs.values():  # an engine's processes end with it
        (child,) = [line.split()[1] for line in log.splitlines() if line.startswith("child ")]
        state = Path(f"/proc/{child}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize("first", ["own", "ssmgen"])
def test_a_flag_sets_the_order(compare, first):
    result, _ = compare("--model", "mamba2", "--first", first)
    assert next(line.split()[3] for line in result.stderr.splitlines() if "built in" in line) == first


def test_a_failed_engine_stops_no_other_and_shows_its_last_lines(compare):
    result, told = compare("--model", "mamba2", "--model", "qwen3_5", fails="mamba2 answers")
    assert result.exit_code == 1
    shown = [line for line in result.stderr.splitlines() if line.startswith("  | ")]
    assert len(shown) == 60 and "FAILED: mamba2-ssmgen ValueError: no such kernel" in result.stderr
    assert [model["failures"] for model in told["models"]] == [["mamba2-ssmgen ValueError: no such kernel"], []]
    assert [[bool(rates["own"]) for rates in model["rates"]] for model in told["models"]] == [[True, True], [True, True]]
    assert told["models"][1]["answers"]["equal"] == 16


def test_an_engine_that_takes_too_long_is_ended(compare):
    result, told = compare("--model", "mamba2", "--seconds", "4", "--first", "own", fails="mamba2 answers silently")
    assert result.exit_code == 1 and "mamba2-ssmgen has not answered in" in result.stderr
    assert all(rates["own"] and not rates["ssmgen"] for rates in told["models"][0]["rates"])


@pytest.mark.parametrize(("fails", "words"), [("idle", "the plugin has served no call"), ("both", "the plugin has served calls")])
def test_an_engine_with_the_wrong_functions_fails(compare, fails, words):
    result, _ = compare("--model", "mamba2", fails=fails)
    assert result.exit_code == 1 and words in result.stderr


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("", "mamba2: proved"),
        ("depends", "mamba2: NOT proved; answers depend on the batch, pieces, the cache or graphs"),
        ("same", "mamba2: NOT proved; the control's answers are equal, too, so that this proves nothing"),
        ("mamba2 needles", "ValueError: no such kernel"),
    ],
)
def test_deterministic_inference_is_proved(compare, tmp_path, fails, words):
    result, told = compare("--prove", "mamba2", fails=fails)
    assert result.exit_code == bool(fails), result.output
    assert words in result.stdout and told["models"] == []
    (proof,) = told["proofs"]
    assert proof["proved"] is not bool(fails)
    if not fails:
        settings = [row["setting"] for row in proof["rows"]]
        assert [settings.count(each.name) for each in SETTINGS] == [8, 9, 8]  # eight batches; the second engine's single requests, too
    names = sorted(folder.name for folder in (tmp_path / "logs").iterdir())
    assert names == ["proof-mamba2-0-ssmgen", "proof-mamba2-1-ssmgen", "proof-mamba2-2-own"]


def test_engines_of_a_proof_differ_in_the_mode_pieces_and_graphs():
    asked = []
    engine = types.SimpleNamespace(say=lambda do, **more: asked.append(more), folder=Path("folder"))
    for setting in SETTINGS:
        build(engine, setting, "mamba2")
    assert [more["enable_deterministic_inference"] for more in asked] == [True, True, False]
    assert [more["chunked_prefill_size"] for more in asked] == [8192, 512, 8192]
    assert [more["disable_decode_cuda_graph"] for more in asked] == [False, True, False]
    assert all(more["disable_radix_cache"] and more["mamba_ssm_dtype"] == "float32" for more in asked)  # the mode requires both


def test_answers_are_read_with_all_bits():
    exact = -1.0 - 2.0**-30
    answer = {"output_ids": [7, 9], "meta_info": {"output_top_logprobs": [[(exact, 7, None), (-2.5, 3, None)], [(-0.5, 9, None)]]}}
    assert said(answer) == [[7, [[3, -2.5], [7, exact]]], [9, [[9, -0.5]]]]


def test_the_plugin_is_an_entry_point_that_a_folder_in_the_path_has(tmp_path, monkeypatch):
    write_entry_point(tmp_path / "path")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    (found,) = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == plugin.NAME]
    assert found.load() is plugin.register
    assert plugin.register() is None and "sglang" not in sys.modules  # no scheduler here


def test_models_get_weights_and_the_scheduler_a_method_that_tells_the_counts(tmp_path, monkeypatch):
    names = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.scheduler", "sglang.srt.model_loader")
    modules = {name: types.ModuleType(name) for name in names}
    modules["sglang.srt.managers.scheduler"].Scheduler = type("Scheduler", (), {})
    modules["sglang.srt.model_loader"].loader = loader = types.SimpleNamespace(initialize_dummy_weights=None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "filled", [])
    monkeypatch.setattr(plugin, "calls", types.SimpleNamespace(taken={"f": 2}, refused={}))
    plugin.register()
    import torch

    model = torch.nn.Linear(64, 64)
    loader.initialize_dummy_weights(model)
    assert model.weight.std().item() == pytest.approx(1.5 / 8, rel=0.1) and not model.bias.any()
    scheduler = modules["sglang.srt.managers.scheduler"].Scheduler()
    scheduler.write_counts(str(tmp_path / "counts"))
    assert json.loads((tmp_path / "counts").read_text()) == {
        "taken": {"f": 2}, "refused": {}, "warnings": [], "filled": [2], "outcome": {},
    }  # fmt: skip
    scheduler.flush_cache = lambda empty_cache: empty_cache
    with pytest.raises(RuntimeError, match="not idle"):
        scheduler.forget_prefixes()


@pytest.mark.parametrize("model", MODELS)
def test_configurations_are_written_as_sglang_reads_them(model, tmp_path):
    write_config(config_of(model, 4, 2113), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == [MODELS[model].architecture]
    for name in LAYERS & fields.keys():
        assert {*fields[name]} <= {"mamba", "attention", "mlp", "moe"}
    if model == "mamba2":
        assert (fields["intermediate_size"], fields["rms_norm"]) == (fields["num_heads"] * fields["head_dim"], True)
    if model.startswith("qwen3"):
        assert fields["full_attention_interval"] == 4
    assert as_sglang_reads(fields) == fields


def test_an_engine_holds_the_largest_batch():
    given = arguments("folder", "bfloat16", 2113, [1, 8, 256])
    assert given["max_running_requests"] == given["cuda_graph_max_bs_decode"] == 256
    assert given["max_mamba_cache_size"] >= 5 * 256 and given["max_total_tokens"] >= 256 * 81


class Engine:
    """As far as Server calls it. A scheduler is idle when it is asked for the third time."""

    def __init__(self):
        self.asked, self.flushed = [], 0

    def collective_rpc(self, method):
        assert method == "forget_prefixes"
        self.flushed += 1
        assert self.flushed >= 3, "the scheduler is not idle"

    def generate(self, **given):
        self.asked.append(given)
        step = [(-1.5, 4, None), (-0.25, 3, None)]
        return [{"output_ids": [3, 3], "meta_info": {"output_top_logprobs": [step, step]}} for _ in given["input_ids"]]


def test_requests_wait_for_an_idle_scheduler_and_give_tokens_with_their_log_probabilities():
    server = Server()
    server.engine, server.vocabulary = Engine(), 2048
    assert server.answers(16, 2) == {"tokens": [[3, 3]] * 16, "best": [[[-0.25, -1.5]] * 2] * 16}
    assert server.engine.flushed == 3
    assert server.generate(8, 100, 5)["seconds"] > 0
    answered, timed = server.engine.asked
    assert [len(p) for p in answered["input_ids"]] == [1, 3, 17, 64, 130, 257, 400, 700] * 2 and answered["top_logprobs_num"] == 2
    assert [len(p) for p in timed["input_ids"]] == [100] * 8 and len({p[0] for p in timed["input_ids"]}) == 8
    assert timed["sampling_params"] == {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
