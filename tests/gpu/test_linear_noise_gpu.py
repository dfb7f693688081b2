"""Stochastic rounding of linear attention's states on a card: the reference's noise, bit for bit."""

from __future__ import annotations

import pytest
from linear_noise_cases import CASES, assert_rounded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_states_are_rounded_with_the_reference_s_noise(case):
    assert_rounded(case, lambda function, given: function(**given), "cuda")
