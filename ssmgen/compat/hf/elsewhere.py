"""Layers whose weights the package accelerate keeps elsewhere."""

from __future__ import annotations

import torch


def is_elsewhere(layer: torch.nn.Module) -> bool:
    """Whether accelerate brings the layer's weights when it is called: a fused layer does not call it."""
    hook = layer.__dict__.get("_hf_hook")
    return hook is not None and getattr(hook, "offload", True)
