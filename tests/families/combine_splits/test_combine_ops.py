"""combine_splits: error messages, the kernels that serve a call, engines' signatures."""

from __future__ import annotations

import math

import pytest
import torch
from combine_cases import BF16, F16, F32, I32, INF

import ssmgen
from ssmgen.compat import flashinfer, vllm
from ssmgen.errors import ArgumentError
from ssmgen.spec.kernel import Pdl


def operands(splits: int = 3, *rows: int, d_v: int = 64) -> dict[str, torch.Tensor]:
    rows = rows or (2, 4)
    return {"o": torch.randn(splits, *rows, d_v), "lse": torch.randn(splits, *rows)}


def pair(dtype: torch.dtype = BF16, *rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rows = rows or (2, 4)
    return [torch.randn(*rows, 64).to(dtype) for _ in range(2)], [torch.randn(rows) for _ in range(2)]


def problems(**changes) -> list[str]:
    call = operands() | changes
    with pytest.raises(ArgumentError) as e:
        ssmgen.combine_splits(**call)
    return e.value.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"o": None}, "o is a NoneType; expected a tensor"),
        ({"o": [torch.zeros(2, 4, 64)] * 3}, "o is a list; expected a tensor"),
        ({"o": torch.zeros(3, 2, 4, 64, dtype=torch.float64)}, "o is torch.float64; expected float32, float16 or bfloat16"),
        ({"lse": torch.zeros(3, 2, 4, dtype=F16)}, "lse is float16; expected float32"),
        ({"lse": torch.zeros(3, 4, 2)}, "lse is [3, 4, 2]; expected o's shape without d_v = [3, 2, 4]"),
        ({"o": torch.zeros(3, 2, 4, 0)}, "o is [3, 2, 4, 0], of d_v 0; expected a d_v of 1 … 1024"),
        ({"o": torch.zeros(3, 2, 4, 1028)}, "of d_v 1028; expected a d_v of 1 … 1024"),
        ({"o": torch.zeros(64)}, "o is [64]; expected [splits, *rows, d_v]"),
        ({"o": torch.zeros(3, 2, 4, 128)[..., ::2]}, "; expected 1 for its last axis, d_v. Pass a contiguous tensor"),
        ({"num_splits": torch.zeros(3)}, "num_splits is torch.float32; expected int32 or int64"),
        ({"num_splits": torch.zeros(0, dtype=I32)}, "num_splits is [0]; expected [batch + 1]"),
        ({"num_splits": torch.zeros(3, dtype=I32), "out": torch.zeros(2, 4, 64)}, "out is [2, 4, 64]; expected [batch, *rows, d_v]"),
        ({"out": torch.zeros(4, 2, 64)}, "out is [4, 2, 64]; expected [*rows, d_v] = [2, 4, 64]"),
        ({"lse_out": torch.zeros(4, 2)}, "lse_out is [4, 2]; expected [*rows] = [2, 4]"),
        ({"lse_out": torch.zeros(2, 4, dtype=BF16)}, "lse_out is bfloat16; expected float32"),
        ({"out": torch.zeros(1, 1, 64).expand(2, 4, 64)}, "two of its elements share memory"),
        ({"attn_sink": torch.zeros(2)}, "attn_sink is [2]; expected a shape that expands to [*rows] = [2, 4]"),
        ({"mask": torch.zeros(4)}, "mask is float32; expected bool"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, "mask is [2]; expected a shape that expands to"),
        ({"lse_base": 10}, "lse_base is 10; expected 2 or 'e'"),
        ({"lse_base": None}, "lse_base is None; expected 2 or 'e'"),
        ({"lse_base_out": [2]}, "lse_base_out is [2]; expected 2 or 'e'"),
        ({"empty_lse": 0.0}, "empty_lse is 0.0; expected inf or -inf"),
        ({"skip_single": True}, "skip_single is True without num_splits; expected both. Pass num_splits."),
        ({"skip_single": "no"}, "skip_single is 'no'; expected True or False"),
        ({"pdl": 1.5}, "pdl is 1.5; expected True, False or None"),
        ({"o": pair(F32)[0]}, "one of o and lse is a pair; expected both or neither"),
        ({"o": torch.zeros(3, 2, 4, 64, requires_grad=True)}, "o requires grad"),
        ({"out": torch.zeros(2, 4, 64, device="meta")}, "out is on meta, o is on cpu"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_words(change, words):
    assert any(words in problem for problem in problems(**change))


def test_pairs_that_do_not_fit():
    o, lse = pair()
    assert any("; expected bfloat16, the dtype of o" in p for p in problems(o=(o[0], o[1].half()), lse=lse))
    assert any("o[1] is [4, 2, 64]" in p for p in problems(o=(o[0], torch.zeros(4, 2, 64)), lse=lse))
    starts = torch.zeros(3, dtype=I32)
    assert any(
        "num_splits is given with a pair, whose rows have two splits each; expected None" in p
        for p in problems(o=o, lse=lse, num_splits=starts)
    )


def test_all_that_is_wrong_at_once_and_nothing_is_written():
    out = torch.full((2, 4, 64), 7.0)
    found = problems(out=out, lse_base=3, empty_lse=1, attn_sink=torch.zeros(9), mask=torch.zeros(4), pdl="yes")
    assert len(found) >= 5 and (out == 7).all()


def test_rows_that_three_strides_cannot_describe():
    call = operands(2, 2, 3, 2, 3)
    out = torch.empty(3, 4, 3, 4, 72)[:2, :3, :2, :3, :64]
    assert any("axes of rows apart; expected at most" in p for p in problems(**call, out=out))
    assert ssmgen.combine_splits(**call).shape == (2, 3, 2, 3, 64)


def test_overlap():
    call = operands()
    for name in ("o", "lse"):
        target = {"o": {"out": call["o"][1]}, "lse": {"lse_out": call["lse"][0]}}[name]
        assert any(f"overlaps {name} in memory" in p for p in problems(**call | target))
    o, lse = pair(F32)
    before = ssmgen.combine_splits(o, lse, return_lse=True)
    got = ssmgen.combine_splits(o, lse, out=o[1], lse_out=lse[1], return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, before, strict=True)) and got[0] is o[1]
    assert any("out overlaps o in memory" in p for p in problems(o=o, lse=lse, out=o[0].view(4, 2, 64).transpose(0, 1)))


# The registry.


def chosen(*args, **kwargs) -> tuple[str, object]:
    found = ssmgen.explain(ssmgen.combine_splits, *args, arch="sm_90a", **kwargs).chosen
    return found.rule, found.spec


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_rules():
    few, spec = chosen(meta(64, 64, 512), meta(64, 64))
    assert few == "parts-4" and (spec.parts, spec.lanes, spec.tiles, spec.threads) == (4, 32, 4, 128)
    many, spec = chosen(meta(2, 8192, 128), meta(2, 8192))
    assert many == "whole-warps" and (spec.parts, spec.max_splits) == (1, 2)
    single, spec = chosen(meta(200, 1, 64), meta(200, 1))
    assert single == "parts-8" and spec.parts == 8 and spec.max_splits == 0
    spec = chosen(meta(2, 16, 128, dtype=BF16), meta(2, 16))[1]
    assert (spec.lanes, spec.parts, spec.vec) == (16, 2, 8)  # teams of half a warp
    spec = chosen(meta(8, 1024, 128, dtype=BF16), meta(8, 1024))[1]
    assert (spec.parts, spec.threads, spec.pdl) == (2, 64, Pdl.TRIGGER_TOP) and chosen(meta(8, 1024, 128), meta(8, 1024))[1].parts == 1
    pdls = [chosen(meta(64, rows, 128), meta(64, rows))[1].pdl for rows in (16, 128)]
    assert pdls == [Pdl.TRIGGER_LOADED, Pdl.TRIGGER_TOP]
    text = str(ssmgen.explain(ssmgen.combine_splits, meta(2, 8192, 128), meta(2, 8192), arch="sm_90a"))
    assert "rows 8192" in text and "8192 rows of 32 times 4 columns are above 8192" in text
    assert ssmgen.supported(ssmgen.combine_splits, meta(2, 3, 1028), meta(2, 3), arch="sm_90a")[0] is False


def test_axes_that_strides_merge():
    def axes(*args, **kwargs) -> int:
        return chosen(*args, **kwargs)[1].axes

    o, lse = meta(4, 6, 5, 64), meta(4, 6, 5)
    assert axes(o, lse) == 1 and axes(o, meta(4, 5, 6).transpose(1, 2)) == 2
    assert axes(o, lse, torch.tensor([0, 4])) == 2 and axes(meta(4, 64), meta(4), torch.tensor([0, 4])) == 1
    assert axes(o, lse, out=meta(6, 8, 64)[:, :5]) == 2 and axes(o, lse, attn_sink=meta(5)) == 2 and axes(o, lse, attn_sink=meta(1)) == 1
    wide = meta(3, 6, 8, 64)[:, :, :5]
    assert axes(o, lse, torch.tensor([0, 1, 2, 4]), out=wide) == 3
    assert axes(meta(3, 4, 6, 64).transpose(0, 1), meta(3, 4, 6).transpose(0, 1)) == 2  # [n, splits, heads, d_v]


def test_alignment_chooses_the_loads():
    def loads(o: torch.Tensor, **kwargs) -> str:
        return chosen(o, meta(*o.shape[:-1]), **kwargs)[1].loads.value

    assert loads(meta(3, 5, 64)) == loads(meta(3, 5, 72)[..., :64]) == "vector"
    assert loads(meta(3, 5, 65)[..., :64]) == loads(meta(3, 5, 65)[..., 1:]) == "element"
    assert loads(meta(3, 5, 64), out=meta(5, 65)[..., 1:]) == "element"
    assert loads(meta(3, 5, 68, dtype=BF16)) == "vector"


# torch.


# Engines' signatures.


def softmax_merge(v: torch.Tensor, s: torch.Tensor, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge of v [states, ..., d_v] and s [states, ...] in float64, by the formula."""
    s = s.double() * math.log(base)
    return (torch.softmax(s, 0)[..., None] * v.double()).sum(0), s.logsumexp(0) / math.log(base)


def close(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2 if a.dtype is not F32 else 1e-5, atol=2e-2 if a.dtype is not F32 else 1e-5)


def test_flashinfer_merge_state():
    (va, vb), (sa, sb) = pair(BF16, 6, 4)
    want = softmax_merge(torch.stack([va, vb]), torch.stack([sa, sb]), 2)
    close(flashinfer.merge_state(va, sa, vb, sb.double()), want)
    v, s, mask = va.clone(), sa.clone(), torch.tensor([1, 0, 1, 1, 0, 1])
    for m in (mask.bool(), mask.to(torch.uint8)):
        v, s = va.clone(), sa.clone()
        assert flashinfer.merge_state_in_place(v, s, vb, sb, m) is None
        keep = mask == 0
        assert torch.equal(v[keep], va[keep]) and torch.equal(s[keep], sa[keep])
        close((v[~keep], s[~keep]), [t[~keep] for t in want])
    flashinfer.merge_state_in_place(va, sa, vb, sb)
    close((va, sa), want)
    with pytest.raises(ArgumentError, match="lse is float16; expected float32"):
        flashinfer.merge_state_in_place(va, sa.half(), vb, sb)


def test_flashinfer_merge_states():
    v, s = torch.randn(3, 5, 4, 64).half(), torch.randn(3, 5, 4)
    want = softmax_merge(v.transpose(0, 1), s.transpose(0, 1), 2)
    close(flashinfer.merge_states(v, s), want)
    starts = torch.arange(0, 16, 5, dtype=I32)
    close(flashinfer.variable_length_merge_states(v.flatten(0, 1), s.flatten(0, 1), starts), want)
    v, s = flashinfer.variable_length_merge_states(v.flatten(0, 1), s.flatten(0, 1), torch.tensor([0, 0, 1]))
    assert not v[0].any() and (s[0] == -INF).all() and v[1].any()


def test_vllm_merge_attn_states():
    (va, vb), (sa, sb) = pair(F16, 6, 4)
    sa[0], sb[1], sa[2], sb[2] = INF, -INF, INF, -INF
    va[0] = vb[1] = va[2] = vb[2] = math.nan
    out, total = torch.empty_like(va), torch.empty(4, 6)
    vllm.merge_attn_states(out, va, sa.t().contiguous(), vb, sb.t().contiguous(), total)
    assert torch.equal(out[0], vb[0]) and torch.equal(out[1], va[1]) and not out[2].any()
    assert torch.equal(total[:, 0], sb[0]) and (total[:, 2] == -INF).all()
    want = softmax_merge(torch.stack([va, vb])[:, 3:], torch.stack([sa, sb])[:, 3:], math.e)
    close((out[3:], total.t()[3:]), want)
    vllm.merge_attn_states(out, va, sa.t(), vb, sb.t())
    close((out[3:],), want[:1])
