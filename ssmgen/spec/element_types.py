"""Element types of tensors, with their names in specs and generated code."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Element types; the value is the name used in specs and in generated code."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def size(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.F32 else 2


class Narrow(Enum):
    """Element types of states with scales, one per row: a stored element times its row's scale is the number."""

    I16 = "i16"
    I8 = "i8"
    E4M3 = "e4m3"

    @property
    def size(self) -> int:
        """Bytes per element."""
        return 2 if self is Narrow.I16 else 1

    @property
    def largest(self) -> int:
        """The stored value of a row's largest element."""
        return {Narrow.I16: 32767, Narrow.I8: 127, Narrow.E4M3: 448}[self]


def stored_type(text: str) -> DType | Narrow:
    """The type of a state that has this name. Raises ValueError."""
    return DType(text) if text in DType._value2member_map_ else Narrow(text)
