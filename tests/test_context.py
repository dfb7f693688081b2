"""Sequences over several ranks: processes on the CPU, each with some of the tokens, against float64 on whole sequences."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from context_cases import cases
from sharded_cases import failures


def test_four_ranks_agree_with_one(tmp_path):
    wrong = failures(4, "cpu", tmp_path, cases, least=40)
    assert not wrong, wrong
