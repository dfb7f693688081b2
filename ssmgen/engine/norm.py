"""The gated norm behind a recurrence: what the operator by itself and the layers that end with it share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..spec.kernel import BARE, DType, Loads, Part, must


class Activation(Enum):
    """What the gate goes through before it multiplies."""

    SILU = "silu"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Part):
    """What a layer's call fixes of its norm; nothing where it has none."""

    weight: DType | None = field(default=None, metadata=BARE)  # of norm_weight; none: no norm
    gate: DType = DType.BF16  # of z
    size: int = 0  # channels of a group
    grouped: bool = False  # rows have several groups
    first: bool = False  # z gates what is normed already
    activation: Activation = Activation.SILU
    loads: Loads = Loads.VECTOR

    def faults(self, channels: int) -> list[str]:
        """Why its groups do not make up rows of so many channels."""
        whole = self.weight is None or (self.size > 0 and channels % self.size == 0)
        return must(whole, f"groups of {self.size} channels do not make up {channels}")


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
