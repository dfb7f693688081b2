"""Narrow models for tests of `python -m tools.demo`, and a stand-in for the device that it needs."""

from __future__ import annotations

import pytest
import torch
from hf_cases import TINY

from ssmgen.compat import hf
from tools.demo import measure, prompts
from tools.demo.measure import Launches, Options
from tools.demo.presets import Preset

FEW = Options(layers=2, tokens=2, rounds=2)
NARROW = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 4}


def narrow(**changes) -> Preset:
    """The preset mamba2 with a smaller width."""
    return Preset(name="mamba2", like="none", kind="mamba2", source="these tests", sizes={**NARROW, **changes})


def narrow_delta_rule() -> Preset:
    """qwen3_5, with one layer of each kind."""
    kinds = {"pattern": ("linear_attention", "full_attention"), "pattern_as": "layer_types"}
    return Preset(
        name="qwen3_5", like="none", kind="qwen3_5_text", source="these tests", sizes=TINY["qwen3_5"] | {"hidden_size": 32}, **kinds
    )


@pytest.fixture
def on_cpu(monkeypatch):
    """decoded() and its callees run on CPU tensors: five kernels a step, and no capture."""

    def refuse(model, ids, room, fuse):
        raise RuntimeError("no stream to capture\nwith more below") from None

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (measure, prompts):
        monkeypatch.setattr(module, "kernels", lambda step: step() is None or 5)
    monkeypatch.setattr(prompts, "kernels_by_name", lambda step: step() and {"gemm": Launches(2, 3.0)})
    monkeypatch.setattr(prompts, "peak_bytes", lambda step: step() and 7)
    monkeypatch.setattr(prompts, "free_bytes", lambda: 1000)
    monkeypatch.setattr(prompts, "seconds", lambda step: step() and 0.1)
    monkeypatch.setattr(measure, "captured", refuse)
    monkeypatch.setattr(hf, "warm", lambda model, batches, prompt_length, fuse=False: 0)
