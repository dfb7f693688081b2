"""Measurement: what `ssmgen bench` runs. A number comes with its peers and its ceiling, taken in the same run, or not at all."""

from __future__ import annotations

import importlib
from types import ModuleType

LINEAR_ATTENTION = ("gated_delta_rule", "kda", "gla", "simple_gla", "lightning_attn", "delta_rule", "rwkv7", "gdn2", "comba")
LAYERS = ("mamba2_layer", "gdn_layer", "kda_layer")
TOLD = (*LINEAR_ATTENTION, *LAYERS)  # operators whose module times several, so that its `run` is told which

# operator -> the module that times it. A module has `run`, which makes a report; `table`, the report as text; and `point`, which says
# in words what a row of the report is about.
HOMES = {
    "selective_state_update": "..families.selective_state_update.bench",
    **dict.fromkeys(LINEAR_ATTENTION, "..families.linear_attention.bench"),
    "replay_selective_state_update": "..families.replay_selective_state_update.bench",
    "causal_conv1d": "..families.causal_conv1d.bench",
    "causal_conv1d_update": "..families.causal_conv1d_update.bench",
    "combine_splits": "..families.combine_splits.bench",
    "gated_rms_norm": "..families.gated_rms_norm.bench",
    **dict.fromkeys(LAYERS, ".layers"),
}


def home(op: str) -> ModuleType:
    return importlib.import_module(HOMES[op], __package__)
