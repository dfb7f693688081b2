"""Saves compilations: variants that NVRTC compiles once for a run, whose workers share a cache, and one that stands for a test's others."""

from __future__ import annotations

import pytest

from ssmgen.cache.entry import Entry
from ssmgen.cache.store import shared_cache
from ssmgen.spec.kernel import Arch, KernelSpec


def compiled(spec: KernelSpec, arch: Arch) -> Entry:
    """The cubin, and its registers and spills."""
    return shared_cache().get(spec, arch)[0]


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compilation is real, and stands for the others: for tests of reports, in which only its time counts."""
    from ssmgen.compile import nvrtc

    real, done = nvrtc.compile_cubin, []

    def compile_cubin(*words):
        if not done:
            done.append(real(*words))
        return done[0]

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
