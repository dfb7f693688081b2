"""Tuning cases of gdn_layer and kda_layer: models' layers."""

from functools import partial

from ...tune.layers import cases

TUNING = {operator: partial(cases, operator) for operator in ("gdn_layer", "kda_layer")}
