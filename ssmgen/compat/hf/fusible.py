"""Whether `patch(fuse=True)` replaces whole decode layers of a model."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...calls.checks import DTYPES
from . import copies, found, roles
from .elsewhere import is_elsewhere
from .targets import MIXER


def fusible(model: torch.nn.Module) -> bool:
    """Whether `patch(model, fuse=True)` computes decode steps of a layer of it in one call, here and with this transformers.

    False for a model without such layers, for layers whose forward this transformers has changed, and for layers that stay several calls:
    with an activation other than SiLU, with a dtype that ssmgen does not have, or with weights that accelerate brings from elsewhere.
    """
    found.version()
    return any(_is_fused(layer) for layer in model.modules())


def _is_fused(mixer: Any) -> bool:
    module = sys.modules[type(mixer).__module__]
    if not found.is_modeling(module.__name__):
        return False
    layer = copies.mixers(module).get(type(mixer).__name__)
    if layer is None or layer.step is None or roles.objection(type(mixer), *MIXER):
        return False
    return mixer.activation in ("silu", "swish") and mixer.conv1d.weight.dtype in DTYPES and not is_elsewhere(mixer.conv1d)
