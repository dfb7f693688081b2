"""gated_rms_norm in plain PyTorch: the norm that layers end with, too."""

from ...engine.norm_reference import gated_norm as gated_rms_norm

__all__ = ["gated_rms_norm"]
