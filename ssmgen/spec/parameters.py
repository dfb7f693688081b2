"""The arguments of a kernel: name, type, and encoding in the packed buffer."""

from __future__ import annotations

from typing import NamedTuple

MAP_BYTES = 128  # of a tensor map


class Param(NamedTuple):
    """One kernel argument: name, C type, and `struct` code. The rendered parameter list and the packed buffer come from it."""

    name: str
    ctype: str
    code: str

    @classmethod
    def pointer(cls, name: str, element: str, const: bool = True) -> Param:
        return cls(name, f"{'const ' if const else ''}{element}*", "Q")

    @classmethod
    def i64(cls, name: str) -> Param:
        return cls(name, "i64", "q")

    @classmethod
    def u32(cls, name: str) -> Param:
        return cls(name, "u32", "I")

    @classmethod
    def divisor(cls, name: str) -> list[Param]:
        """The parameters of a divisor (see arguments.divisor)."""
        return [cls.u32(name), cls.u32(f"{name}_magic"), cls.u32(f"{name}_shift")]

    @classmethod
    def f32(cls, name: str) -> Param:
        return cls(name, "float", "f")

    @classmethod
    def tiles(cls, name: str) -> Param:
        """A tensor map (see arguments.Tiles)."""
        return cls(name, "const __grid_constant__ TensorMap", f"{MAP_BYTES}s")
