"""Tuning cases of mamba2_layer: models' layers."""

from functools import partial

from ...tune.layers import cases

TUNING = {"mamba2_layer": partial(cases, "mamba2_layer")}
