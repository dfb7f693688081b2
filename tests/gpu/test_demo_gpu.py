"""`python -m tools.demo` on a card, with narrow models: everything is measured, and a captured step continues as eager steps do."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from tools.demo import measure, run
from tools.demo import presets as known
from tools.demo.__main__ import demo
from tools.demo.decode import Greedy, prompt
from tools.demo.measure import ACCELERATED, FUSED, FUSED_GRAPH, GRAPH, PATCHED, PLAIN, Options
from tools.demo.presets import Preset
from tools.demo.run import Report

pytestmark = pytest.mark.gpu

NARROW = {
    "mamba2": {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 2, "chunk_size": 16},
    "qwen3_5": {"hidden_size": 256, "intermediate_size": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3_next": {"hidden_size": 256, "num_experts": 4, "num_experts_per_tok": 2},
}
KINDS = {"qwen3_5": "qwen3_5_text"}


def narrow(name: str) -> Preset:
    attention = {} if name == "mamba2" else {"pattern": ("linear_attention", "full_attention"), "pattern_as": "layer_types"}
    return Preset(name=name, like="none", kind=KINDS.get(name, name), source="these tests", sizes=NARROW[name], **attention)


@pytest.mark.parametrize("name", NARROW)
def test_a_family_is_measured_in_every_way(name):
    rows, failed = run.family(narrow(name), (1, 3), Options(layers=2, tokens=4, rounds=2))
    Report({}, rows, failed).check()
    for row in rows:
        assert not row.notes and row.ms.keys() == {*row.kernels, ACCELERATED}
        assert row.kernels.keys() == {PLAIN, PATCHED, FUSED, GRAPH, FUSED_GRAPH} and row.ms[ACCELERATED] < row.ms[PLAIN]
        assert row.kernels[FUSED] < row.kernels[PATCHED] < row.kernels[PLAIN] and row.kernels[GRAPH] > 0 and row.same == row.tokens == 24
        assert row.ms[GRAPH] < row.ms[PLAIN]


@pytest.mark.parametrize("name", NARROW)
def test_prompts_are_measured_patched_and_not(name):
    rows, failed = run.family(narrow(name), (1, 2), Options(layers=2, rounds=2, prompts=(5, 300)))
    Report({}, prompts=rows, failed=failed).check()
    assert len(rows) == 4
    for row in rows:
        assert not row.notes and row.ms.keys() == row.kernels.keys() == row.memory.keys() == {PLAIN, PATCHED, FUSED}
        assert row.kernels[FUSED] < row.kernels[PATCHED] < row.kernels[PLAIN] and min(row.memory.values()) > 0
        assert max(row.apart.values()) < 0.2
        if name == "mamba2":
            assert row.memory[PATCHED] < row.memory[PLAIN]


@pytest.mark.parametrize("fuse", [False, True], ids=["patched", "fused"])
@pytest.mark.parametrize("name", NARROW)
def test_a_captured_step_gives_the_tokens_of_eager_steps(name, fuse):
    model = measure.prepared(narrow(name), (2,), Options(layers=2), "cuda")
    ids = prompt(2, model.config.vocab_size, "cuda")
    graph = measure.captured(model, ids, 12, fuse)
    got = graph.tokens(6)  # after the tokens that `captured` compared
    with measure.served(model, fuse):
        want = Greedy(model, ids, 12).tokens(10)
    assert torch.equal(got, want[:, 4:])


def test_the_command_prints_and_saves(monkeypatch, tmp_path):
    monkeypatch.setattr(known, "presets", lambda: {"mamba2": narrow("mamba2")})
    file = tmp_path / "demo.json"
    sizes = ["--batch", "2", "--layers", "2", "--tokens", "2", "--rounds", "1"]
    result = CliRunner().invoke(demo, ["--model", "mamba2", *sizes, "--json", str(file)])
    assert result.exit_code == 0, result.stderr
    assert "| mamba2 | none | 2 | 2 |" in result.stdout
    saved = json.loads(file.read_text())
    ways = {PLAIN, PATCHED, FUSED, GRAPH, FUSED_GRAPH, ACCELERATED}
    assert saved["device"] == torch.cuda.get_device_name() and saved["rows"][0]["ms"].keys() == ways
