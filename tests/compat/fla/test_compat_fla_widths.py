"""fla.ops' functions for prompts with rows of widths that no kernel has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_oracles import F32, HK, HV, K, V, assert_refused, close, randn, starts_of
from fla_cases import CASES, V_FIRST, call_of
from torch import Tensor

from ssmgen.compat import fla
from ssmgen.compat.shared import delta_prompts
from ssmgen.errors import ArgumentError

LENGTHS = (5, 0, 1, 3)
K_ODD, V_ODD = K - 4, V - 6


def cut(name: str, t: object) -> object:
    """An operand with rows of K_ODD or V_ODD elements instead of K and V."""
    if not isinstance(t, Tensor):
        return t
    if name == "dt_bias":
        return t.view(HV, K)[:, :K_ODD].reshape(-1)
    return t if t.dim() != 4 else t[..., : V_ODD if t.shape[-1] == V else K_ODD]


def calls(case: str, *lead: int) -> list[dict[str, Any]]:
    """Keywords of the function of prompts, and of the one of tokens."""
    return [{n: cut(n, t) for n, t in call_of(case, chunk, *lead).items()} for chunk in (True, False)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_prompts_of_any_width_are_their_tokens_one_by_one(case, packed, monkeypatch):
    lead, count = ((1, sum(LENGTHS)), len(LENGTHS)) if packed else ((2, 5), 2)
    heads = HK if "v=v_narrow" in CASES[case][1] else HV
    before = randn(count, heads, K_ODD, V_ODD, seed=12, dtype=F32)
    kept, widths = before.clone(), []
    options = {"initial_state": before, "output_final_state": True} | ({"cu_seqlens": starts_of(LENGTHS)} if packed else {})
    run = delta_prompts.run

    def seen(function, operands, out, **more):
        widths.extend([t.shape[-1] for t in (*operands, out) if t is not None and t.dim() == 4])
        return run(function, operands, out, **more)

    monkeypatch.setattr(delta_prompts, "run", seen)
    prompt, tokens = calls(case, *lead)
    (o, last), (o2, last2) = (
        getattr(fla, f"{kind}_{CASES[case][0]}")(**call, **options) for kind, call in (("chunk", prompt), ("fused_recurrent", tokens))
    )
    assert widths and not any(n % 16 for n in widths)
    assert o.shape == prompt["v"].shape and o.is_contiguous() and close(o, o2.double())
    rounded = 2**-8 if CASES[case][0] == "gdn2" else None  # the product of v and w is rounded before the kernels
    assert last.dtype == F32 and last.shape == before.shape and last.is_contiguous() and close(last, last2.double(), rounded)
    assert torch.equal(before, kept)


@pytest.mark.parametrize("name", V_FIRST)
def test_states_of_any_width_may_be_turned(name):
    call, _ = calls(name, 2, 9)
    before = randn(2, HV, K_ODD, V_ODD, seed=12, dtype=F32)
    function = getattr(fla, f"chunk_{name}")
    o, last = function(**call, initial_state=before, output_final_state=True)
    o2, last2 = function(**call, initial_state=before.transpose(2, 3), output_final_state=True, state_v_first=True)
    assert torch.equal(o, o2) and torch.equal(last, last2.transpose(2, 3))
    assert function(**call)[1] is None


@pytest.mark.parametrize("kind", ["delta_rule", "gated_delta_rule"])
def test_delta_rules_of_any_width(kind):
    x = calls("comba", 1, 9)[0]
    del x["p"]
    if kind == "delta_rule":
        del x["g"]
    x |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    (o, last), (o2, last2) = getattr(fla, f"chunk_{kind}")(**x), getattr(fla, f"fused_recurrent_{kind}")(**x)
    assert close(o, o2.double()) and close(last, last2.double())


GATED = calls("kda-raw", 1, 4)[0]
BEFORE = randn(1, HV, K, V, seed=12, dtype=F32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (GATED | {"k": call_of("kda", True, 1, 4)["k"]}, "k is"),
        (GATED | {"initial_state": BEFORE}, "initial_state"),
        (GATED | {"dt_bias": randn(HV * K, seed=9, dtype=F32)}, "dt_bias"),
    ],
    ids=["k", "initial_state", "dt_bias"],
)
def test_what_does_not_fit_is_not_made_to(call, words):
    """Operands of the width that others would get."""
    assert_refused(fla.chunk_kda, call, ArgumentError, words)
