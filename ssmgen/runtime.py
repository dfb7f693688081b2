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
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from . import native
from .arguments import Arguments, Packed, Tiles, Value
from .cache.entry import Entry
from .cache.store import shared_cache
from .enqueue import LaunchConfig, enqueuing
from .errors import CaptureError, CompilerMissingError, LaunchError, LoadError, TensorMapError
from .render import uses_pdl
from .spec import MAP_BYTES, Arch, KernelSpec

current_raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",  # 0.1 us where torch.cuda.current_stream() takes 3.1
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


STREAMS = 256  # for which something is kept: they come and go


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
        self.allowed: set[int] = set()  # devices on which it may have its dynamic shared memory

    def allow_shared(self, device: int) -> None:
        """Lets launches on a device ask for dynamic shared memory. Raises LoadError where there is less of it."""
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


def load(spec: KernelSpec, device: int, operator: str) -> Kernel:
    """The kernel for a device, compiled and loaded if need be. Raises CaptureError if that would happen during a graph capture."""
    arch = device_arch(device)
    kernel = _kernels.get((spec, arch))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(str(spec), str(arch), operator)
        from .build import entry_of  # only here: it imports all families' models

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
    if 0 in tiles.sizes:  # there is nothing to copy
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
    """A kernel with everything but its pointers: device, grid and the other arguments."""

    __slots__ = ("arguments", "configs", "device", "grid", "kernel", "watch_device")

    def __init__(self, kernel: Kernel, device: int, grid: int, values: Mapping[str, Value]):
        """`values` holds every kernel argument that is not a pointer, by name; `grid` is of blocks that do not stay."""
        self.kernel, self.device = kernel, device
        self.grid = min(grid, device_sms(device)) if kernel.spec.stays else grid
        self.arguments = Arguments(kernel.spec, values, tensor_map)
        self.configs: dict[int, LaunchConfig] = {}  # by stream: launching changes nothing, so threads share a plan without a lock
        self.watch_device = torch.cuda.device_count() > 1
        if kernel.spec.dynamic_bytes:
            kernel.allow_shared(device)

    def configure(self, stream: int) -> LaunchConfig:
        """The launch configuration for a stream. The programmatic attribute is set if and only if the kernel waits."""
        spec = self.kernel.spec
        config = LaunchConfig.of(self.grid, spec.threads_per_block, spec.dynamic_bytes, stream, self.kernel.pdl)
        if len(self.configs) >= STREAMS:
            self.configs.clear()
        self.configs[stream] = config
        return config

    def on(self, stream: int, packed: Packed) -> Callable[[], int]:
        """What enqueues it there with these arguments, and returns the driver's error, 0 if there is none."""
        enqueue = enqueuing(self.configs.get(stream) or self.configure(stream), self.kernel.handle, packed.address)
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
        """Raises LaunchError, unless it works now."""
        if code == driver().CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a new thread has no context until its first torch call
            ensure_context(self.device)
            code = enqueue()
        if code:
            spec, name = self.kernel.spec, driver().CUresult(code).name
            raise LaunchError(str(spec), name, self.grid, spec.threads_per_block, str(self.arguments.values))


class Chain:
    """Launches in a row on one device; each takes, of a call's pointers, those at its positions."""

    __slots__ = ("launches", "positions")

    def __init__(self, launches: Sequence[Launch], positions: Sequence[Sequence[int]]):
        self.launches, self.positions = launches, positions

    def at(self, pointers: Sequence[int]) -> Plan:
        """The plan for one set of pointers."""
        rows = zip(self.launches, self.positions, strict=True)
        return plan_of([(launch, launch.arguments.at([pointers[i] for i in positions])) for launch, positions in rows])


Plan = Callable[[], None]  # enqueues launches, in a row, on the current stream of their device, or raises LaunchError; threads may share it


def plan_of(parts: Sequence[tuple[Launch, Packed]]) -> Plan:
    """The plan of launches with their arguments. It is a function with what it needs in cells: an object takes 0.1 us more to call."""
    device = parts[0][0].device
    known: dict[int, list[tuple[Launch, Callable[[], int]]]] = {}  # by stream

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


def _nothing() -> None:
    """The plan of an empty batch."""


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A predicate: are these tensors, with the types, shapes, strides, dtypes, devices and grad flags of the given ones?

    torch's own guard object compares 11 tensors in 1.3 us; the same in Python takes 3. It answers no when one object comes twice,
    so such patterns, and releases of torch without it, use the Python form.
    """
    if len({id(t) for t in tensors}) == len(tensors):
        try:
            from torch._C._dynamo.guards import TensorGuards

            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if guard.check(*tensors):
                return guard.check
        except (ImportError, TypeError):
            pass

    def describe(ts: Sequence[torch.Tensor]) -> list[tuple]:
        return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in ts]

    types, expected = [*map(type, tensors)], describe(tensors)
    return lambda *ts: [*map(type, ts)] == types and describe(ts) == expected


def matching(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A predicate: may these tensors stand for the given ones in a call like theirs?"""
    guard = tensor_guard(tensors)
    # Weights may require grad where no graph is recorded. Elsewhere such a call is not one like this, and the checks refuse it.
    needs_grad = any(t.requires_grad for t in tensors)
    return (lambda *ts: not torch.is_grad_enabled() and guard(*ts)) if needs_grad else guard


# What inductor's kernels allocate with: on the current device, past the dispatcher, in half of the time.
_empty: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes tensors of the layout and dtype of one, on its device. Their elements may be anything."""
    anywhere = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
    if _empty is None or not like.is_cuda:
        return anywhere
    index, here = like.device.index, partial(_empty, tuple(like.shape), like.stride(), like.dtype)
    return here if torch.cuda.device_count() == 1 else lambda: here() if current_device() == index else anywhere()


_data_ptr = torch.Tensor.data_ptr


def picking(positions: Sequence[int]) -> Callable[[Any], Any]:
    """An itemgetter that returns several values also where they are one or none."""
    return itemgetter(*positions) if len(positions) > 1 else itemgetter(slice(*(positions[0], positions[0] + 1) if positions else (0,)))


class Pattern:
    """The calls that differ in nothing but where their tensors lie.

    `given` is all that a call was given; its tensors lie at `positions`, and their pointers go to `resolve` in that order, and behind them
    those of tensors that were not given. Alignment and overlap are functions of the pointers: `resolve` checks them and makes the plan,
    once per set of pointers. All else takes tensors and their pointers as they were given, `positions` of the pattern.
    """

    __slots__ = ("_order", "_resolve", "matches", "pick", "plans", "positions")

    limit = 1024  # pointer sets remembered; caching allocators hand out the same few again and again

    def __init__(self, given: Sequence[Any], resolve: Callable[[tuple[int, ...]], Launch | Chain | None], positions: Sequence[int]):
        self.positions = sorted({*positions})
        self._order = [self.positions.index(i) for i in positions]
        self.pick = picking(self.positions)
        self.matches = matching([given[i] for i in self.positions])
        self._resolve = resolve
        self.plans: dict[tuple[int, ...], Callable[[], None]] = {}

    def add(self, pointers: tuple[int, ...]) -> Plan:
        """The plan for pointers not seen before. Raises what `resolve` raises."""
        ordered = *(pointers[i] for i in self._order), *pointers[len(self.positions) :]
        launch = self._resolve(ordered)
        if len(self.plans) >= self.limit:
            self.plans.clear()
        plan = self.plans[pointers] = _nothing if launch is None else launch.at(ordered)
        return plan

    def at(self, pointers: tuple[int, ...]) -> Plan:
        """The plan for pointers. Raises what `resolve` raises."""
        return self.plans.get(pointers) or self.add(pointers)

    def plan(self, tensors: Sequence[torch.Tensor]) -> Plan:
        """The plan for operands that match. Raises what `resolve` raises."""
        return self.at((*map(_data_ptr, tensors),))


class Table:
    """Rows of what is alike in what is cheap to hash. Cleared when a caller with ever new shapes has filled it, and in a child process."""

    limit = 4096

    def __init__(self) -> None:
        self.rows: dict[Any, tuple[Any, ...]] = {}
        _tables.add(self)

    def add(self, key: Any, entry: Any) -> None:
        if len(self.rows) >= self.limit:
            self.rows.clear()
        self.rows[key] = (entry, *self.rows.get(key, ()))[:64]

    def clear(self) -> None:
        self.rows.clear()


class Patterns(Table):
    """An operator's patterns, by what its operands and options are."""

    def find(self, key: Any, given: tuple[torch.Tensor | None, ...]) -> Callable[[], None] | None:
        """The plan for a call like one seen before, else None."""
        pattern: Pattern
        for pattern in self.rows.get(key, ()):
            tensors = pattern.pick(given)
            if pattern.matches(*tensors):
                return pattern.plan(tensors)
        return None


_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def _forget_in_child() -> None:
    # CUDA handles do not survive a fork, and nobody lets go of a lock that another thread held.
    global _load_lock
    _load_lock = threading.Lock()
    _kernels.clear()
    for table in _tables:
        table.clear()


os.register_at_fork(after_in_child=_forget_in_child)
