"""Variants that NVRTC compiles once for all tests of a run: the cache that its workers share keeps them."""

from __future__ import annotations

from ssmgen.cache.entry import Entry
from ssmgen.cache.store import shared_cache
from ssmgen.spec.kernel import Arch, KernelSpec


def compiled(spec: KernelSpec, arch: Arch) -> Entry:
    """The cubin, and its registers and spills."""
    return shared_cache().get(spec, arch)[0]
