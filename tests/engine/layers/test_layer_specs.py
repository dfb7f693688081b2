"""Specs of mamba2_layer, gdn_layer and kda_layer: what is legal, in words, and the variants that rules choose."""

from __future__ import annotations

from dataclasses import replace

import kernel_laws as laws
import pytest
from test_layer_kernels import spec_of

from ssmgen.engine.norm import LayerNorm
from ssmgen.engine.recurrences.attention.problem import Beta, Delta, Gate, Layout, Tokens, Update
from ssmgen.engine.short_conv import ShortConv
from ssmgen.families.delta_layer import spec as delta
from ssmgen.families.delta_layer.problem import DeltaLayerProblem
from ssmgen.families.mamba2_layer import spec as mamba
from ssmgen.families.mamba2_layer.spec import Mamba2LayerProblem
from ssmgen.select import registry
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import Arch, DType, Index, Pdl, PoolMode, changed

WRONG = [
    ("mamba: two", {"norm_threads": 48}, "threads is 48; expected 32"),
    ("mamba: two", {"norm_size": 24}, "norm_size is 24; expected a divisor of the"),
    ("mamba: two", {"conv_width": 1}, "conv_width is 1; expected 2"),
    ("mamba: two", {"conv_len": 5}, "conv_state holds 5 inputs per channel"),
    ("mamba: two", {"headdim": 18}, "a group has 64 channels and a head 18; expected multiples of"),
    ("mamba: bare", {"lanes": 32, "vec": 4, "ilp": 1, "d_state": 128, "tile": 1}, "tile is 1; expected a multiple of the 4 channels"),
    ("mamba: two", {"x": DType.F16}, "; expected one dtype: they are one tensor"),
    ("mamba: two", {"z": DType.F16}, "z is set with a norm, which has its own gate; expected one of them"),
    ("mamba: two", {"tied": False}, "tied is no; expected yes: a layer has one A, dt and dt_bias per head"),
    ("mamba: two", {"pool": PoolMode.SPLIT}, "; expected pool=single, or update=each with a slot per token"),
    ("mamba tokens: final", {"conv_tokens": 9}, "conv_tokens is 9; expected 0 … 8"),
    ("mamba tokens: final", {"conv_len": 5}, "conv_state holds 5 inputs per channel; expected 3 or 4 for width 4"),
    ("mamba tokens: accepted", {"conv_len": 4}, "conv_state holds 4 inputs per channel; expected 5 or more with num_accepted_tokens"),
    ("mamba tokens: accepted", {"conv_len": 6}, "conv_state holds runs of 6 inputs; expected 5, since a kernel rewrites the whole run"),
    ("mamba tokens: accepted", {"update": Update.FINAL}, "expected accepted if and only if update is each"),
    ("mamba tokens: final", {"update": Update.EACH, "pool": PoolMode.SPLIT}, "expected accepted if and only if update is each"),
    ("mamba tokens: final", {"conv_rows": Index.I32}, " and conv_windows is no; expected saved windows"),
    ("mamba tokens: rows", {"conv_rows": Index.I64}, " and intermediate_indices is "),
    ("mamba tokens: final", {"cu_seqlens": Index.I32}, "cu_seqlens or parents is set; expected none"),
    ("mamba tokens: tiles", {"tile": 8}, ", the rows in flight: several tokens keep all rows of a tile in registers"),
    ("mamba tokens: final", {"x": DType.F16}, "; expected one dtype: they are one tensor"),
    ("mamba tokens: final", {"tied": False}, "A, dt or dt_bias differs within a head; expected one value per head for several tokens"),
    ("mamba tokens: final", {"norm_size": 24}, "norm_size is 24; expected a divisor of the"),
    ("mamba tokens: accepted", {"prefetch": 132}, "; expected 0: the column that a call starts from is in memory"),
    ("gdn: one", {"tile": 8, "ilp": 1}, "tile is 8 with norm_inside=yes; expected dim_v 16, a whole head, or clustered=yes"),
    ("gdn: bare", {"norm_inside": True}, "norm_inside is yes and norm is none; expected a norm"),
    ("gdn: one", {"norm_inside": True, "clustered": True}, "a head has 1 blocks; expected 2 …"),
    ("gdn: two", {"clustered": True}, "clustered is yes and norm_inside is no; expected both or neither"),
    (
        "gdn: one",
        {"dim_v": 264, "norm_size": 264, "tile": 272},
        "rows; expected at most 128, or at most 256 in steps of 8",
    ),
    (
        "gdn: one",
        {"dim_v": 132, "norm_size": 132, "tile": 144},
        "rows; expected at most 128, or at most 256 in steps of 8",
    ),
    ("gdn: two", {"norm_threads": 48}, "threads is 48; expected 32"),
    ("gdn: two", {"norm_size": 32}, "norm_size is 32; expected dim_v"),
    ("gdn: two", {"conv_width": 1}, "conv_width is 1; expected 2"),
    ("gdn: two", {"conv_len": 5}, "conv_state holds 5 inputs per channel"),
    ("gdn: two", {"dim_v": 18}, "a group has 64 channels and a head 18; expected multiples of"),
    ("gdn: two", {"lanes": 16, "vec": 2, "ilp": 1, "tile": 2}, "vec is 2; expected 4 or more, the chain of the canonical sum"),
    ("gdn: bare", {"lanes": 32, "vec": 4, "ilp": 1, "dim_k": 128, "tile": 1}, "tile is 1; expected a multiple of the 4 channels"),
    ("gdn: two", {"q": DType.F16}, "; expected one dtype: they are one tensor"),
    ("gdn: two", {"beta": None, "beta_form": Beta.PLAIN}, "the delta rule is not a layer's"),
    ("gdn: two", {"delta": Delta.OLD}, "the delta rule is not a layer's"),
    ("gdn: two", {"gate": Gate.LOG, "A_log": None, "dt_bias": None}, "a layer's gate is raw"),
    ("gdn: two", {"gk": DType.BF16}, "the decay is not a layer's"),
    ("gdn: two", {"beta_form": Beta.PLAIN}, "a layer's beta is a logit"),
    ("gdn: two", {"tokens": Tokens.MANY}, "conv_tokens is 0 in a call of"),
    ("gdn: two", {"pool": PoolMode.SPLIT}, "; expected pool=single, or update=each with a slot per token"),
    ("kda: two", {"gk": None}, "the decay is not a layer's; expected g with A_log and gate=softplus, or gk"),
    ("kda: two", {"g": DType.BF16}, "the decay is not a layer's"),
    ("kda: two", {"gate": Gate.LOG, "A_log": None, "dt_bias": None}, "a layer's gate is raw"),
    ("kda: two", {"A_log": None}, "gate is softplus and A_log is none; expected A_log"),
    ("kda: two", {"beta_rows": True}, "the delta rule is not a layer's"),
    ("gdn tokens: final", {"chunk": 8}, "; expected conv_tokens 3, all staged at once"),
    ("gdn tokens: final", {"conv_tokens": 9, "chunk": 9}, "conv_tokens is 9; expected 0 … 8"),
    ("gdn tokens: final", {"tokens": Tokens.RAGGED, "cu_seqlens": Index.I32}, "tokens is ragged; expected one or many"),
    ("gdn tokens: final", {"update": Update.EACH, "pool": PoolMode.SPLIT}, "; expected accepted if and only if update is each"),
    ("gdn tokens: final", {"intermediate_indices": Index.I32}, " and intermediates is no; expected both or neither"),
    ("gdn tokens: rows", {"conv_rows": Index.NONE}, " and intermediate_indices is "),
    ("gdn tokens: kept", {"ilp": 1}, ", the rows in flight: several tokens keep all rows of a tile in registers"),
    (
        "gdn tokens: final",
        {"dim_k": 1024, "lanes": 32, "ilp": 4, "tile": 4, "conv_tokens": 8, "chunk": 8},
        "bytes of shared memory; expected at most 49152",
    ),
    ("gdn tokens: final", {"tokens": Tokens.ONE}, "conv_tokens is 3 in a call of"),
    ("kda tokens: plain", {"g": DType.BF16}, "the decay is not a layer's; expected g with A_log and gate=softplus, or gk"),
    (
        "gdn tokens: final",
        {"norm_inside": True},
        "norm_inside is yes with several tokens; expected no: a second kernel computes their norm",
    ),
    ("gdn tokens: accepted", {"prefetch": 132}, "; expected 0: the column that a call starts from is in memory"),
    ("gdn tokens: accepted", {"conv_len": 3}, "or more with num_accepted_tokens"),
    ("mamba: ahead", {"prefetch": 0}, "windows_ahead is yes; expected prefetch, one token and conv_layout=runs with it"),
]


@pytest.mark.parametrize(("which", "change", "words"), WRONG, ids=[f"{which}, {words[:40]}" for which, _, words in WRONG])
def test_violations_in_words(which, change, words):
    laws.says_its_violation(spec_of(which), change, words, changed)


NEMOTRON = Mamba2LayerProblem(
    d_state=128, headdim=64, nheads=128, ngroups=8, D=DType.F32, dt_bias=DType.F32, index=Index.I32,
    norm=LayerNorm(weight=DType.BF16, size=1024, grouped=True),
)  # fmt: skip
TOKENS = replace(NEMOTRON, several=True, conv=ShortConv(tokens=4))


@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("problem", [NEMOTRON, TOKENS], ids=["one-token", "tokens"])
def test_rules_of_mamba2_choose_legal_variants(problem, arch, state):
    arch = Arch.parse(arch)
    for batch in (1, 3, 8, 64, 300, 3000):
        for d_state in (64, 128, 256):
            asked = replace(problem, state=state, d_state=d_state)
            spec = registry.select(mamba.OPERATOR, asked, batch, arch, arch.number >= 90)
            assert not spec.violations(arch) and len(spec.kernels) == 2 and spec.pdl is not Pdl.TRIGGER_FIRST
            early = Pdl.TRIGGER_FIRST if batch <= mamba.EARLY else Pdl.TRIGGER_LOADED
            assert spec.kernels[1].pdl is (Pdl.OFF if arch.number < 90 else early)


QWEN = DeltaLayerProblem(
    dim_k=128, dim_v=128, nheads=32, key_heads=16, g=DType.BF16, beta=DType.BF16, A_log=DType.F32, dt_bias=DType.F32, gate=Gate.SOFTPLUS,
    beta_form=Beta.SIGMOID, l2norm=True, index=Index.I32,
    norm=LayerNorm(weight=DType.BF16, size=128, grouped=True, first=True),
)  # fmt: skip
KIMI = find_model("kimi-linear-48b-a3b")


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("model", ["qwen", "kimi"])
def test_rules_of_delta_layers_choose_legal_variants(model, arch, state, layout):
    """Heads that keep the card busy are whole, and norm themselves."""
    arch = Arch.parse(arch)
    problem = replace(QWEN, state=state, layout=layout) if model == "qwen" else KIMI.layers((state,), layout=layout)[0]
    for batch in (1, 2, 3, 8, 9, 64, 300, 3000):
        spec = registry.select(delta.OPERATOR, problem, batch, arch, arch.number >= 90)
        heads = batch * problem.nheads
        most = delta.CLUSTERS[problem.interleaved, state.size][-1][0]
        assert not spec.violations(arch) and spec.clustered == (heads <= most and arch.number >= 90)
        assert spec.norm_inside == (spec.clustered or (layout is Layout.VK and heads >= delta.FEW_HEADS))
        assert spec.cluster_blocks == (spec.tiles if spec.clustered else 1)
        early = Pdl.TRIGGER_FIRST if batch <= delta.EARLY else Pdl.TRIGGER_LOADED
        assert spec.norm_inside or spec.kernels[1].pdl is (Pdl.OFF if spec.pdl is Pdl.OFF else early)
