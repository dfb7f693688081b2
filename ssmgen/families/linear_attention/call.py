"""Decode steps of linear attention with a recurrent state: gated delta rules, KDA, GLA, RWKV-7 and others, on torch tensors.

They take the state as a pool and share the keywords of `PoolOptions`. Notation: a call has `batch` sequences; HK key heads (of q, k) and
HV heads of v and the state, a multiple of HK; K key channels and V value channels per head. An operand written `[…, HV]` is
`[batch, HV]` for one token per sequence, `[batch, T, HV]` for T, or `[tokens, HV]` (also `[1, tokens, HV]`) for sequences of different
lengths, packed, with cu_seqlens. Floating tensors may be f32, f16 or bf16, each with its own dtype, and strided views; arithmetic is f32.

Per token: S <- the recurrence of the function, in which S is [HV, V, K]; out = scale S q, from the new state before it is rounded. Within
a call the state stays in f32; it is rounded when it is stored.

Every function returns out (new, of v's shape and dtype, if not given). CPU tensors run the reference implementation. All raise
ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a kernel would have to be
built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
"""

from __future__ import annotations

from .bonus import rwkv6
from .delta import comba, delta_rule, gated_delta_rule, gated_delta_rule_commit, gdn2, kda, kda_commit
from .low_rank import dplr_delta_rule, rwkv7
from .options import PoolOptions
from .plain import gla, lightning_attn, simple_gla
from .views import RawInputs as Ring

__all__ = [
    "PoolOptions", "Ring", "comba", "delta_rule", "dplr_delta_rule", "gated_delta_rule", "gated_delta_rule_commit", "gdn2", "gla", "kda",
    "kda_commit", "lightning_attn", "rwkv6", "rwkv7", "simple_gla",
]  # fmt: skip
