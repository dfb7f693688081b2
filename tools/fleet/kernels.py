"""Kernels whose compiling is a sleep: their cubin is a function of their source, so a wrong one is seen at once."""

from __future__ import annotations

import hashlib

from ssmgen.cache.entry import Entry, cache_key
from ssmgen.compile.nvrtc import Resources
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch

ARCH = Arch.parse("sm_90a")
BUILD, OPTIONS = "CL-1 V12.9.86", ("--std=c++17",)
SOURCE_LINES, CUBIN_BYTES = 600, 24 * 1024  # 40 KiB in all, as the kernels of a model have in the mean


def spec(number: int) -> SlotCopySpec:
    return SlotCopySpec(slot_bytes=512 * number, threads=32)


def made(number: int) -> Entry:
    """The result of compiling a kernel."""
    source = f"// kernel {number:4} of a fleet\n" * SOURCE_LINES
    cubin = b"\x7fELF" + hashlib.sha256(source.encode()).digest() * (CUBIN_BYTES // 32)
    key = cache_key(source, OPTIONS, ARCH, BUILD)
    named = spec(number)
    return Entry(key, str(named), named.name, str(ARCH), BUILD, OPTIONS, Resources(32, 0, 0, 0, 0), 0.1, source, cubin)
