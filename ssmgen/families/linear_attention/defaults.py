"""Default variants of linear attention: a model of each kind, and the forms of several tokens."""

from typing import Any

from ...select.models import find_model
from ...spec.kernel import DType, Index, Layout, PoolMode, Ring
from ...variants.defaults import Default

QWEN = find_model("qwen3.5-397b-a17b")
SLOTS = (Index.I32, PoolMode.SINGLE)

BY_ROW: dict[str, Any] = {"parents": Index.I32, "kept_index": Index.I32}

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
    "KDA, each token's bf16 state, rounded": Default(
        find_model("kimi-linear-48b-a3b").problem(DType.BF16, *SLOTS, tokens=4, intermediates=True, philox_rounds=10), 64
    ),
    "commit of several layers": Default(QWEN.problem(DType.BF16, *SLOTS, ring=Ring.COMMIT, layers=True), 1),
    "KDA": Default(find_model("kimi-linear-48b-a3b").problem(DType.F32, *SLOTS), 1),
    "Lightning attention": Default(find_model("minimax-text-01").problem(DType.F32, *SLOTS), 1),
    "RWKV-7": Default(find_model("rwkv7-1.5b").problem(DType.F32, *SLOTS), 1),
}
