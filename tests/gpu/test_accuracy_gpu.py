"""Operators on a card, against float64: everything that a call writes, within its bounds, and nothing else."""

from __future__ import annotations

from typing import Any

import combine_cases
import conv_matrices
import la_cases
import la_trees
import norm_cases
import pytest
import replay_cases
import ssu_cases
import ssu_token_cases
import test_combine_splits_gpu
import test_gated_rms_norm_gpu
import torch
from card_calls import arch, prepare
from emulated_calls import chosen
from subjects import SUBJECTS, is_accurate

pytestmark = pytest.mark.gpu

CASES: dict[str, list[Any]] = {
    "selective_state_update": ssu_cases.matrix(),
    "several_tokens": ssu_token_cases.matrix(),
    "linear_attention": [*la_cases.matrix(), *la_cases.kv_matrix(), *la_trees.cases()],
    "gated_rms_norm": [*norm_cases.matrix(), *test_gated_rms_norm_gpu.LARGE],
    "combine_splits": [*combine_cases.matrix(), *test_combine_splits_gpu.LARGE],
    "causal_conv1d": [*conv_matrices.matrix(), *conv_matrices.update_matrix()],
    "replay": [*replay_cases.matrix(), *replay_cases.at_shapes()],
}
ALL = [pytest.param(operator, case, id=f"{operator}-{case.id}") for operator, cases in CASES.items() for case in cases]
PREPARED = ("gated_rms_norm", "combine_splits", "causal_conv1d", "replay")  # whose calls compile one kernel each


@pytest.fixture(scope="module")
def loaded() -> None:
    """Their kernels."""
    calls = (SUBJECTS[operator].make(case, "cuda") for operator in PREPARED for case in CASES[operator])
    prepare([spec for call in calls if (spec := chosen(call, arch()))])


@pytest.mark.parametrize(("operator", "case"), ALL)
def test_within_rounding_of_float64(operator, case, loaded):
    def run(call: Any) -> None:
        assert call.run() is not None
        torch.cuda.synchronize()

    is_accurate(operator, case, "cuda", run)
