"""decode_attention without a GPU: reference, emulated kernels, laws, planted mistakes."""

from __future__ import annotations

from dataclasses import replace

import kernel_laws as laws
import pytest
import torch
from emulated_calls import SM80, SM90, launch_emulated, needs_emulator
from selection import costly

import ssmgen
from ssmgen.calls.checks import TORCH_DTYPES
from ssmgen.compile.render import render
from ssmgen.emulator.check import check, trial_of
from ssmgen.errors import ArgumentError
from ssmgen.families.decode_attention import call as op
from ssmgen.families.decode_attention.reference import decode_attention as reference
from ssmgen.families.decode_attention.spec import DecodeAttentionProblem, DecodeAttentionSpec, candidates, space
from ssmgen.families.decode_attention.trial import ROOM, operands
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, DType, Pdl
from ssmgen.spec.variants import spec_of

BF16, F16, F32 = DType.BF16, DType.F16, DType.F32
PROBLEMS = {
    "falcon-h1": DecodeAttentionProblem(head_dim=128, group=6, rotary=128, angles=BF16),
    "qwen3.5": DecodeAttentionProblem(head_dim=256, group=4, rotary=64, angles=BF16, norm=BF16, unit_offset=True, gate=BF16),
    "two-chunks": DecodeAttentionProblem(head_dim=64, group=16, x=F16, cache=F16, rotary=64, angles=F32),
    "f32": DecodeAttentionProblem(head_dim=256, group=8, x=F32, cache=F32),
    "lanes-without-channels": DecodeAttentionProblem(head_dim=80, group=1, x=F32, cache=F32, rotary=20, angles=F32),
    "wider-cache": DecodeAttentionProblem(head_dim=96, group=3, cache=F32, norm=F32, gate=BF16),
    "small": DecodeAttentionProblem(head_dim=8, group=2, x=F16, cache=F16, rotary=2, angles=F16),
}
PLAIN = op.Options()
ARCHS = [Arch.parse(a) for a in ("sm_80", "sm_90a", "sm_100a", "sm_120")]


def spec(name: str = "falcon-h1", **how) -> DecodeAttentionSpec:
    problem = PROBLEMS[name]
    own = {"heads": problem.divided(8), "blocks": 8, "warps": 8, "ilp": 2, "pdl": Pdl.TRIGGER_TOP}
    return spec_of(DecodeAttentionSpec, problem, **own | how)


def emulated(of: DecodeAttentionSpec, named: dict, options: op.Options = PLAIN, change=str) -> dict[str, torch.Tensor]:
    """The operands that a call writes, on copies."""
    fresh = {n: t.clone() if n in op.OPERANDS.written else t for n, t in named.items()}
    launch_emulated(of, op.FAMILY, op.CALLER.checked(fresh, options, None), options, fresh, change=change)
    return {n: fresh[n] for n in op.OPERANDS.written}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@needs_emulator
@pytest.mark.parametrize("how", [{}, {"blocks": 1, "ilp": 4, "warps": 4}, {"blocks": 2, "ilp": 1, "pdl": Pdl.OFF}], ids=("8", "1", "2"))
@pytest.mark.parametrize("name", PROBLEMS)
def test_variants_are_within_rounding_of_float64(name, how):
    """Rows of the caches from `position` on are NaN, and some sequences are padding."""
    found = check(spec(name, **how), SM90, batch=7)
    assert found.passed, found.wrong


@needs_emulator
@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5"])
def test_the_batch_and_its_neighbours_change_no_bit(name):
    of = spec(name)
    named = operands(of, 7, 0)
    together = emulated(of, named)
    for b in (0, 3, 4):
        one = {n: t if n in ("q_norm", "k_norm") else t[b : b + 1] for n, t in named.items()}
        alone = emulated(of, one)
        assert all(same(alone[n][0], together[n][b]) for n in alone)
    swapped = emulated(of, {n: t if n in ("q_norm", "k_norm") else t.flip(0) for n, t in named.items()})
    assert all(same(swapped[n].flip(0), together[n]) for n in swapped)


@needs_emulator
def test_pdl_changes_no_bit():
    named = operands(spec(), 4, 0)
    results = [emulated(spec(pdl=pdl), named) for pdl in (Pdl.OFF, Pdl.WAIT, Pdl.TRIGGER_TOP, Pdl.TRIGGER_LOADED)]
    assert all(same(found[n], results[0][n]) for found in results for n in found)


@needs_emulator
@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5", "two-chunks"])
def test_query_heads_of_a_block_change_no_bit(name):
    problem = PROBLEMS[name]
    named = operands(spec(name), 4, 0)
    found = [emulated(spec(name, heads=n, warps=4), named) for n in (1, 2, problem.divided(8))]
    assert all(same(each[n], found[0][n]) for each in found for n in each)


@needs_emulator
@pytest.mark.parametrize("how", [{}, {"heads": 2, "warps": 4, "ilp": 4}], ids=("most", "few"))
def test_only_the_new_row_of_a_cache_is_written(how):
    of = spec("two-chunks", **how)
    named = operands(of, 7, 0)
    found = emulated(of, named)
    for name, product in (("key_cache", None), ("value_cache", named["v"])):
        for b, at in enumerate(named["position"].tolist()):
            others = [j for j in range(ROOM) if j != at]
            assert same(found[name][b, :, others], named[name][b, :, others])
            if product is not None and 0 <= at < ROOM:
                assert same(found[name][b, :, at], product[b])  # a copy
    padded = [b for b, at in enumerate(named["position"].tolist()) if not 0 <= at < ROOM]
    assert len(padded) == 2 and not found["out"][padded].any()


@needs_emulator
@pytest.mark.parametrize("at", [0, 1, 15, 16, 127, 128, 129, 199])
def test_every_number_of_keys(at):
    """Around the numbers of keys that a cluster has at once."""
    of = spec(ilp=1)
    named = operands(of, 1, at) | {"position": torch.tensor([at])}
    for name in ("key_cache", "value_cache"):
        named[name] = torch.randn(1, 2, ROOM, of.head_dim, generator=torch.Generator().manual_seed(at)).bfloat16()
        named[name][:, :, at:] = float("nan")
    want = {n: named[n].double() for n in op.OPERANDS.written}
    reference(**op.CALLER.checked(named, op.Options(), None) | want, dtype=torch.float64)
    assert torch.allclose(emulated(of, named)["out"].double(), want["out"], rtol=0.01, atol=0.01)


@needs_emulator
def test_steps_one_after_the_other_are_the_attention_of_the_whole_sequence():
    """Six steps on one cache, against softmax over all of it."""
    of = spec("f32")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 256, generator=g) for heads in (16, 2, 2))
    caches = {name: torch.full((1, 2, 8, 256), float("nan")) for name in ("key_cache", "value_cache")}
    for t in range(6):
        named = {"q": q[t : t + 1], "k": k[t : t + 1], "v": v[t : t + 1], **caches, "position": torch.tensor([t])}
        found = emulated(of, named | {"out": torch.empty(1, 16, 256)})
        caches = {name: found[name] for name in caches}
        want = torch.nn.functional.scaled_dot_product_attention(
            q[t].view(1, 16, 1, 256), k[: t + 1].transpose(0, 1)[None], v[: t + 1].transpose(0, 1)[None], enable_gqa=True
        )
        assert torch.allclose(found["out"], want[:, :, 0], rtol=1e-5, atol=1e-5)


def test_the_reference_is_the_attention_of_torch():
    """With transformers' rotation, norms of 1 + weight, a scale of k and a gate."""
    named = operands(replace(spec("qwen3.5"), **dict.fromkeys(("x", "cache", "angles", "norm", "gate"), F32)), 1, 0)
    at, width = 150, named["cos"].shape[1]

    def prepared(x, weight):
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + weight, 1e-5)
        turned = x[..., :width] * named["cos"] + torch.cat([-x[..., width // 2 : width], x[..., : width // 2]], -1) * named["sin"]
        return torch.cat([turned, x[..., width:]], -1)

    keys, values = named["key_cache"].clone()[:, :, : at + 1], named["value_cache"].clone()[:, :, : at + 1]
    keys[:, :, at], values[:, :, at] = 0.5 * prepared(named["k"], named["k_norm"]), named["v"]
    want = torch.nn.functional.scaled_dot_product_attention(
        prepared(named["q"], named["q_norm"])[:, :, None], keys, values, scale=0.1, enable_gqa=True
    )[:, :, 0] * torch.sigmoid(named["gate"])
    got = ssmgen.decode_attention(**named, eps=1e-5, unit_offset=True, key_scale=0.5, scale=0.1)
    assert got is named["out"] and torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(named["key_cache"][:, :, at], keys[:, :, at], rtol=1e-5, atol=1e-6)


# Specs and texts.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 100}, "head_dim is 100; expected a multiple of 8 up to 256"),
        ({"head_dim": 264}, "head_dim is 264"),
        ({"group": 65}, "group is 65; expected 1 … 64"),
        ({"rotary": 130}, "rotary is 130; expected an even number up to head_dim 128"),
        ({"rotary": 0}, "one of rotary and angles is missing; expected both or neither"),
        ({"unit_offset": True}, "unit_offset is yes and norm is none; expected a norm"),
        ({"blocks": 3}, "blocks is 3; expected 1, 2, 4 or 8"),
        ({"warps": 3}, "warps is 3; expected 2, 4 or 8"),
        ({"ilp": 8}, "ilp is 8; expected 1, 2 or 4"),
    ],
)
def test_violations_in_words(change, words):
    laws.says_its_violation(spec(), change, words)


def test_violations_of_architectures():
    laws.says_its_architectures(spec(blocks=1, pdl=Pdl.OFF))
    assert "blocks is 8 on sm_80; expected 1 before sm_90, which has no clusters" in spec(pdl=Pdl.OFF).violations(SM80)


@pytest.mark.parametrize("name", PROBLEMS)
def test_layout_of_the_text(name):
    laws.is_well_formed(spec(name))


def test_only_weights_are_loaded_before_the_wait():
    before = render(spec("qwen3.5"), SM90).partition('extern "C"')[2].partition("wait_for_upstream();")[0]
    loads = [line for line in before.splitlines() if "load(" in line]
    assert len(loads) == 2 and all("_norm + d" in line for line in loads)
    laws.waits_first(spec("falcon-h1"), Pdl.TRIGGER_TOP)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_batch_changes_only_the_query_heads_of_a_block(name):
    """Another division of the keys would give other bits."""
    problem = PROBLEMS[name]
    for arch in ARCHS:
        chosen = {registry.select(op.OPERATOR, problem, size, arch, arch.number >= 90) for size in (1, 8, 9, 64, 2**16)}
        assert len({replace(spec, heads=1) for spec in chosen}) == 1
        assert not any(spec.violations(arch) for spec in chosen)
        assert chosen <= set(space(problem, arch))
        assert len({s.order for _, s, _ in candidates(problem, 1, arch, True) if s is not None}) == 1 + (arch.number >= 90)


@pytest.mark.matrix
def test_no_variant_that_rules_choose_spills():
    pairs = [(registry.select(op.OPERATOR, p, n, a, a.number >= 90), a) for p in PROBLEMS.values() for n in (8, 64) for a in ARCHS]
    most = replace(PROBLEMS["qwen3.5"], group=8)
    assert not laws.spilled([*pairs, (registry.select(op.OPERATOR, most, 8, SM90, True), SM90)])


# Wrong kernels and wrong calls.

MISTAKES = {
    "no wait": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "keys that do not exist": ("if (key < count)", "if (key <= count)", "off"),
    "too few keys": ("from < count; from", "from + 8 < count; from", "off"),
    "another partner": ("d < kHalf ? -__uint", "d < kHalf ? __uint", "off"),
    "the first token's weight": ("sum[h] = first ? 1.f", "sum[h] = first ? 2.f", "off"),
    "no barrier": ("  cluster_arrive();\n  cluster_wait();\n  for", "  for", "nothing has written|barrier"),
    "peers that may not have begun": ("  cluster_wait();\n  for (u32 i", "  for (u32 i", "barrier|cluster"),
    "padding written": ("if (at < 0 || at >= i64(room))", "if (at < 0)", "outside|off"),
    "another row": ("u64(count) * key_cache_key", "u64(count + 1) * key_cache_key", "off|outside"),
    "warps that have not written": ("  __syncthreads();\n  // Factors", "  // Factors", "no barrier"),
}


@needs_emulator
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name):
    old, new, words = MISTAKES[name]
    trial = trial_of(spec(), 7, 0)
    want = {n: trial.named[n].double() for n in trial.written}
    trial.reference(trial.views | want)
    with laws.found(words):
        got = emulated(spec(), trial.named, op.Options(1e-5, False, 0.75, None), laws.edited(old, new))
        for n, t in got.items():
            assert torch.allclose(t.double(), want[n], rtol=0.02, atol=0.02, equal_nan=True), f"{n} is off"


def test_everything_wrong_is_in_one_message():
    q, k, cache = torch.zeros(2, 5, 12), torch.zeros(2, 2, 12), torch.zeros(2, 2, 4, 12)
    with pytest.raises(ArgumentError) as e:
        ssmgen.decode_attention(q, k, k.half(), cache, cache.clone(), torch.zeros(2, dtype=torch.int32), cos=torch.zeros(2, 3))
    words = str(e.value)
    for part in ("position is int32; expected int64", "one of cos and sin is None", "an even rotary_dim", "of head_dim 12",
                 "q has 5 heads and k has 2",                 "are float32 and float16; expected one dtype"):  # fmt: skip
        assert part in words, words


def test_caches_have_to_be_aligned():
    named = operands(spec(pdl=Pdl.OFF), 2, 0)
    pointers = {n: t.data_ptr() for n, t in named.items()}
    with pytest.raises(ArgumentError, match="value_cache does not begin at a multiple of 16 bytes"):
        op.problem_of(op.CALLER.checked(named, op.Options(), None), pointers | {"value_cache": pointers["value_cache"] + 2}, op.Options())
    named["key_cache"] = torch.zeros(2, 2, ROOM, 130, dtype=torch.bfloat16)[..., :128]
    with pytest.raises(ArgumentError, match="expected keys at multiples of 16 bytes"):
        ssmgen.decode_attention(**named)


@costly(1)
def test_loads_of_keys_are_in_flight_before_anything_waits():
    """All vectors of the first keys and values are loaded before the first shuffle."""
    before = laws.operations_before(spec("falcon-h1"), ("SHFL",))
    assert sum(o.startswith("LDG") and o.endswith("128") for o in before) == 4 and "PREEXIT" in before


def test_what_serves_a_call_is_explained():
    named = {n: t.to(TORCH_DTYPES[BF16]) if t.is_floating_point() else t for n, t in operands(spec(), 2, 0).items()}
    found = ssmgen.explain(ssmgen.decode_attention, **named, arch="sm_90a")
    assert found.chosen.rule == "clusters" and found.chosen.spec.blocks == 8
