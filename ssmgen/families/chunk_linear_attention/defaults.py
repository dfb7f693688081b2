"""Default variants of chunk_linear_attention: prompts of models, and the other rules and branches."""

from __future__ import annotations

from typing import Any

from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec.kernel import DType, Index, Layout, Loads
from ...variants.defaults import Default
from .problem import LinearPromptProblem, Rule

KDA: dict[str, Any] = {"head_k": 128, "head_v": 128, "gk": DType.F32, "beta": DType.BF16, "l2norm": True}
RAW: dict[str, Any] = {"gk": DType.BF16, "A_log": DType.F32, "dt_bias": DType.F32, "beta_form": Beta.SIGMOID}
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I32}
GDN2: dict[str, Any] = {"head_k": 96, "head_v": 192, "x": DType.F16, "gk": DType.F32, "erase": DType.F16, "l2norm": True}
ODD: dict[str, Any] = {"copy": 4, "loads": Loads.ELEMENT, "state_loads": Loads.ELEMENT}
COMBA: dict[str, Any] = {"rule": Rule.OLD, "head_k": 128, "head_v": 128, "g": DType.F32, "read": True, "beta": DType.F32, "l2norm": True}
LOW_RANK: dict[str, Any] = {"rule": Rule.LOW_RANK, "head_k": 64, "head_v": 64, "read": True}

DEFAULTS = {
    "KDA, a batch from zeros, as transformers has states": Default(LinearPromptProblem(**KDA, final=True, layout=Layout.KV), 32),
    "KDA of Kimi-Linear, packed, with a pool": Default(LinearPromptProblem(**KDA | RAW, gate=Gate.SOFTPLUS, **POOL), 32),
    "KDA with a bounded gate, packed, states in and out, and for a cache of prefixes": Default(
        LinearPromptProblem(**KDA | RAW, gate=Gate.BOUNDED, cu_seqlens=Index.I32, initial=True, final=True, checkpoints=Index.I32),
        96,
    ),
    "KDA of few heads, packed, in segments": Default(
        LinearPromptProblem(**KDA, cu_seqlens=Index.I32, initial=True, final=True, segments=4, segment_chunks=16), 16
    ),
    "GLA, a batch from zeros": Default(LinearPromptProblem(rule=Rule.PLAIN, head_k=128, head_v=128, gk=DType.F32, final=True), 32),
    "GDN-2, f16, 4 bytes at once": Default(LinearPromptProblem(**GDN2, **ODD, initial=True, final=True), 16),
    "Comba": Default(LinearPromptProblem(**COMBA, final=True), 16),
    "RWKV-7, packed, with a pool": Default(LinearPromptProblem(**LOW_RANK, gk=DType.BF16, alpha=DType.BF16, **POOL), 32),
    "diagonal plus low rank": Default(LinearPromptProblem(**LOW_RANK, write=True, final=True), 32),
}
