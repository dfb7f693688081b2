"""Runs generated kernels on the CPU, and checks what they do to memory and to each other.

The rendered text is compiled with g++ as it is, behind `emulator.hpp`. Needs g++ 8 or later; slow, and meant for tests and authors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..arguments import Packed
from ..errors import SsmgenError
from ..render import render, uses_pdl
from ..spec import Arch, KernelSpec

HEADER = Path(__file__).parent / "emulator.hpp"
# No contraction, as under NVRTC with --fmad=false: the same arithmetic gives the same bits. Most of the time goes into g++, least at -O0.
FLAGS = ("-fno-thread-jumps", "-std=c++17", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-Wno-unknown-pragmas")


class EmulatorMissingError(SsmgenError):
    """There is no C++ compiler."""

    def __init__(self) -> None:
        super().__init__("the emulator needs g++, which was not found. Install a C++17 compiler, for example: apt-get install g++")


class EmulatorError(SsmgenError):
    """The text does not compile as C++, or the kernel did what it must not do."""


def available() -> bool:
    return shutil.which("g++") is not None


class _Operand(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_ulonglong),
        ("element", ctypes.c_uint),
        ("writable", ctypes.c_uint),
        ("early", ctypes.c_uint),
    )


@functools.cache
def _workplace() -> tempfile.TemporaryDirectory:
    """Private to this process, gone with it: what is loaded from there is code."""
    return tempfile.TemporaryDirectory(prefix="ssmgen-emulator-")


@functools.cache
def _header() -> Path:
    """The header, compiled ahead once per process: half of a kernel's time in g++ was reading the standard library.

    Where g++ cannot do that, the text beside it is read each time, with the same result.
    """
    copy = Path(_workplace().name) / HEADER.name
    copy.write_text(HEADER.read_text())
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", str(copy), "-o", f"{copy}.gch"], capture_output=True, check=False)
    return copy


@functools.lru_cache(maxsize=256)
def compile_source(source: str, symbol: str) -> ctypes.CDLL:
    """The kernel as a loaded library. Raises EmulatorMissingError; EmulatorError with g++'s words."""
    if not available():
        raise EmulatorMissingError
    stem = Path(_workplace().name) / hashlib.sha256(f"{symbol}\n{source}".encode()).hexdigest()[:24]
    kernel, unit, library = stem.with_suffix(".cu"), stem.with_suffix(".cpp"), stem.with_suffix(".so")
    kernel.write_text(source)
    unit.write_text(
        f'#include "{_header()}"\n#include "{kernel}"\n'
        'extern "C" int emulate(unsigned grid, unsigned block, unsigned cluster, unsigned shared, int pdl, void** arguments,\n'
        "                       const emulator::Operand* operands, unsigned count, char* message, unsigned room) {\n"
        f"  return emulator::launch({symbol}, grid, block, cluster, shared, pdl, arguments, operands, count, message, room);\n}}\n"
    )
    done = subprocess.run(["g++", *FLAGS, "-shared", str(unit), "-o", str(library)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{symbol} does not compile for the emulator:\n{done.stderr[:4000]}")
    return ctypes.CDLL(str(library))


def describe(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def run_source(
    source: str,
    symbol: str,
    grid: int,
    block: int,
    packed: Packed,
    operands: Mapping[str, Tensor],
    writable: tuple[str, ...],
    shared_bytes: int = 0,
    early: Sequence[str] = (),
    cluster: int = 1,
) -> None:
    """Runs one launch of a kernel's text.

    operands: {name: CPU tensor}: the only memory that the kernel may touch, from each one's first to its last element; those named
    in `writable` may be written, those in `early` touched before the wait for the upstream kernel. cluster: blocks that run together.
    Raises EmulatorError with a sentence about the first thing the kernel did that it must not.
    """
    library = compile_source(source, symbol)
    table = (_Operand * len(operands))()
    for row, (name, tensor) in zip(table, operands.items(), strict=True):
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        row.name, row.begin = describe(name, tensor).encode(), tensor.data_ptr()
        row.bytes, row.element, row.writable = extent * tensor.element_size(), tensor.element_size(), name in writable
        row.early = name in early
    message = ctypes.create_string_buffer(1024)
    arguments = ctypes.c_void_p(packed.address)
    if library.emulate(grid, block, cluster, shared_bytes, uses_pdl(source), arguments, table, len(table), message, len(message)):
        raise EmulatorError(f"{symbol}: {message.value.decode()}")


def run(
    spec: KernelSpec, arch: Arch, grid: int, packed: Packed, operands: Mapping[str, Tensor], writable: tuple[str, ...] = ("state", "out")
) -> None:
    """Renders a spec and runs it; otherwise as `run_source`."""
    early, cluster = spec.early_operands(), spec.cluster_blocks
    run_source(render(spec, arch), spec.name, grid, spec.threads_per_block, packed, operands, writable, early=early, cluster=cluster)
