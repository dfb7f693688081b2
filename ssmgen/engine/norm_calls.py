"""Names for the activation of a norm's gate, as calls give them."""

from __future__ import annotations

from ..calls.scalars import one_of
from .norm import Activation

ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "sigmoid": Activation.SIGMOID}
ACTIVATION = one_of("'silu', 'swish' or 'sigmoid'", *ACTIVATIONS)
