"""Runs generated kernels on the CPU, and checks their memory accesses and synchronisation.

The rendered text is compiled unchanged with g++, after `emulator.hpp`. Needs g++ 8 or later; slow, and meant for tests and authors.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..cache import objects
from ..compile.render import render, uses_pdl
from ..errors import SsmgenError
from ..spec.arguments import Packed
from ..spec.kernel import Arch, KernelSpec

HERE = Path(__file__).parent
WORDS = ("emulator.hpp", "machine.hpp")
MACHINE = (
    "machine.cpp",
    "memory.cpp",
    "copies.cpp",
    "barriers.cpp",
    "products.cpp",
    "arithmetic.cpp",
)
# No contraction, as under NVRTC with --fmad=false, so that equal arithmetic gives equal bits.
COMMON = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC")
# Most of a kernel's time is g++, and -O0 is the fastest. A library with unique symbols would never be unloaded.
FLAGS = (*COMMON, "-O0", "-fno-thread-jumps", "-fno-gnu-unique", "-Wno-unknown-pragmas")
SMS = 3  # of the emulated card; persistent kernels have this number of blocks
LOADED = 64  # kernels that stay loaded, about 0.2 MB each


class EmulatorMissingError(SsmgenError):
    """No C++ compiler was found."""

    def __init__(self) -> None:
        super().__init__("g++ was not found; the emulator needs a C++17 compiler. Install one, for example: apt-get install g++")


class EmulatorError(SsmgenError):
    """The text does not compile as C++, or the kernel did something that the emulator forbids."""


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
def _private() -> tempfile.TemporaryDirectory:
    """A private folder that is deleted with the process: it holds code that the process loads."""
    return tempfile.TemporaryDirectory(prefix="ssmgen-emulator-")


@functools.cache
def _workplace() -> Path:
    """The folder for compiling kernels, with a precompiled header: reading the header takes half of a kernel's time.

    If g++ cannot precompile it, g++ reads the header's text next to it, with the same result.
    """
    place = Path(_private().name)
    for name in WORDS:
        shutil.copy(HERE / name, place)
    words = str(place / WORDS[0])
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", words, "-o", f"{words}.gch"], capture_output=True, check=False)
    return place


def _compile(what: str, library: Path, *arguments: str) -> None:
    done = subprocess.run(["g++", *arguments, "-shared", "-s", "-o", str(library)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{what} does not compile for the emulator:\n{done.stderr[:4000]}")


def _library(name: str, text: str, symbol: str, flags: tuple[str, ...], compile_to: Callable[[Path], None]) -> Path:
    """A library in this process's directory: kept by an earlier process, or made by `compile_to`."""
    library = Path(_private().name) / name
    if kept := objects.read(text, symbol, flags):
        library.write_bytes(kept)
    else:
        start = time.perf_counter()
        compile_to(library)
        objects.keep(text, symbol, flags, library.read_bytes(), time.perf_counter() - start)
    return library


@functools.cache
def _text() -> str:
    """The text of the machine and of the headers that kernels include."""
    return "".join(path.read_text() for path in sorted(HERE.glob("*.[ch]pp")))


@functools.cache
def _soname() -> str:
    """The name by which a kernel finds the loaded machine, with the digest of all text except the kernel's own."""
    return f"ssmgen-machine-{hashlib.sha256(_text().encode()).hexdigest()[:24]}.so"


@functools.cache
def _machine() -> ctypes.CDLL:
    """The library that runs kernels, loaded."""
    # A fortified longjmp would mistake another fiber's stack for a corrupted one.
    flags = (*COMMON, "-O2", "-U_FORTIFY_SOURCE", f"-Wl,-soname,{_soname()}")

    def compile_to(library: Path) -> None:
        unit = library.with_suffix(".cpp")  # one unit, as reading the standard library's headers takes longest: 4 s instead of 7 s
        unit.write_text("".join(f'#include "{HERE / name}"\n' for name in MACHINE))
        _compile("the machine", library, *flags, str(unit))

    return ctypes.CDLL(str(_library("machine.so", _text(), "machine", flags, compile_to)))


class Kernel:
    """A compiled kernel, unloaded when its last reference is gone. address: its entry, for the machine."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        weakref.finalize(self, _ctypes.dlclose, loaded._handle).atexit = False
        self.address = ctypes.cast(loaded.emulated, ctypes.c_void_p)


@functools.lru_cache(maxsize=LOADED)
def compile_source(source: str, symbol: str) -> Kernel:
    """The kernel as a loaded library. Raises EmulatorMissingError; EmulatorError with g++'s output."""
    if not available():
        raise EmulatorMissingError
    machine = _machine()._name  # loaded first: a kernel finds it by its name
    entry = f'extern "C" void emulated(void** arguments) {{ emulator::call({symbol}, arguments); }}'
    text = f"{source}\n{entry}\n"
    stem = hashlib.sha256(text.encode()).hexdigest()[:24]

    def compile_to(library: Path) -> None:
        kernel, unit = _workplace() / f"{stem}.cu", _workplace() / f"{stem}.cpp"
        kernel.write_text(source)
        unit.write_text(f'#include "{WORDS[0]}"\n#include "{kernel.name}"\n{entry}\n')
        # Without the standard libraries, which the machine has: searching them takes g++ a sixth of a kernel's time.
        _compile(symbol, library, *FLAGS, "-nostdlib", str(unit), machine, "-lm")

    library = Path(_private().name) / f"{stem}.so"
    return Kernel(library if library.exists() else _library(library.name, text, symbol, (*FLAGS, _soname()), compile_to))


def products_of(source: str) -> int:
    """The type of the warpgroups' products, in the machine's encoding: 0 none, 1 bf16, 2 f16."""
    found = re.search(r"wgmma\.mma_async\S*\.f32\.(bf16|f16)\.", source)
    return ("bf16", "f16").index(found[1]) + 1 if found else 0


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

    operands: {name: CPU tensor}. The kernel may access only memory from each one's first to its last element. It may write operands in
    `writable`, and access operands in `early` before the wait for the upstream kernel. cluster: blocks that run together. Raises
    EmulatorError with a sentence about the first forbidden action of the kernel.
    """
    kernel = compile_source(source, symbol)
    table = (_Operand * len(operands))()
    for row, (name, tensor) in zip(table, operands.items(), strict=True):
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        row.name, row.begin = describe(name, tensor).encode(), tensor.data_ptr()
        row.bytes, row.element, row.writable = extent * tensor.element_size(), tensor.element_size(), name in writable
        row.early = name in early
    message = ctypes.create_string_buffer(1024)
    arguments = ctypes.c_void_p(packed.address)
    launch = grid, block, cluster, shared_bytes, uses_pdl(source), products_of(source)
    if _machine().launch(kernel.address, *launch, arguments, table, len(table), message, len(message)):
        raise EmulatorError(f"{symbol}: {message.value.decode()}")


def run(
    spec: KernelSpec, arch: Arch, grid: int, packed: Packed, operands: Mapping[str, Tensor], writable: tuple[str, ...] = ("state", "out")
) -> None:
    """Renders a spec and runs it; otherwise as `run_source`."""
    early, cluster, shared = spec.early_operands(), spec.cluster_blocks, spec.dynamic_bytes
    grid = min(grid, SMS) if spec.stays else grid
    run_source(render(spec, arch), spec.name, grid, spec.threads_per_block, packed, operands, writable, shared, early, cluster)
