"""causal_conv1d_update in plain PyTorch: layers also begin with this step."""

from ...engine.short_conv_reference import step as causal_conv1d_update

__all__ = ["causal_conv1d_update"]
