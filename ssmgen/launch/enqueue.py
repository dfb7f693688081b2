"""The driver's launch function and its structures in ctypes, prepared so that a call converts nothing: 3.05 us each on an H200's host."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from . import native

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with one of the values that are an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("gridDimX", ctypes.c_uint), ("gridDimY", ctypes.c_uint), ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint), ("blockDimY", ctypes.c_uint), ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint), ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(LaunchAttribute)), ("numAttrs", ctypes.c_uint),
    )  # fmt: skip

    @classmethod
    def of(cls, blocks: int, threads: int, shared: int, stream: int, pdl: bool) -> LaunchConfig:
        """A launch of a grid of one axis. pdl: the kernel may start before the previous one in the stream ends; shared: dynamic bytes."""
        config = cls(blocks, 1, 1, threads, 1, 1, shared, stream)
        if pdl:
            config.attrs, config.numAttrs = _PROGRAMMATIC, 1
        return config


_PROGRAMMATIC = ctypes.pointer(LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1))  # shared by all launches and never written


@functools.cache
def launcher() -> Any:
    """cuLaunchKernelEx. It releases the GIL: a launch may have to wait for the host function of another thread."""
    driver: Any = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    return driver.cuLaunchKernelEx


def enqueuing(config: LaunchConfig, kernel: int, arguments: int) -> Callable[[], int]:
    """A function that launches, and returns the driver's error. It keeps the configuration alive. kernel: a handle; arguments: the address
    of the array of argument addresses, which the caller keeps alive."""
    if made := native.found():
        return made.Enqueue(ctypes.cast(launcher(), ctypes.c_void_p).value, ctypes.addressof(config), kernel, arguments, config)
    # Without argtypes, and with ctypes objects as arguments, ctypes converts nothing.
    return functools.partial(launcher(), ctypes.byref(config), ctypes.c_void_p(kernel), ctypes.c_void_p(arguments), None)
