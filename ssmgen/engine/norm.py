"""The gated norm after a recurrence: definitions for the separate operator and for layers that end with a norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..spec.kernel import BARE, DType, Loads, Part, must


class Activation(Enum):
    """The function applied to the gate before it multiplies."""

    SILU = "silu"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Part):
    """The norm in the problem of a layer's call; weight is None if the layer has no norm."""

    weight: DType | None = field(default=None, metadata=BARE)  # of norm_weight; None: no norm
    gate: DType = DType.BF16  # of z
    size: int = 0  # channels of a group
    grouped: bool = False  # rows have several groups
    first: bool = False  # z multiplies the normalised values
    activation: Activation = Activation.SILU
    loads: Loads = Loads.VECTOR

    def faults(self, channels: int) -> list[str]:
        """The error if its groups do not divide rows of this number of channels."""
        whole = self.weight is None or (self.size > 0 and channels % self.size == 0)
        return must(whole, f"norm_size is {self.size}; expected a divisor of the {channels} channels")


class LayerNormSpec:
    """Base of the spec of a layer's last kernel, which normalises the recurrence's output. It has the fields that `layer_views` reads."""

    __slots__ = ()

    size: int  # elements of a group

    @property
    def teams(self) -> int:
        """Groups of a block."""
        raise NotImplementedError

    def strides(self) -> list[tuple[str, str]]:
        """(role, axis) of every stride the kernel takes, in elements."""
        raise NotImplementedError
