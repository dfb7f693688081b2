"""Kernel arguments as the driver takes them: an array of pointers into one packed buffer, laid out by the spec's parameters."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_char, c_void_p

from .spec import KernelSpec


def divisor(name: str, value: int) -> dict[str, int]:
    """The arguments of a kernel that divides numbers below 2^31 by one, 1 … 2^31, of them (templates/lib/divide.cuh.j2)."""
    shift = (value - 1).bit_length()
    return {name: value, f"{name}_magic": -(-(1 << 32 + shift) // value) - (1 << 32), f"{name}_shift": shift}


class Packed:
    """One launch's arguments. `address` is that of the pointer array; it lives as long as this object."""

    __slots__ = ("_buffer", "_slots", "address")

    def __init__(self, data: bytearray, offsets: Sequence[int]):
        self._buffer = (c_char * len(data)).from_buffer(data)
        self._slots = (c_void_p * len(offsets))()
        base = addressof(self._buffer)
        for i, offset in enumerate(offsets):
            self._slots[i] = base + offset
        self.address = addressof(self._slots)


class Arguments:
    """Everything but the pointers, packed once."""

    __slots__ = ("_data", "_offsets", "_pointers", "values")

    def __init__(self, spec: KernelSpec, values: Mapping[str, int | float]):
        """`values` holds every parameter that is not a pointer, by name."""
        params = spec.parameters()
        pointers = sum(p.code == "Q" for p in params)
        assert all(p.code == "Q" for p in params[:pointers]), "pointers come first"
        self.values = dict(values)
        self._pointers = struct.Struct(f"={pointers}Q")
        self._data = struct.pack("=" + "".join(p.code for p in params), *([0] * pointers), *(values[p.name] for p in params[pointers:]))
        self._offsets = [struct.calcsize("=" + "".join(p.code for p in params[:i])) for i in range(len(params))]

    def at(self, pointers: Sequence[int]) -> Packed:
        data = bytearray(self._data)
        self._pointers.pack_into(data, 0, *pointers)
        return Packed(data, self._offsets)
