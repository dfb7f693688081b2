"""Rows of any length on the card, by the laws of all other sizes."""

from __future__ import annotations

import odd_sizes
import pytest
import torch
from subjects import is_accurate

from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("operator", "case"), odd_sizes.CASES, ids=odd_sizes.IDS)
def test_results_are_within_their_bounds(operator, case):
    if getattr(case, "state", None) == torch.float8_e4m3fn and runtime.device_arch(0) < Arch(89):
        pytest.skip("fp8 needs sm_89")
    is_accurate(operator, case, "cuda", lambda call: call.run())
