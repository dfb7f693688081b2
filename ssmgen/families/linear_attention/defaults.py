"""Default variants of linear attention: a model of each kind, and the forms of several tokens."""

from dataclasses import replace
from typing import Any

from ...engine.recurrences.attention.problem import Beta, Gate, Tokens
from ...select.models import find_model
from ...spec.kernel import DType, Index, Layout, PoolMode, Problem, Ring
from ...variants.defaults import Default

QWEN, KIMI = find_model("qwen3.5-397b-a17b"), find_model("kimi-linear-48b-a3b")
SLOTS = (Index.I32, PoolMode.SINGLE)

REPLAY: dict[str, Any] = {"ring": Ring.REPLAY}
BY_ROW: dict[str, Any] = {"parents": Index.I32, "kept_index": Index.I32}


def _kimi(index: Index, pool: PoolMode, call: dict[str, Any], **changes: Any) -> Problem:
    """A problem of Kimi-Linear's KDA with other fields than its layers'."""
    found: Any = KIMI.problem(DType.F32, index, pool, **call)
    changed: Problem = replace(found, **changes)
    return changed


DEFAULTS = {
    "gated delta rule, bf16 state": Default(QWEN.problem(DType.BF16, *SLOTS)),
    "gated delta rule, keys first, slots to read and to write": Default(
        QWEN.problem(DType.F32, Index.I64, PoolMode.SPLIT, layout=Layout.KV), 1
    ),
    "gated delta rule, keys first, many sequences": Default(QWEN.problem(DType.BF16, *SLOTS, layout=Layout.KV), 256),
    "several tokens, each one's state": Default(QWEN.problem(DType.BF16, *SLOTS, tokens=4, intermediates=True), 1),
    "a draft tree, its states in rows by number": Default(
        QWEN.problem(DType.BF16, *SLOTS, tokens=4, intermediates=True, update_state=False, **BY_ROW), 1
    ),
    "frozen": Default(QWEN.problem(DType.BF16, *SLOTS, tokens=4, update_state=False), 1),
    "frozen, with a ring": Default(QWEN.problem(DType.BF16, *SLOTS, tokens=4, update_state=False, ring=Ring.STORE), 1),
    "gated delta rule, bf16 state, rounded": Default(QWEN.problem(DType.BF16, *SLOTS, philox_rounds=10), 64),
    "gated delta rule, keys first, f16 state, rounded": Default(
        QWEN.problem(DType.F16, Index.I64, PoolMode.SPLIT, layout=Layout.KV, philox_rounds=10), 64
    ),
    "KDA, each token's bf16 state, rounded": Default(KIMI.problem(DType.BF16, *SLOTS, tokens=4, intermediates=True, philox_rounds=10), 64),
    "commit of several layers": Default(QWEN.problem(DType.BF16, *SLOTS, ring=Ring.COMMIT, layers=True), 1),
    "KDA": Default(KIMI.problem(DType.F32, *SLOTS), 1),
    "KDA, packed drafts, with a ready ring": Default(
        _kimi(*SLOTS, {"tokens": 4, "update_state": False, "ring": Ring.READY}, tokens=Tokens.RAGGED, cu_seqlens=Index.I32),
        1,
    ),
    "KDA, a commit of several layers to other slots": Default(
        _kimi(
            Index.I64,
            PoolMode.SPLIT,
            {"ring": Ring.COMMIT, "layers": True},
            gate=Gate.LOG,
            A_log=None,
            dt_bias=None,
            beta_form=Beta.PLAIN,
            gk=DType.F32,
            beta=DType.F32,
        ),
        1,
    ),
    "gated delta rule, a state read through a ring": Default(QWEN.problem(DType.F32, *SLOTS, flush=Index.I32, **REPLAY), 64),
    "KDA, a bf16 state read through a ring": Default(KIMI.problem(DType.BF16, *SLOTS, **REPLAY), 64),
    "Lightning attention": Default(find_model("minimax-text-01").problem(DType.F32, *SLOTS), 1),
    "RWKV-7": Default(find_model("rwkv7-1.5b").problem(DType.F32, *SLOTS), 1),
}
