"""tools.serving, as far as it goes without vLLM and a GPU: engines are stand-ins."""

from __future__ import annotations

import functools
import gc
import json
import logging
import logging.config
import sys
import types

import pytest
import torch
from click.testing import CliRunner
from selection import costly

from tools.serving import __main__ as program
from tools.serving.compare import compared
from tools.serving.engines import Engine
from tools.serving.models import MODELS, TIMED, config_of, pool_bytes, preset_of
from tools.serving.report import answers, as_dict, steps, table
from tools.serving.run import Options, pairs_of, run
from tools.serving.worker import Warnings, covered, forget_tuning, weights_as_trained

stand_in = functools.partial(Engine, module="tests.support.serving_stand_in")


class Impatient(Engine):
    """Waits 2 s for the engine that the tests silence, and longer for others, which may start slowly."""

    def hear(self, seconds):
        silenced = self.with_ssmgen and self.folder.name.startswith("mamba2")
        return super().hear(min(seconds, 2.0) if silenced else seconds)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Runs options with stand-ins; returns the pairs, the notes, and the journal's entries."""
    monkeypatch.setenv("SERVING_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("VLLM_PLUGINS", "another,ssmgen")

    def serve(fails: str = "", start=stand_in, **options):
        monkeypatch.setenv("SERVING_FAILS", fails)
        given = Options(**{"timed": ("mamba2", "qwen3_5"), "batches": (1, 8), "steps": 4, "rounds": 2, "patience": 120} | options)
        pairs, notes = pairs_of(given), []
        run(pairs, given, tmp_path / f"engines{len(list(tmp_path.iterdir()))}", notes.append, start=start)
        return pairs, notes, [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]

    return serve


def test_rates_are_of_rounds_in_turns_with_the_gpu_to_one_engine_at_a_time(served):
    pairs, notes, journal = served(answered=(("mamba2", "float32"),))
    assert [(pair.model, pair.dtype, pair.timed, pair.failures) for pair in pairs] == [
        ("mamba2", "bfloat16", True, []), ("qwen3_5", "bfloat16", True, []), ("mamba2", "float32", False, []),
    ]  # fmt: skip
    assert notes[-2].endswith("round 2 of 2") and pairs[2].rates == {} and pairs[2].busy == {}
    assert sum(note.endswith("3 kernels tuned alone in 0.0 s") for note in notes) == 4
    for pair in pairs[:2]:
        for (case, ours), rates in pair.rates.items():
            wanted = case.batch / (0.5e-3 if ours else 1e-3) if case.what == "decode" else 1e6
            assert len(rates) == 2 and rates == pytest.approx([wanted] * 2)
            assert pair.cpu[case, ours] == pytest.approx(
                [(0.25e-3 if ours else 0.5e-3) if case.what == "decode" else case.prompt * case.batch / 2e6] * 2
            )
        assert len(pair.rates) == 2 * 4
        assert set(pair.busy) == set(pair.rates)
        for (case, ours), busy in pair.busy.items():
            step = 0.25e-3 if ours else 0.75e-3
            assert busy == pytest.approx((step, 7) if case.what == "decode" else (case.batch * 1e-6 + step, 12))
    first = next(i for i, entry in enumerate(journal) if entry["what"] == "tune")
    assert all(a["end"] <= b["begin"] for a, b in zip(journal[first:], journal[first + 1 :], strict=False))
    timed = [entry for entry in journal[first:] if entry["what"] == "generate"]
    turns = [ours for i, ours in enumerate(entry["ours"] for entry in timed) if i == 0 or ours != timed[i - 1]["ours"]]
    # in every second round the engine with ssmgen is first; two pairs of 4 cases: where one side is last and first again, turns join
    half = [False, True] * 8
    assert turns == half + half[:-1]


def test_an_engine_is_built_for_its_cases(served):
    _, _, journal = served(answered=(("mamba2", "float32"),), timed=("qwen3_5",))
    built = {(entry["model"], entry["ours"]): entry for entry in journal if entry["what"] == "build"}
    assert built["qwen3_5", True]["graphs"] == [1, 8, 16] and built["mamba2", False]["graphs"] == [1, 16]
    assert built["qwen3_5", True]["longest"] == 2048 + 4 + 1 and built["qwen3_5", True]["layers"] == MODELS["qwen3_5"].layers
    assert built["mamba2", True]["dtype"] == "float32" and built["mamba2", True]["folder"] != built["mamba2", False]["folder"]


def test_timed_engines_apart_are_built_when_the_others_have_answered(served):
    for apart in (True, False):
        pairs, _, journal = served(answered=(("mamba2", "float32"),), timed=("qwen3_5",), apart=apart)
        assert len(pairs[0].rates) == 8 and all(pair.compared for pair in pairs)
        if apart:
            places = [(entry["model"], entry["what"]) for entry in journal]
            assert places.index(("qwen3_5", "build")) > max(i for i, place in enumerate(places) if place == ("mamba2", "state"))


@pytest.mark.parametrize("fails", ["mamba2 build", "mamba2 generate", "mamba2 tune", "mamba2 state"])
def test_an_engine_that_fails_stops_no_other(fails, served):
    pairs, notes, _ = served(fails)
    assert len(pairs[0].failures) == 1 and "no such kernel" in pairs[0].failures[0] and "what it wrote last" in pairs[0].failures[0]
    assert {ours for _, ours in pairs[0].rates} == {False} and any("FAILED" in note for note in notes)
    assert pairs[1].failures == [] and {ours for _, ours in pairs[1].rates} == {False, True}
    assert "| – | – |" in table(pairs) and "no such kernel" in answers(pairs)


@costly(1)
@pytest.mark.parametrize("asked", ["tune", "answers"])
def test_an_engine_that_does_not_answer_is_ended(asked, served):
    pairs, _, _ = served(f"mamba2 {asked} silently", functools.partial(Impatient, module="tests.support.serving_stand_in"))
    assert "has not answered in " in pairs[0].failures[0] and {ours for _, ours in pairs[0].rates} == {False}
    assert not pairs[1].failures and {ours for _, ours in pairs[1].rates} == {False, True}


def test_a_plugin_that_replaces_nothing_is_a_failure(served):
    pairs, _, _ = served("idle", timed=("mamba2",))
    assert pairs[0].failures == ["the plugin has replaced nothing: both engines are vLLM's own"]
    assert "  f kept: it is another one" in answers(pairs)


def test_no_further_round_begins_when_time_is_over(served):
    pairs, notes, _ = served(seconds=0, timed=("mamba2",))
    assert {len(rates) for rates in pairs[0].rates.values()} == {1} and "0 s are over after 1 rounds of 2" in notes
    assert pairs[0].compared is not None and pairs[0].compared.equal == 16


def test_what_is_printed(served):
    pairs, _, _ = served(timed=("mamba2",))
    lines = table(pairs).splitlines()
    assert lines[2].startswith("| mamba2, 20 layers | 1 prompt of 2048 | 1 000 000 | 1 000 000 | 1.00 | 1.00 … 1.00 | 37 % | 12 % | 63 % |")
    assert lines[-1] == "| mamba2, 20 layers | decode, 8 | 8 000 | 16 000 | 2.00 | 2.00 … 2.00 | 75 % | 50 % | 25 % | 50 % |"
    assert {line.count("|") for line in lines} == {11}
    assert answers(pairs) == "mamba2, 20 layers, bfloat16: 16 of 16 equal; log-probabilities up to there within 0.0000"
    assert steps(pairs).splitlines()[-2:] == [
        "| mamba2 | 8 | own | 1.00 | 1.00 | 0.75 | 7 | 0.50 |", "| mamba2 | 8 | with ssmgen | 0.50 | 0.50 | 0.25 | 7 | 0.25 |",
    ]  # fmt: skip
    said = json.loads(json.dumps(as_dict(pairs, vllm="0.33.0")))
    assert said["models"][0]["rates"][-1]["busy"]["own"] == pytest.approx([0.75e-3, 7])
    assert said["models"][0]["rates"][-1]["gpu_share"] == pytest.approx({"own": 0.75, "ssmgen": 0.5})
    assert said["vllm"] == "0.33.0" and len(said["models"][0]["rates"]) == 4 and len(said["models"][0]["rates"][0]["own"]) == 2


def test_calls_are_counted_where_nothing_is_timed_or_compiled(served):
    pairs, _, _ = served(answered=(("mamba2", "float32"),), timed=("qwen3_5",))
    assert [pair.taken for pair in pairs] == [{}, {"f": 7}] and "  served: f 7 times" in answers(pairs).splitlines()
    assert [each["taken"] for each in as_dict(pairs)["models"]] == [{}, {"f": 7}]
    pairs, _, _ = served(answered=(("mamba2", "float32"),), timed=(), compiled=True)
    assert [pair.taken for pair in pairs] == [{}] and "served" not in answers(pairs)


def test_prompts_are_shorter_where_there_are_many():
    options = Options(timed=("mamba2",))
    assert [(case.batch, case.prompt) for case in options.cases if case.what == "prompts"] == [(1, 2048), (8, 2048), (64, 256), (256, 64)]
    assert {case.prompt for case in options.cases if case.what == "decode"} == {16}


def test_answers_part_at_their_first_token_that_differs():
    own = {"tokens": [[1, 2, 3], [4, 5, 6], [7]], "best": [[[-1.0, -2.0]] * 3, [[-1.0, -1.5], [-1.0, -1.01], [-9.0, -9.5]], [[-1.0, -3.0]]]}
    ours = {
        "tokens": [[1, 2, 3], [4, 9, 6], [8]],
        "best": [[[-1.1, -2.0]] * 3, [[-1.2, -1.5], [-1.0, -1.03], [-1.0, -1.5]], [[-1.0, -2.0]]],
    }
    found = compared(own, ours)
    assert (found.count, found.equal, found.parted) == (3, 1, 1)
    assert found.gaps == pytest.approx([0.01, 1.0]) and found.within == pytest.approx(0.2)
    assert str(found).startswith("1 of 3 equal; others part where the two best are within 1.0000")


@pytest.mark.parametrize("model", MODELS)
def test_models_are_cut_in_proportion_and_their_states_fit(model):
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING

    preset, served = preset_of(model), MODELS[model]
    if preset.kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model}")
    config = config_of(model, served.layers, 2048)
    assert config.architectures == [served.architecture] and config.max_position_embeddings == 2048
    assert config.vocab_size / served.vocabulary == pytest.approx(config.num_hidden_layers / served.whole, rel=0.02)
    state = _state_bytes(config)
    assert state <= served.page <= 1.1 * state
    assert pool_bytes(model, served.layers, 256, False) > 256 * preset.served(served.layers)[0] * state


@pytest.mark.parametrize(("model", "q_lora_rank"), [("kimi_linear", None), ("kimi_k3", 1536)])
def test_kimi_has_the_fields_of_the_public_configuration(model, q_lora_rank, tmp_path):
    """Engines read the checkpoint's fields, where layers count from 1; transformers saves others."""
    pytest.importorskip("transformers.models.kimi_linear")
    config_of(model, MODELS[model].layers, 2048).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    layers = said["linear_attn_config"]
    assert layers["full_attn_layers"] == [4, 8, 12] and layers["kda_layers"] == [n for n in range(1, 13) if n % 4]
    assert (layers["num_heads"], layers["head_dim"]) == (said["linear_num_heads"], said["linear_head_dim"])
    assert layers["short_conv_kernel_size"] == said["linear_conv_kernel_dim"]
    assert said["model_type"] == "kimi_linear" and said["mla_use_nope"] is True and said["tie_word_embeddings"] is False
    assert said["first_k_dense_replace"] == said["num_hidden_layers"] == len(said["mlp_layer_types"])
    assert set(said["mlp_layer_types"]) == {"dense"} and said["layer_types"].count("full_attention") == 3
    latent = {"kv_lora_rank": 512, "q_lora_rank": q_lora_rank, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert latent.items() <= said.items()
    bounded = {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    assert (bounded.items() <= layers.items(), said.get("mla_use_output_gate", False)) == (model == "kimi_k3",) * 2


@pytest.mark.parametrize(("model", "heads"), [("kimi_linear", 32), ("kimi_k3", 12)])
def test_a_page_of_kimi_holds_a_block_of_latent_attention(model, heads):
    """vLLM pads states to blocks of a multiple of 128 tokens, each of 576 numbers."""
    block = 128 * 576 * 2
    assert -(-heads * 128 * (128 * 4 + 3 * 3 * 2) // block) * block <= MODELS[model].page


def _state_bytes(config):
    """A layer's states: the recurrence's, f32 if the configuration asks for it or by rule, and the convolution's, of 16 bits."""
    if hasattr(config, "linear_num_heads"):
        return config.linear_num_heads * config.linear_head_dim * (config.linear_head_dim * 4 + 3 * 3 * 2)
    if hasattr(config, "linear_num_value_heads"):
        keys, values = (
            config.linear_num_key_heads * config.linear_key_head_dim,
            config.linear_num_value_heads * config.linear_value_head_dim,
        )
        wide = getattr(config, "mamba_ssm_dtype", "") == "float32"
        return values * config.linear_key_head_dim * (4 if wide else 2) + (2 * keys + values) * 3 * 2
    names = (
        ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
        if hasattr(config, "mamba_num_heads")
        else ("num_heads", "head_dim", "state_size")
    )
    heads, size, d_state = (getattr(config, name) for name in names)
    wide = getattr(config, "mamba_ssm_cache_dtype", "") == "float32"
    return heads * size * d_state * (4 if wide else 2) + (heads * size + 2 * config.n_groups * d_state) * 3 * 2


def test_weights_are_the_same_in_every_process_and_decay():
    def model():
        made = torch.nn.Module()
        made.A, made.dt_bias = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))
        made.linear, made.norm = torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)
        weights_as_trained(made)
        return dict(made.named_parameters())

    one, other = model(), model()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["A"].max() < 0 and one["dt_bias"].max() < 0 and one["linear.bias"].abs().max() == 0 and one["norm.weight"].min() == 1
    assert one["linear.weight"].std().item() == pytest.approx(1.5 / 16, rel=0.05)


class Latent(torch.nn.Module):
    """Latent attention as vLLM loads it: W_UK_T and W_UV are parts of kv_b_proj, views of it or copies."""

    def __init__(self, copies):
        super().__init__()
        self.copies, self.kv_b_proj = copies, torch.nn.Linear(8, 2 * (4 + 6), bias=False)
        self.W_UK_T, self.W_UV = (torch.nn.Parameter(part, requires_grad=False) for part in self.parts())

    def parts(self):
        weight = self.kv_b_proj.weight.detach().to(torch.float32, copy=self.copies).T.view(8, 2, 4 + 6)
        k, v = weight.split([4, 6], dim=-1)
        return k.permute(1, 2, 0), v.transpose(0, 1)

    def process_weights_after_loading(self, dtype):
        assert dtype == self.kv_b_proj.weight.dtype
        for own, part in zip((self.W_UK_T, self.W_UV), self.parts(), strict=True):
            own.data.copy_(part)


@pytest.mark.parametrize("copies", [False, True])
def test_decode_steps_of_latent_attention_have_the_weights_of_its_prompts(copies):
    made = Latent(copies)
    before = made.W_UV.data_ptr()
    weights_as_trained(made)
    assert made.kv_b_proj.weight.std() > 0.3 and made.W_UV.data_ptr() == before  # an address that CUDA graphs hold
    assert all(torch.equal(own, part) for own, part in zip((made.W_UK_T, made.W_UV), made.parts(), strict=True))


def test_the_fused_decode_step_of_kimi_k3_has_the_weights_of_its_prompts():
    made = torch.nn.Module()
    made.conv1d, made.o_norm = torch.nn.Conv1d(3 * 8, 3 * 8, 4, groups=3 * 8, bias=False), torch.nn.RMSNorm(8)
    made.register_buffer("decode_conv1d_weight", torch.zeros(3, 4, 8))
    made.register_buffer("decode_norm_weight", torch.zeros(8))
    weights_as_trained(made)
    q, k, v = made.conv1d.weight.detach().squeeze(1).chunk(3)
    assert torch.equal(made.decode_conv1d_weight, torch.stack([q.t(), k.t(), v.t()])) and q.std() > 0.3
    assert torch.equal(made.decode_norm_weight, made.o_norm.weight.detach()) and made.decode_norm_weight.min() == 1


def test_tuning_is_forgotten(monkeypatch):
    Autotuner = type("Autotuner", (), {})
    for name in ("triton", "triton.runtime", "triton.runtime.autotuner"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["triton.runtime.autotuner"], "Autotuner", Autotuner, raising=False)
    kernel, other = Autotuner(), Autotuner()
    kernel.cache, other.cache = {"key": "a configuration"}, {}
    gc.freeze()  # as vLLM does; objects of a test run stay frozen
    assert forget_tuning() == 1
    assert kernel.cache == {} and gc.get_freeze_count() > 0


def test_a_gpu_that_does_two_things_at_once_is_busy_once():
    assert covered([]) == 0 and covered([(1, 3), (2, 4), (2.5, 3), (6, 7), (7, 7.5)]) == 4.5


def test_without_a_gpu_its_part_of_a_step_is_a_dash(served):
    pairs, _, _ = served("blind", timed=("mamba2",))
    assert pairs[0].busy == {} and not pairs[0].failures
    assert steps(pairs).splitlines()[-1] == "| mamba2 | 8 | with ssmgen | 0.50 | 0.50 | – | – | 0.25 |"


def test_options_are_read(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(program, "run", lambda pairs, options, folder, note, tell_case: seen.append((pairs, options)))
    monkeypatch.setattr(program.metadata, "version", lambda name: "0.33.0")
    ask = CliRunner().invoke
    done = ask(program.serving, ["--answers", "mamba2:float32", "--batch", "8", "--batch", "1", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    pairs, options = seen[0]
    assert options.timed == TIMED and options.batches == (1, 8) and options.answered == (("mamba2", "float32"),)
    assert json.loads((tmp_path / "out.json").read_text())["vllm"] == "0.33.0" and len(pairs) == 4
    assert ask(program.serving, ["--model", "none", "--answers", "mamba2:float16"]).exit_code == 0 and seen[1][1].timed == ()
    narrow = ["--narrow", "--model", "none", "--answers", "kimi_linear:float16"]
    for wrong in (["--answers", "mamba2"], ["--answers", "mamba3:float32"], ["--model", "mamba3"], narrow):
        assert ask(program.serving, wrong).exit_code == 2


def test_what_there_is_of_an_interrupted_run_is_printed(monkeypatch):
    def interrupted(pairs, options, folder, note, tell_case):
        pairs[0].failures.append("half done")
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run", interrupted)
    done = CliRunner().invoke(program.serving, [])
    assert done.exit_code != 0 and "half done" in done.output


def test_warnings_are_kept_when_the_engine_configures_logging_again(caplog):
    """vLLM's construction removes the handlers of the loggers below its own."""
    logger, warnings = logging.getLogger("served.plugin"), Warnings()
    logger.addFilter(warnings)
    logger.addHandler(logging.NullHandler())
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {"served": {"level": "INFO"}}})
    assert logger.handlers == []
    logger.info("replaced")
    logger.warning("its own %s runs", "f")
    logger.removeFilter(warnings)
    assert warnings.said == ["its own f runs"] and "replaced" in caplog.messages
