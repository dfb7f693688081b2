"""decode_attention on a card: against float64, in graphs whose position advances, with PDL and without, repeatedly."""

from __future__ import annotations

import pytest
import torch
from bits import same
from test_decode_attention import PROBLEMS, spec

import ssmgen
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.trial import TOLERANCE
from ssmgen.families.decode_attention import call as op
from ssmgen.families.decode_attention.reference import decode_attention as reference
from ssmgen.families.decode_attention.trial import operands

pytestmark = pytest.mark.gpu
WRITTEN = op.OPERANDS.written
STEPS = 200


def on_card(name: str, batch: int = 7) -> tuple[dict, dict]:
    """(the operands of a trial with their strides, options)"""
    given = operands(spec(name), batch, 0)
    made = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t) for n, t in given.items()}
    return made, {"eps": 1e-5, "unit_offset": PROBLEMS[name].unit_offset, "key_scale": 0.75}


def fresh(call: dict) -> dict:
    return call | {n: call[n].clone() for n in WRITTEN}


@pytest.mark.parametrize("pdl", [False, None], ids=["no-pdl", "pdl"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_within_rounding_of_float64(name, pdl):
    call, how = on_card(name)
    exact = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in call.items()}
    reference(**exact, **how, dtype=torch.float64)
    ssmgen.decode_attention(**call, **how, pdl=pdl)
    problem = PROBLEMS[name]
    limits = {"out": TOLERANCE[problem.x] + TOLERANCE[problem.cache], **dict.fromkeys(WRITTEN[1:], 2 * TOLERANCE[problem.cache])}
    for n in WRITTEN:
        got = call[n].cpu().double()
        assert torch.equal(got.isnan(), exact[n].isnan()), n
        assert norm_error(got.nan_to_num(), exact[n].nan_to_num()) <= limits[n], n


@pytest.mark.parametrize("name", PROBLEMS)
def test_pdl_and_the_batch_change_no_bit(name):
    call, how = on_card(name)
    together = [fresh(call) for _ in range(2)]
    for pdl, one in zip((True, False), together, strict=True):
        ssmgen.decode_attention(**one, **how, pdl=pdl)
    assert all(same(together[0][n], together[1][n]) for n in WRITTEN)
    for b in (0, 3):
        alone = fresh({n: t if n in ("q_norm", "k_norm") else t[b : b + 1] for n, t in call.items()})
        ssmgen.decode_attention(**alone, **how)
        assert all(same(alone[n][0], together[0][n][b]) for n in WRITTEN)


@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5", "f32"])
def test_a_graph_whose_position_advances(name):
    """Every replay appends a key and attends to all of them, as one call after the other does."""
    call, how = on_card(name, 2)
    call = fresh(call) | {"position": torch.tensor([0, 3], device="cuda")}
    for n in ("key_cache", "value_cache"):
        call[n].fill_(float("nan"))[:, :, :3] = 1
    ssmgen.warm(ssmgen.decode_attention, **call, **how)
    start = {n: t.clone() for n, t in call.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call["q"].mul_(1.0)  # a producer
        ssmgen.decode_attention(**call, **how)
        call["position"].add_(1)
    eager = {n: t.clone() for n, t in start.items()}
    for n, t in start.items():
        call[n].copy_(t)
    for _ in range(40):
        graph.replay()
        ssmgen.decode_attention(**eager, **how)
        assert same(call["out"], eager["out"]) and call["out"].isfinite().all()
        eager["position"].add_(1)
    assert call["position"].tolist() == [40, 43] and all(same(call[n], eager[n]) for n in WRITTEN)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_bits_again_and_again(name):
    """One call after the other, each with an output of its own; the caches get the same row again."""
    call, how = on_card(name)
    ssmgen.decode_attention(**call, **how)
    want = {n: call[n].clone() for n in WRITTEN}
    outs = torch.full((STEPS, *call["out"].shape), float("nan"), dtype=call["out"].dtype, device=call["out"].device)
    for out in outs:
        ssmgen.decode_attention(**call | {"out": out}, **how)
    assert all(same(out, want["out"]) for out in outs) and all(same(call[n], want[n]) for n in WRITTEN[1:])


def test_it_sees_what_the_kernel_before_it_writes_late():
    """A product writes q, k and v just before, many times."""
    call, how = on_card("falcon-h1", 1)
    weight = torch.randn(16 * 128, 512, device="cuda", dtype=torch.bfloat16) / 16
    x = torch.randn(STEPS, 1, 512, device="cuda", dtype=torch.bfloat16)

    def chain(i: int, pdl: bool, wait: bool) -> dict:
        product = ssmgen.skinny_linear(x[i], weight, pdl=pdl).view(1, 16, 128)
        if wait:
            torch.cuda.synchronize()
        q, k, v = product.split([12, 2, 2], dim=1)
        one = fresh(call) | {"q": q, "k": k, "v": v}
        ssmgen.decode_attention(**one, **how, pdl=pdl)
        return {n: one[n] for n in WRITTEN}

    for i in range(STEPS):
        found, want = chain(i, True, False), chain(i, False, True)
        assert all(same(found[n], want[n]) for n in WRITTEN)
