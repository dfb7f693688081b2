"""Kernel arguments as the driver takes them: an array of pointers into one packed buffer, laid out by the spec's parameters."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_char, c_void_p
from typing import NamedTuple

from .kernel import MAP_BYTES, KernelSpec


class Tiles(NamedTuple):
    """A tensor map for an operand of 16-bit numbers: five axes, the fastest first, and the size of the copied box on each axis.

    operand: its pointer goes into the map          strides: in bytes, of all axes except the first, which is contiguous
    """

    operand: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def described(self, address: int) -> bytes:
        """The map in the form that the emulator reads."""
        return struct.pack("=5Q11I", address, *self.strides, *self.sizes, *self.box, 2).ljust(MAP_BYTES, b"\0")


Value = int | float | Tiles  # of a kernel argument that is not a pointer


def divisor(name: str, value: int) -> dict[str, int]:
    """The arguments of a kernel that divides numbers below 2^31 by `value`, 1 … 2^31 (templates/lib/divide.cuh.j2)."""
    shift = (value - 1).bit_length()
    return {name: value, f"{name}_magic": -(-(1 << 32 + shift) // value) - (1 << 32), f"{name}_shift": shift}


class Packed:
    """One launch's arguments. `address` is the address of the pointer array; it lives as long as this object."""

    __slots__ = ("_buffer", "_slots", "address")

    def __init__(self, data: bytearray, offsets: Sequence[int]):
        self._buffer = (c_char * len(data)).from_buffer(data)
        self._slots = (c_void_p * len(offsets))()
        base = addressof(self._buffer)
        for i, offset in enumerate(offsets):
            self._slots[i] = base + offset
        self.address = addressof(self._slots)


class Arguments:
    """All arguments except pointers, packed once."""

    __slots__ = ("_data", "_encode", "_maps", "_offsets", "_pointers", "values")

    def __init__(self, spec: KernelSpec, values: Mapping[str, Value], encode: Callable[[Tiles, int], bytes] = Tiles.described):
        """values: every parameter that is not a pointer, by name, and perhaps others; `encode` makes the tensor map for an address."""
        params = spec.parameters()
        pointers = sum(p.code == "Q" for p in params)
        assert all(p.code == "Q" for p in params[:pointers]), "pointers come first"
        self.values = {p.name: values[p.name] for p in params[pointers:]}
        self._encode = encode
        self._pointers = struct.Struct(f"={pointers}Q")
        known = [b"" if isinstance(v, Tiles) else v for v in self.values.values()]
        self._data = struct.pack("=" + "".join(p.code for p in params), *([0] * pointers), *known)
        self._offsets = [struct.calcsize("=" + "".join(p.code for p in params[:i])) for i in range(len(params))]
        offsets = dict(zip((p.name for p in params), self._offsets, strict=True))
        self._maps = [(offsets[n], [*offsets].index(v.operand), v) for n, v in self.values.items() if isinstance(v, Tiles)]

    def at(self, pointers: Sequence[int]) -> Packed:
        data = bytearray(self._data)
        self._pointers.pack_into(data, 0, *pointers)
        for at, operand, tiles in self._maps:
            data[at : at + MAP_BYTES] = self._encode(tiles, pointers[operand])
        return Packed(data, self._offsets)
