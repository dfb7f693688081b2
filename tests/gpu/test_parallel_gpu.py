"""Two GPUs of one host, a process on each: DTensors and shards give one GPU's results, bit for bit."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import layer_tool_cases
import sharded_layer_cases
from sharded_cases import cases_on_cards, failures

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices, and torch sees {torch.cuda.device_count()}"),
]


def test_two_gpus_agree_with_one(tmp_path):
    wrong = failures(RANKS, "cuda", tmp_path, cases_on_cards)
    assert not wrong, wrong


def test_decode_layers_over_two_gpus_agree_with_one(tmp_path):
    wrong = failures(RANKS, "cuda", tmp_path, sharded_layer_cases.cases, least=18)
    assert not wrong, wrong


def test_a_layer_with_its_projections_over_two_gpus_agrees_with_one(tmp_path):
    wrong = failures(RANKS, "cuda", tmp_path, layer_tool_cases.cases, least=2)
    assert not wrong, wrong
