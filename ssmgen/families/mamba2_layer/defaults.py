"""Default variants of mamba2_layer: every layout of a window, with and without a norm. States of several tokens: only the last one, one
after each token, or a slot for each."""

from typing import Any

from ...engine.window import Saved, StateLayout
from ...select import registry
from ...spec.kernel import SM90, DType, Index, Loads, Pdl, changed
from ...variants.defaults import Default, FixedSpec, layer

MODEL = "nemotron-h-8b"
RUNS, CHANNELS = (StateLayout.RUNS, 3), (StateLayout.CHANNELS, 3)
ANYWHERE: dict[str, Any] = {"conv_layout": StateLayout.ANY} | dict.fromkeys(("conv_loads", "conv_taps", "norm_loads"), Loads.ELEMENT)
BY_INDEX: dict[str, Any] = {"conv_windows": Saved.ANY, "conv_rows": Index.I64, "intermediate_indices": Index.I64}
VERIFY = layer(MODEL, DType.F32, tokens=8, intermediates=True, update_state=False)

ONE = registry.select("mamba2_layer", layer(MODEL, DType.BF16), 1, SM90, True)

DEFAULTS = {
    "windows as runs": Default(layer(MODEL, DType.BF16), 1),
    "with the input that has left the convolution": Default(layer(MODEL, DType.BF16, window=(StateLayout.RUNS, 4)), 1),
    "windows of channels": Default(layer(MODEL, DType.BF16, window=CHANNELS), 1),
    "f32 state": Default(layer(MODEL, DType.F32), 1),
    "no norm, no slots": Default(layer("falcon-h1-7b", DType.F32, Index.NONE, (StateLayout.RUNS, 4)), 1),
    "triggers before the wait": FixedSpec(changed(ONE, min_blocks=1, pdl=Pdl.TRIGGER_FIRST, norm_pdl=Pdl.TRIGGER_FIRST), since=SM90),
    "several tokens": Default(layer(MODEL, DType.BF16, tokens=4), 1),
    "several tokens, a slot each": Default(layer(MODEL, DType.BF16, window=(StateLayout.RUNS, 6), tokens=4), 1),
    "verify": Default(VERIFY, 1),
    "verify, by index, not aligned": Default(changed(VERIFY, **ANYWHERE, **BY_INDEX), 1),
    "several tokens, no norm, no slots": Default(layer("falcon-h1-7b", DType.F32, Index.NONE, CHANNELS, tokens=3), 64),
}
