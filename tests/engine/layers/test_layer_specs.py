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
    ("mamba: two", {"norm_threads": 48}, "threads 48 is not 32"),
    ("mamba: two", {"norm_size": 24}, "groups of 24 channels do not make up 64"),
    ("mamba: two", {"conv_width": 1}, "conv_width 1 is not 2"),
    ("mamba: two", {"conv_len": 5}, "conv_state holds 5 inputs per channel"),
    ("mamba: two", {"headdim": 18}, "64 channels of a group and 18 of a head are not multiples of 4"),
    ("mamba: bare", {"lanes": 32, "vec": 4, "ilp": 1, "d_state": 128, "tile": 1}, "tile 1 is not a multiple of the 4 channels"),
    ("mamba: two", {"x": DType.F16}, "x, B and C are of one dtype"),
    ("mamba: two", {"z": DType.F16}, "z gates by itself or in the norm"),
    ("mamba: two", {"tied": False}, "a layer's A, dt and dt_bias are one value per head"),
    ("mamba: two", {"pool": PoolMode.SPLIT}, "the window and the state of a layer are updated in place"),
    ("mamba tokens: final", {"conv_tokens": 9}, "9 tokens are not 1 … 8"),
    ("mamba tokens: final", {"conv_len": 5}, "conv_state holds 5 inputs per channel; of a convolution of width 4 it is 3 or 4"),
    ("mamba tokens: accepted", {"conv_len": 4}, "conv_state holds 4 inputs per channel; with accepted tokens at least 5"),
    ("mamba tokens: accepted", {"conv_len": 6}, "runs of 6 inputs are not 5: all of a run is rewritten"),
    ("mamba tokens: accepted", {"update": Update.FINAL}, "if and only if states go to slots of their own"),
    ("mamba tokens: final", {"update": Update.EACH, "pool": PoolMode.SPLIT}, "if and only if states go to slots of their own"),
    ("mamba tokens: final", {"conv_rows": Index.I32}, "rows of windows that are not kept"),
    ("mamba tokens: rows", {"conv_rows": Index.I64}, "windows and states are kept in rows of the same numbers"),
    ("mamba tokens: final", {"cu_seqlens": Index.I32}, "a layer takes no packed sequences and no draft trees"),
    ("mamba tokens: tiles", {"tile": 8}, "several tokens need all rows of a tile in flight at once"),
    ("mamba tokens: final", {"x": DType.F16}, "x, B and C are of one dtype"),
    ("mamba tokens: final", {"tied": False}, "several tokens need A, dt and dt_bias tied"),
    ("mamba tokens: final", {"norm_size": 24}, "groups of 24 channels do not make up 64"),
    ("mamba tokens: accepted", {"prefetch": 132}, "the bulk L2 prefetch does not know the column"),
    ("gdn: one", {"tile": 8, "ilp": 1}, "a block of 8 rows does not hold a head of 16, to norm it"),
    ("gdn: bare", {"norm_inside": True}, "norm_inside is of a norm, and there is none"),
    ("gdn: one", {"norm_inside": True, "clustered": True}, "a head of 1 blocks is no cluster of 2 … 8"),
    ("gdn: two", {"clustered": True}, "clusters are for a norm that is this kernel's"),
    (
        "gdn: one",
        {"dim_v": 264, "norm_size": 264, "tile": 272},
        "up to 128 rows, or up to 256 in steps of 8, not 264",
    ),
    (
        "gdn: one",
        {"dim_v": 132, "norm_size": 132, "tile": 144},
        "up to 128 rows, or up to 256 in steps of 8, not 132",
    ),
    ("gdn: two", {"norm_threads": 48}, "threads 48 is not 32"),
    ("gdn: two", {"norm_size": 32}, "groups of 32 are not heads of 16"),
    ("gdn: two", {"conv_width": 1}, "conv_width 1 is not 2"),
    ("gdn: two", {"conv_len": 5}, "conv_state holds 5 inputs per channel"),
    ("gdn: two", {"dim_v": 18}, "64 channels of a group and 18 of a head are not multiples of 4"),
    ("gdn: two", {"lanes": 16, "vec": 2, "ilp": 1, "tile": 2}, "vec 2 is below 4"),
    ("gdn: bare", {"lanes": 32, "vec": 4, "ilp": 1, "dim_k": 128, "tile": 1}, "tile 1 is not a multiple of the 4 channels"),
    ("gdn: two", {"q": DType.F16}, "q, k and v are of one dtype"),
    ("gdn: two", {"beta": None, "beta_form": Beta.PLAIN}, "a layer's delta rule reads the decayed state with k, and has a beta per head"),
    ("gdn: two", {"delta": Delta.OLD}, "a layer's delta rule reads the decayed state"),
    ("gdn: two", {"gate": Gate.LOG, "A_log": None, "dt_bias": None}, "a layer's gate is raw"),
    ("gdn: two", {"gk": DType.BF16}, "the decay is per head, with g and A_log, and a softplus"),
    ("gdn: two", {"beta_form": Beta.PLAIN}, "a layer's beta is a logit"),
    ("gdn: two", {"tokens": Tokens.MANY}, "0 tokens per sequence, of a call of several"),
    ("gdn: two", {"pool": PoolMode.SPLIT}, "the window and the state of a layer are updated in place"),
    ("kda: two", {"gk": None}, "a gate needs g or gk"),
    ("kda: two", {"g": DType.BF16}, "or per key channel, with gk"),
    ("kda: two", {"gate": Gate.LOG, "A_log": None, "dt_bias": None}, "a layer's gate is raw"),
    ("kda: two", {"A_log": None}, "the softplus gate needs A_log"),
    ("kda: two", {"beta_rows": True}, "a layer's delta rule reads the decayed state with k, and has a beta per head"),
    ("gdn tokens: final", {"chunk": 8}, "all 3 tokens are staged at once, not 8"),
    ("gdn tokens: final", {"conv_tokens": 9, "chunk": 9}, "9 tokens are not 1 … 8"),
    ("gdn tokens: final", {"tokens": Tokens.RAGGED, "cu_seqlens": Index.I32}, "takes as many of every sequence, and no packed ones"),
    ("gdn tokens: final", {"update": Update.EACH, "pool": PoolMode.SPLIT}, "accepted tokens pick where a layer starts from if and only if"),
    ("gdn tokens: final", {"intermediate_indices": Index.I32}, "rows of states that are not kept"),
    ("gdn tokens: rows", {"conv_rows": Index.NONE}, "windows and states are kept in rows of the same numbers"),
    ("gdn tokens: kept", {"ilp": 1}, "several tokens need all rows of a tile in flight at once"),
    (
        "gdn tokens: final",
        {"dim_k": 1024, "lanes": 32, "ilp": 4, "tile": 4, "conv_tokens": 8, "chunk": 8},
        "bytes of shared memory exceed 48 KiB",
    ),
    ("gdn tokens: final", {"tokens": Tokens.ONE}, "3 tokens per sequence, of a call of one"),
    ("kda tokens: plain", {"g": DType.BF16}, "or per key channel"),
    ("gdn tokens: final", {"norm_inside": True}, "several tokens are normed by a kernel behind"),
    ("gdn tokens: accepted", {"prefetch": 132}, "the bulk L2 prefetch does not know the column"),
    ("gdn tokens: accepted", {"conv_len": 3}, "with accepted tokens at least 5"),
    ("mamba: ahead", {"prefetch": 0}, "windows are asked for ahead as runs, of one token, beside tiles"),
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
            assert not spec.violations(arch) and len(spec.kernels) == 2


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
        assert spec.norm_inside or spec.kernels[1].pdl is (Pdl.OFF if spec.pdl is Pdl.OFF else Pdl.TRIGGER_LOADED)
