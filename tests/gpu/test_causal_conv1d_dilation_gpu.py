"""Convolutions whose taps are apart, on a card: the bits of a wider weight with zeros between its taps."""

from __future__ import annotations

import pytest
import torch
from conv_laws import Draw, equal
from test_causal_conv1d_dilation import BOTH, REACH, both
from test_causal_conv1d_gates import BF16, F16, F32, FORMS
from test_causal_conv1d_gates import make as steps_of
from test_causal_conv1d_prompt_gates import FORMS as PROMPTS
from test_causal_conv1d_prompt_gates import make as prompts_of
from test_causal_conv1d_prompt_gates import results

import ssmgen

pytestmark = pytest.mark.gpu
gates = pytest.mark.parametrize("gates", [(), BOTH], ids=["plain", "gated"])
dtypes = pytest.mark.parametrize(("dtype", "last", "dim"), [(BF16, True, 1024), (F16, False, 24), (F32, True, 17)])


@gates
@pytest.mark.parametrize("form", FORMS)
@dtypes
def test_steps_have_the_bits_of_a_wider_weight(gates, form, dtype, last, dim):
    form = FORMS[form] | {"entries": FORMS[form]["entries"] + 4} if "entries" in FORMS[form] else FORMS[form]
    call, wide = both(steps_of(form, Draw("cuda", dtype, last, dim, width=REACH), gates))
    assert equal(*(ssmgen.causal_conv1d_update(**given, activation="silu") for given in (call, wide)))
    for name in ("conv_state", "intermediate_conv_window"):
        assert name not in call or equal(call[name], wide[name])


@gates
@pytest.mark.parametrize("form", PROMPTS)
@dtypes
def test_prompts_have_the_bits_of_a_wider_weight(gates, form, dtype, last, dim):
    call, wide = both(prompts_of(form, Draw("cuda", dtype, last, dim, width=REACH), gates))
    for given in (call, wide):
        given["out"] = torch.zeros_like(given["x"])
    got, want = (results(ssmgen.causal_conv1d(**given, activation="silu"), given) for given in (call, wide))
    assert len(got) == len(want) and all(equal(a, b) for a, b in zip(got, want, strict=True))
