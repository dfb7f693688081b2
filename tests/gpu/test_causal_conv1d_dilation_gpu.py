"""Convolutions whose taps are apart, on a card: the bits of a wider weight with zeros between its taps."""

from __future__ import annotations

import pytest
from conv_laws import Draw
from test_causal_conv1d_dilation import REACH, gated, prompts_are_alike, steps_are_alike
from test_causal_conv1d_gates import BF16, F16, F32, FORMS
from test_causal_conv1d_prompt_gates import FORMS as PROMPTS

import ssmgen

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize(("dtype", "last", "dim"), [(BF16, True, 1024), (F16, False, 24), (F32, True, 17)])


@gated
@pytest.mark.parametrize("form", FORMS)
@dtypes
def test_steps_have_the_bits_of_a_wider_weight(gates, form, dtype, last, dim):
    steps_are_alike(ssmgen.causal_conv1d_update, form, Draw("cuda", dtype, last, dim, width=REACH), gates)


@gated
@pytest.mark.parametrize("form", PROMPTS)
@dtypes
def test_prompts_have_the_bits_of_a_wider_weight(gates, form, dtype, last, dim):
    prompts_are_alike(ssmgen.causal_conv1d, form, Draw("cuda", dtype, last, dim, width=REACH), gates)
