"""The gated norm behind a recurrence: what the operator by itself and the layers that end with it share."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    """Of the gate."""

    SILU = "silu"
    SIGMOID = "sigmoid"


class LayerNormSpec:
    """Base of the spec of a layer's last kernel, which norms what the recurrence's leaves: what `layer_views` must know of it."""

    __slots__ = ()

    size: int  # elements of a group

    @property
    def teams(self) -> int:
        """Groups of a block."""
        raise NotImplementedError

    def strides(self) -> list[tuple[str, str]]:
        """(role, axis) of every stride the kernel takes, in elements."""
        raise NotImplementedError
