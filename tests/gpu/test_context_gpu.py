"""Sequences over two processes: on one GPU, whose states go over the host, and on two, over NCCL."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from context_cases import cases_on_cards, cases_over_nccl
from context_tool_cases import cases as tool_cases
from sharded_cases import failures

pytestmark = pytest.mark.gpu


def test_two_processes_on_one_gpu_agree_with_one(tmp_path):
    wrong = failures(2, "shared", tmp_path, cases_on_cards, least=9)
    assert not wrong, wrong


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, and torch sees {torch.cuda.device_count()}")


@two_gpus
def test_two_gpus_agree_with_one_also_in_a_graph(tmp_path):
    wrong = failures(2, "cuda", tmp_path, cases_over_nccl, least=18)
    assert not wrong, wrong


def long_tool_cases(device: str):
    """Tokens enough for several parts of a rank's."""
    return tool_cases(device, 8192)


@two_gpus
def test_two_gpus_run_what_the_tool_measures(tmp_path):
    wrong = failures(2, "cuda", tmp_path, long_tool_cases, least=7)
    assert not wrong, wrong
