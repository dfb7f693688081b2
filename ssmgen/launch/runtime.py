"""Cubin -> kernel -> plan -> launch: the only part that needs a device.

A kernel is loaded once per process as a context-independent library and kept for its life; its CUkernel handle is launched directly
on whatever device the stream belongs to. A plan is a kernel, a grid and a packed argument buffer; it is made once per set of
pointers and never changes, so a launch packs nothing and threads need no lock.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..cache.entry import Entry
from ..cache.store import Cache, shared_cache
from ..compile.render import uses_pdl
from ..errors import CaptureError, CompilerMissingError, LaunchError, LoadError, NotBuiltError, TensorMapError
from ..spec.arguments import Arguments, Packed, Tiles, Value
from ..spec.kernel import MAP_BYTES, Arch, KernelSpec
from . import native
from .enqueue import LaunchConfig, enqueuing

current_raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",  # 0.1 us; torch.cuda.current_stream() takes 3.1 us
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


STREAMS = 256  # limit for cached streams, which come and go


@functools.cache
def driver() -> Any:
    """cuda.bindings' driver module. Raises CompilerMissingError when the bindings are not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise CompilerMissingError(str(e)) from e
    return driver


def check(result: tuple[Any, ...], failure: Callable[[str], Exception]) -> Any:
    """The value of a driver call, or raises failure(error name)."""
    code, *values = result
    if code != driver().CUresult.CUDA_SUCCESS:
        raise failure(code.name)
    return values[0] if len(values) == 1 else values


@functools.cache
def device_arch(index: int) -> Arch:
    return Arch.of_capability(*torch.cuda.get_device_capability(index))


@functools.cache
def device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def device_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def name_of_gpu(arch: Arch) -> str | None:
    """The name of this process's first GPU, if it is of that architecture."""
    here = torch.cuda.is_available() and device_arch(0) == arch
    return device_name(0) if here else None


class Kernel:
    """A loaded kernel. Never unloaded: a captured graph may hold it."""

    __slots__ = ("allowed", "arch", "entry", "handle", "library", "pdl", "spec")

    def __init__(self, spec: KernelSpec, arch: Arch, entry: Entry):
        cu = driver()

        def refused(detail: str) -> LoadError:
            return LoadError(str(spec), str(arch), detail)

        self.spec, self.arch, self.entry = spec, arch, entry
        self.library = check(cu.cuLibraryLoadData(entry.cubin, [], [], 0, [], [], 0), refused)
        self.handle = int(check(cu.cuLibraryGetKernel(self.library, entry.symbol.encode()), refused))
        self.pdl = uses_pdl(entry.source)
        self.allowed: set[int] = set()  # devices where its dynamic shared memory is enabled

    def allow_shared(self, device: int) -> None:
        """Enables dynamic shared memory for launches on a device. Raises LoadError if the device has less of it."""
        if device in self.allowed:
            return
        cu = driver()
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

        def refused(detail: str) -> LoadError:
            return LoadError(str(self.spec), str(self.arch), detail)

        ordinal = check(cu.cuDeviceGet(device), refused)
        check(cu.cuKernelSetAttribute(attribute, self.spec.dynamic_bytes, self.handle, ordinal), refused)
        self.allowed.add(device)


_kernels: dict[tuple[KernelSpec, Arch], Kernel] = {}
_load_lock = threading.Lock()


def is_loaded(spec: KernelSpec, arch: Arch) -> bool:
    return (spec, arch) in _kernels


def loaded_count() -> int:
    """Kernels loaded by this process, of all architectures."""
    return len(_kernels)


def entry_of(spec: KernelSpec, arch: Arch, cache: Cache) -> Entry:
    """A call's kernel. Raises the errors of `Cache.get`; NotBuiltError names a known model that has it, if any."""
    try:
        return cache.get(spec, arch)[0]
    except NotBuiltError:
        from ..select.model_variants import options_for  # only here: it imports all families' models

        raise NotBuiltError(str(spec), str(arch), options_for(spec, arch)) from None


def load(spec: KernelSpec, device: int, operator: str) -> Kernel:
    """The kernel for a device, compiled and loaded if need be. Raises CaptureError if that would happen during a graph capture."""
    arch = device_arch(device)
    kernel = _kernels.get((spec, arch))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(str(spec), str(arch), operator)
        entry = entry_of(spec, arch, shared_cache())
        with _load_lock:
            kernel = _kernels.get((spec, arch))
            if kernel is None:
                with torch.cuda.device(device):
                    ensure_context(device)
                    kernel = _kernels[spec, arch] = Kernel(spec, arch, entry)
    return kernel


def ensure_context(device: int) -> None:
    """Makes the device's primary context current to this thread if none is: a new thread has none until its first torch call."""
    cu = driver()

    def failed(name: str) -> LoadError:
        return LoadError("the CUDA context", str(device_arch(device)), name)

    if not int(check(cu.cuCtxGetCurrent(), failed)):
        check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(device), failed)), failed)), failed)


@functools.lru_cache(maxsize=4096)
def tensor_map(tiles: Tiles, address: int) -> bytes:
    """A tensor map of 16-bit numbers whose boxes are swizzled by 128 bytes. Raises TensorMapError."""
    if 0 in tiles.sizes:  # nothing to copy
        return bytes(MAP_BYTES)
    cu = driver()
    made = cu.cuTensorMapEncodeTiled(
        cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, len(tiles.sizes), address,
        [cu.cuuint64_t(n) for n in tiles.sizes], [cu.cuuint64_t(n) for n in tiles.strides], [cu.cuuint32_t(n) for n in tiles.box],
        [cu.cuuint32_t(1)] * len(tiles.sizes), cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B, cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    made = check(made, lambda name: TensorMapError(tiles.operand, name, f"at {address:#x}: {tiles}"))
    return ctypes.string_at(int(made.getPtr()), MAP_BYTES)


class Launch:
    """A kernel with all of its launch except pointers: device, grid and the other arguments."""

    __slots__ = ("arguments", "device", "grid", "kernel", "watch_device")

    def __init__(self, kernel: Kernel, device: int, grid: int, values: Mapping[str, Value]):
        """`values` as in Arguments; `grid` counts blocks of kernels that are not persistent."""
        self.kernel, self.device = kernel, device
        self.grid = min(grid, device_sms(device)) if kernel.spec.stays else grid
        self.arguments = Arguments(kernel.spec, values, tensor_map)
        self.watch_device = torch.cuda.device_count() > 1
        if kernel.spec.dynamic_bytes:
            kernel.allow_shared(device)

    def configure(self, stream: int) -> LaunchConfig:
        """The launch configuration for a stream. The programmatic attribute is set if and only if the kernel waits."""
        spec = self.kernel.spec
        return LaunchConfig.of(self.grid, spec.threads_per_block, spec.dynamic_bytes, stream, self.kernel.pdl)

    def on(self, stream: int, packed: Packed) -> Callable[[], int]:
        """A function that launches on this stream with these arguments, and returns the driver's error, 0 if there is none."""
        enqueue = enqueuing(self.configure(stream), self.kernel.handle, packed.address)
        return partial(self._there, enqueue) if stream == 0 and self.watch_device else enqueue

    def _there(self, enqueue: Callable[[], int]) -> int:
        """Handle 0 is the default stream of the *current* context."""
        if current_device() == self.device:
            return enqueue()
        with torch.cuda.device(self.device):
            return enqueue()

    def at(self, pointers: Sequence[int]) -> Plan:
        """The plan for one set of pointers."""
        return plan_of([(self, self.arguments.at(pointers))])

    def failed(self, code: int, enqueue: Callable[[], int]) -> None:
        """Raises LaunchError, unless a retry works."""
        if code == driver().CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a new thread has no context until its first torch call
            ensure_context(self.device)
            code = enqueue()
        if code:
            spec, name = self.kernel.spec, driver().CUresult(code).name
            raise LaunchError(str(spec), name, self.grid, spec.threads_per_block, str(self.arguments.values))


class Chain:
    """Consecutive launches on one device; each takes the call's pointers at its positions."""

    __slots__ = ("launches", "positions")

    def __init__(self, launches: Sequence[Launch], positions: Sequence[Sequence[int]]):
        self.launches, self.positions = launches, positions

    def at(self, pointers: Sequence[int]) -> Plan:
        """The plan for one set of pointers."""
        rows = zip(self.launches, self.positions, strict=True)
        return plan_of([(launch, launch.arguments.at([pointers[i] for i in positions])) for launch, positions in rows])


Plan = Callable[[], None]  # enqueues launches, in a row, on the current stream of their device, or raises LaunchError; threads may share it


def plan_of(parts: Sequence[tuple[Launch, Packed]]) -> Plan:
    """The plan of launches with their arguments. It is a closure: a call of an object takes 0.1 us more."""
    device = parts[0][0].device
    # By stream. Launching changes nothing, so threads share a plan without a lock.
    known: dict[int, list[tuple[Launch, Callable[[], int]]]] = {}

    def ready(stream: int) -> list[tuple[Launch, Callable[[], int]]]:
        if len(known) >= STREAMS:
            known.clear()
        found = known[stream] = [(launch, launch.on(stream, packed)) for launch, packed in parts]
        return found

    if made := native.found():
        return made.Plan(device, current_raw_stream, known, ready)

    def plan() -> None:
        stream = current_raw_stream(device)
        for launch, enqueue in known.get(stream) or ready(stream):
            if code := enqueue():
                launch.failed(code, enqueue)

    return plan


def _forget_in_child() -> None:
    # CUDA handles do not survive a fork, and locks that other threads held are never released.
    global _load_lock
    _load_lock = threading.Lock()
    _kernels.clear()


os.register_at_fork(after_in_child=_forget_in_child)
