"""Rows of any length on the card, by the laws of all other sizes."""

from __future__ import annotations

import combine_cases
import decode_cases
import la_cases
import narrow_cases
import norm_cases
import odd_sizes
import pytest
import ssu_cases
import ssu_token_cases
import torch

import ssmgen
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch

pytestmark = pytest.mark.gpu


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.id)


@named(odd_sizes.linear())
def test_linear_attention(case):
    call = la_cases.make_call(case, "cuda")
    want = la_cases.expected(call)
    call.run()
    decode_cases.assert_matches(call, want)


@named(odd_sizes.mamba())
def test_selective_state_update(case):
    call = ssu_cases.make_call(case, "cuda")
    want = ssu_cases.expected(call)
    ssmgen.selective_state_update(*call.args, **call.kwargs)
    ssu_cases.assert_matches(call, want)


@named(odd_sizes.mamba_tokens())
def test_selective_state_update_of_several_tokens(case):
    call = ssu_token_cases.make_call(case, "cuda")
    want = ssu_token_cases.expected(call)
    call.run()
    ssu_token_cases.assert_matches(call, want)


@named(odd_sizes.narrow())
def test_states_in_fewer_bits(case):
    if case.state == torch.float8_e4m3fn and runtime.device_arch(0) < Arch(89):
        pytest.skip("fp8 needs sm_89")
    call = narrow_cases.Call(case, "cuda")
    call.run()
    narrow_cases.assert_matches(call)


@named(odd_sizes.norms())
def test_gated_rms_norm(case):
    call = norm_cases.make(case, "cuda")
    want = norm_cases.expected(call)
    call.run()
    norm_cases.assert_matches(call, want)


@named(odd_sizes.splits())
def test_combine_splits(case):
    call = combine_cases.make(case, "cuda")
    want = combine_cases.expected(call)
    call.run()
    combine_cases.assert_matches(call, want)
