"""Default variants of gdn_layer and kda_layer: a norm in a block with a whole head, in a cluster's blocks, and in a separate kernel (if
keys come first); every layout of a window; several tokens."""

from typing import Any

from ...engine.window import Saved, StateLayout
from ...select.models import find_model
from ...spec.kernel import DType, Index, Layout, Loads, changed
from ...variants.defaults import Default, layer

QWEN, KIMI, KIMI_K3 = "qwen3.5-397b-a17b", "kimi-linear-48b-a3b", "kimi-k3"
CHANNELS = (StateLayout.CHANNELS, 3)
EACH_SLOT = (StateLayout.RUNS, 6)  # windows of 4 tokens with a slot each
ANYWHERE: dict[str, Any] = {"conv_layout": StateLayout.ANY} | dict.fromkeys(("conv_loads", "conv_taps", "norm_loads"), Loads.ELEMENT)
BY_INDEX: dict[str, Any] = {"conv_windows": Saved.ANY, "conv_rows": Index.I64, "intermediate_indices": Index.I64}
K3_STATE = find_model(KIMI_K3).state

DEFAULTS = {
    "gdn, clusters, bf16 state": Default(layer(QWEN, DType.BF16, tp=4), 1),
    "gdn, clusters, f32 state, windows of channels": Default(layer(QWEN, DType.F32, window=CHANNELS, tp=4), 1),
    "gdn, whole heads, bf16 state": Default(layer(QWEN, DType.BF16), 64),
    "gdn, whole heads, f32 state, windows of channels": Default(layer(QWEN, DType.F32, window=CHANNELS), 64),
    "gdn, keys first": Default(layer(QWEN, DType.BF16, layout=Layout.KV), 64),
    "gdn, not aligned": Default(changed(layer(QWEN, DType.BF16), **ANYWHERE), 64),
    "kda, keys first": Default(layer(KIMI, DType.BF16, layout=Layout.KV), 64),
    "kda, clusters": Default(layer(KIMI, DType.F32, tp=4), 1),
    "kda, whole heads, bf16 state": Default(layer(KIMI, DType.BF16), 64),
    "kda, whole heads, f32 state": Default(layer(KIMI, DType.F32), 64),
    "kda, bounded gate, not aligned": Default(changed(layer(KIMI_K3, K3_STATE, tp=8), **ANYWHERE, operand_loads=Loads.ELEMENT), 64),
    "gdn, whole heads, bf16 state, rounded": Default(changed(layer(QWEN, DType.BF16), philox_rounds=10), 64),
    "kda, several tokens, a bf16 slot each, rounded": Default(
        changed(layer(KIMI, DType.BF16, window=EACH_SLOT, tokens=4), philox_rounds=10), 64
    ),
    "gdn, several tokens": Default(layer(QWEN, DType.BF16, tokens=4), 64),
    "gdn, several tokens, a slot each": Default(layer(QWEN, DType.BF16, window=EACH_SLOT, tokens=4), 64),
    "kda, verify": Default(layer(KIMI, DType.BF16, tokens=4, intermediates=True, update_state=False), 64),
    "kda, each token's state by index, not aligned": Default(
        changed(layer(KIMI_K3, DType.F32, tp=8, tokens=8, intermediates=True), **ANYWHERE, **BY_INDEX), 1
    ),
}
