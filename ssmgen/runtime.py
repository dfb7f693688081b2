"""Cubin -> kernel -> plan -> launch: the only part that needs a device.

A kernel is loaded once per process as a context-independent library and kept for its life; its CUkernel handle is launched directly
on whatever device the stream belongs to. A plan is one call signature: kernel, grid and a packed argument buffer, of which a launch
only rewrites the pointers. Plans belong to one thread, so their buffers need no lock.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, c_void_p
from typing import Any

import torch

from .cache import Entry, shared_cache
from .errors import CaptureError, CompilerMissingError, LaunchError, LoadError
from .render import uses_pdl
from .spec import Arch, KernelSpec

current_raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",  # 0.1 us where torch.cuda.current_stream() takes 3.1
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)


@functools.cache
def driver():
    """cuda.bindings' driver module. Raises CompilerMissingError when the bindings are not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise CompilerMissingError(str(e)) from e
    return driver


def check(result: tuple, failure: Callable[[str], Exception]) -> Any:
    """The value of a driver call, or raises failure(error name)."""
    code, *values = result
    if code != driver().CUresult.CUDA_SUCCESS:
        raise failure(code.name)
    return values[0] if len(values) == 1 else values


@functools.cache
def device_arch(index: int) -> Arch:
    return Arch.of_capability(*torch.cuda.get_device_capability(index))


class Kernel:
    """A loaded kernel. Never unloaded: a captured graph may hold it."""

    __slots__ = ("arch", "entry", "handle", "library", "pdl", "spec")

    def __init__(self, spec: KernelSpec, arch: Arch, entry: Entry):
        cu = driver()

        def refused(detail: str) -> LoadError:
            return LoadError(str(spec), str(arch), detail)

        self.spec, self.arch, self.entry = spec, arch, entry
        self.library = check(cu.cuLibraryLoadData(entry.cubin, [], [], 0, [], [], 0), refused)
        self.handle = int(check(cu.cuLibraryGetKernel(self.library, entry.symbol.encode()), refused))
        self.pdl = uses_pdl(entry.source)


_kernels: dict[tuple[KernelSpec, Arch], Kernel] = {}
_load_lock = threading.Lock()


def is_loaded(spec: KernelSpec, arch: Arch) -> bool:
    return (spec, arch) in _kernels


def load(spec: KernelSpec, device: int, operator: str) -> Kernel:
    """The kernel for a device, compiled and loaded if need be. Raises CaptureError if that would happen during a graph capture."""
    arch = device_arch(device)
    kernel = _kernels.get((spec, arch))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(str(spec), str(arch), operator)
        entry, _ = shared_cache().get(spec, arch)
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


class Plan:
    """One call signature of one kernel on one device, for one thread."""

    __slots__ = ("_buffer", "_config", "_keep", "_launch", "_pack", "_pointers", "_stream", "device", "grid", "kernel", "values")

    def __init__(self, kernel: Kernel, device: int, grid: int, values: dict[str, int | float]):
        """`values` holds every kernel argument that is not a pointer, by name; the pointers come first and at each launch."""
        cu = driver()
        ensure_context(device)
        params = kernel.spec.parameters()
        self.kernel, self.device, self.grid, self.values = kernel, device, grid, values
        count = sum(p.code == "Q" for p in params)
        assert all(p.code == "Q" for p in params[:count]), "pointers come first"
        self._pack = struct.Struct(f"={count}Q").pack_into
        layout = struct.Struct("=" + "".join(p.code for p in params))
        self._buffer = (c_char * max(layout.size, 1)).from_buffer(bytearray(max(layout.size, 1)))
        layout.pack_into(self._buffer, 0, *([0] * count), *(values[p.name] for p in params[count:]))
        base, offset = addressof(self._buffer), 0
        slots = (c_void_p * len(params))()
        for i, p in enumerate(params):
            slots[i] = base + offset
            offset += struct.calcsize("=" + p.code)
        self._pointers = addressof(slots)
        self._keep = slots

        self._config = cu.CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = grid, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = kernel.spec.threads_per_block, 1, 1
        self._config.sharedMemBytes = 0
        self._stream = 0
        self._config.hStream = 0
        if kernel.pdl:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._config.attrs, self._config.numAttrs = [attribute], 1
        self._launch = cu.cuLaunchKernelEx

    def launch(self, pointers: Sequence[int]) -> None:
        """Enqueues the kernel on the current stream of its device. Raises LaunchError."""
        self._pack(self._buffer, 0, *pointers)
        self.relaunch()

    def set_pointers(self, pointers: Sequence[int]) -> None:
        self._pack(self._buffer, 0, *pointers)

    def relaunch(self) -> None:
        """The same with the pointers of the last launch."""
        stream = current_raw_stream(self.device)
        if stream != self._stream:
            self._stream = stream
            self._config.hStream = stream
        if stream == 0 and _several_devices() and torch.cuda.current_device() != self.device:
            # Handle 0 is the default stream of the *current* context.
            with torch.cuda.device(self.device):
                (code,) = self._launch(self._config, self.kernel.handle, self._pointers, 0)
        else:
            (code,) = self._launch(self._config, self.kernel.handle, self._pointers, 0)
        if code:
            raise LaunchError(str(self.kernel.spec), code.name, self.grid, self.kernel.spec.threads_per_block, str(self.values))


@functools.cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A predicate: do these tensors have the types, shapes, strides, dtypes, devices and grad flags of the given ones?

    torch's own guard object compares 12 tensors in 1.1 us; the same in Python takes 3. It answers no when one object comes twice,
    so such signatures, and releases of torch without it, use the Python form.
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
        return [(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in ts]

    expected = describe(tensors)
    return lambda *ts: describe(ts) == expected


class Signature:
    """The calls that differ in nothing but where their tensors lie. `resolve(pointers)` checks that and gives the plan."""

    __slots__ = ("_plans", "_resolve", "matches")

    limit = 1024  # pointer sets remembered; caching allocators hand out the same few again and again

    def __init__(self, tensors: Sequence[torch.Tensor], resolve: Callable[[tuple[int, ...]], Plan]):
        self.matches = tensor_guard(tensors)
        self._resolve = resolve
        self._plans: dict[tuple[int, ...], Plan] = {}

    def plan(self, pointers: tuple[int, ...]) -> Plan:
        """Alignment and overlap are functions of the pointers, so they are checked once per set of pointers."""
        plan = self._plans.get(pointers)
        if plan is None:
            plan = self._resolve(pointers)
            if len(self._plans) >= self.limit:
                self._plans.clear()
            self._plans[pointers] = plan
        return plan


class SignatureTable(threading.local):
    """A thread's signatures, by what is cheap to hash. Cleared when a caller with ever new shapes has filled it."""

    limit = 4096

    def __init__(self) -> None:
        self.rows: dict[Any, list[Signature]] = {}
        _tables.add(self)

    def find(self, key: Any, tensors: Sequence[torch.Tensor]) -> Signature | None:
        for signature in self.rows.get(key, ()):
            if signature.matches(*tensors):
                return signature
        return None

    def add(self, key: Any, signature: Signature) -> None:
        if len(self.rows) >= self.limit:
            self.rows.clear()
        self.rows.setdefault(key, []).insert(0, signature)


_tables: weakref.WeakSet[SignatureTable] = weakref.WeakSet()


def _forget_in_child() -> None:
    # CUDA handles do not survive a fork.
    _kernels.clear()
    for table in _tables:
        table.rows.clear()


os.register_at_fork(after_in_child=_forget_in_child)
