"""Which sequences of prompts are cut into segments, and what a call's workspace holds for them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from prompt_cases import (
    BF16,
    SM90,
    Case,
    make,
    problem_of,
)

import ssmgen
from ssmgen.compile.render import render
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.engine.chunks.segments import LEAST, MOST, by_rule
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule, workspace_bytes
from ssmgen.select.models import Role, Wanted, find_model
from ssmgen.select.registry import select

DELTA, KDA = Case("chunk_gated_delta_rule"), Case("chunk_kda")
PROBLEMS = {"chunk_delta_rule": DeltaProblem, "chunk_linear_attention": LinearPromptProblem}


def test_segments_cover_a_sequence():
    for most, least in ((2, 1), (3, 1), (7, 1), (16, LEAST), (3, LEAST)):
        problem = DeltaProblem(head_k=64, head_v=64, segments=most, segment_chunks=least)
        for chunks in range(1, 300):
            segments, first, each = problem.cut(chunks)
            cut = segments > 1
            assert cut == (chunks * CHUNK - CHUNK + 1 >= problem.span) and (cut or first == chunks), (most, least, chunks)
            if cut:
                ahead, behind = problem.lead
                assert segments <= most + 1 and each >= least and first == each * ahead // behind, (most, least, chunks)
                assert (segments - 2) * each < chunks - first <= (segments - 1) * each, (most, least, chunks)


def test_what_is_walked_at_once_is_as_long():
    """128 chunks, where 64 blocks of a prompt leave half of the card idle: 46 while 41 are summed, then 41 and 41."""
    assert DeltaProblem(head_k=128, head_v=128, segments=2, segment_chunks=LEAST).cut(128) == (3, 46, 41)
    assert DeltaProblem(head_k=128, head_v=128, segments=4, segment_chunks=LEAST).cut(128) == (5, 28, 25)


def test_the_rule_looks_at_heads_and_length_alone():
    assert {heads: by_rule(heads, 128) for heads in (1, 2, 4, 8, 12, 16, 22, 23, 32, 33, 34, 64)} == {
        1: 66, 2: 33, 4: 16, 8: 8, 12: 5, 16: 4, 22: 3, 23: 2, 32: 2, 33: 2, 34: 1, 64: 1,
    }  # fmt: skip


def posed(function: str, heads: int, *lead: int, **more: Any) -> Any:
    """The problem of a call without memory."""
    case = Case(function, heads=heads, key_heads=heads, head_k=128, head_v=128)
    one = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in make(case, 1).items()}
    call = {n: torch.empty(*lead, *t.shape[1:], dtype=t.dtype, device="meta") if n in case.per_token else t for n, t in one.items()}
    return problem_of(case, **call, **more)


LONG = 3 * LEAST * CHUNK - CHUNK + 1  # tokens of the shortest sequence that the rule cuts


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda", "chunk_comba", "chunk_gdn2"])
@pytest.mark.parametrize("batch", [1, 5])
def test_the_rule(function, batch):
    assert posed(function, 8, batch, LONG).segments == 8 and not posed(function, 8, batch, LONG - 1).divided
    assert not posed(function, 64, batch, LONG).divided and not posed(function, 8, batch, 10**5, segments=1).divided
    assert posed(function, 8, batch, 99, segments=3).segments == 3 and not posed(function, 8, batch, 64, segments=3).divided
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    assert posed(function, 8, LONG, cu_seqlens=starts) == posed(function, 8, 10 * LONG, cu_seqlens=starts)


def test_only_one_key_per_token_is_cut():
    assert not posed("chunk_gla", 8, 1, LONG).divided and not posed("chunk_rwkv7", 8, 1, LONG).divided
    wrong = LinearPromptProblem(head_k=64, head_v=64, rule=Rule.PLAIN, segments=2).faults()
    assert wrong == ["segments is 2 with rule=plain; expected 1, or rule=delta or old"]


@pytest.mark.parametrize("operator", PROBLEMS)
def test_one_segment_is_the_kernel_that_knows_of_none(operator):
    problem = PROBLEMS[operator](head_k=128, head_v=128)
    spec = select(operator, problem, 4, SM90, True)
    assert "segment" not in str(spec) and len(spec.kernels) == 2 and "segment" not in render(spec, SM90)
    assert len(select(operator, replace(problem, segments=4, segment_chunks=16), 4, SM90, True).kernels) == 5


def test_explain_says_it():
    def explained(heads: int, tokens: int, **more: Any) -> str:
        t = {n: torch.empty(1, tokens, heads, 128, dtype=BF16, device="meta") for n in ("q", "k", "v")}
        g = torch.empty(1, tokens, heads, device="meta")
        return str(ssmgen.explain(ssmgen.chunk_gated_delta_rule, **t, g=g, beta=g, arch="sm_90a", **more))

    assert "-> up to 8 segments, warpgroups, 64 rows, 3 stages" in explained(8, 8192)
    assert "-> up to 2 segments, " in explained(64, 8192, segments=2)
    assert "segments: 64 heads of 128 rows fill 132 SMs with fewer than 2 segments" in explained(64, 8192)
    assert "segments: the call asks for one segment, or no sequence has 48 chunks of 64 tokens: no sequence is cut" in explained(8, 2048)


@pytest.mark.parametrize(
    ("case", "plain"),
    [(replace(DELTA, heads=8, head_k=128, head_v=128), (128 + 3) * 8 * 11136),
     (replace(KDA, heads=8, head_k=128, head_v=128), workspace_bytes(8192, 3, 8, 128, Rule.DELTA))],
    ids=["delta", "kda"],
)  # fmt: skip
def test_a_workspace_holds_what_segments_leave(case, plain):
    """All three sequences, 8192 tokens together, may be cut. N and M, 128 x 128 each, are kept for all nine segments except the last."""
    assert case.workspace(8192, 3, 1) == plain and case.workspace(8192, 3) == plain + 3 * 8 * 8 * 2 * 128 * 128 * 4


def test_a_workspace_of_other_sizes():
    assert ssmgen.chunk_delta_rule_workspace(8192, 3, 8, 64, 128, 2) == (128 + 3) * 8 * 11136 + 3 * 2 * 8 * (128 + 64) * 64 * 4
    assert ssmgen.chunk_delta_rule_workspace(8192, 3, 64) == (128 + 3) * 64 * 11136
    assert ssmgen.chunk_linear_attention_workspace(8192, 3, 8, 128, "plain") == workspace_bytes(8192, 3, 8, 128, Rule.PLAIN)


@pytest.mark.parametrize(
    ("case", "words"),
    [(DELTA, "chunk_delta_rule_workspace(200, 1, 2, 32, 32, 4)"),
     (KDA, "chunk_linear_attention_workspace(200, 1, 2, 32, 'delta', 32, 4)")],
    ids=["delta", "kda"],
)  # fmt: skip
def test_a_workspace_that_is_too_small(case, words):
    needed = case.workspace(200, 1, 4)
    with pytest.raises(ArgumentError, match=rf"expected {needed} or more\. Get the size from {re.escape(words)}"):
        case.build(**make(case, 1, 200), segments=4, workspace=torch.empty(needed - 1, dtype=torch.uint8)).problem()
    with pytest.raises(ArgumentError, match=f"segments is 0; expected an integer from 1 to {MOST}"):
        case.build(**make(case, 1, 200), segments=0).problem()


@pytest.mark.parametrize(("name", "whole", "half"), [("qwen3-next-80b-a3b", 2, 4), ("kimi-linear-48b-a3b", None, 4)])
def test_models_of_few_heads_build_them(name, whole, half):
    model = find_model(name)
    for tp, segments in ((1, whole), (2, half)):
        asked = model.divided(tp).asked(Wanted(), Role.SCAN)
        cut = [p.segments for p in asked if getattr(p, "divided", False)]
        assert cut == ([] if segments is None else [segments] * (len(asked) // 2))
