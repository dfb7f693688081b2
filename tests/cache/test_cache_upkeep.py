"""Upkeep of the cache: verification, collection, and the record of compilers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ssmgen.cache.layer import Layer
from ssmgen.cache.store import Cache
from ssmgen.cache.upkeep import collect_garbage, verify
from ssmgen.compile import nvrtc
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch

ARCH = Arch.parse("sm_90a")


def spec(threads: int = 128) -> SlotCopySpec:
    return SlotCopySpec(slot_bytes=16 * 1024, threads=threads)


def test_verify_and_collect_garbage(tmp_path):
    cache = Cache(tmp_path)
    for i, threads in enumerate((32, 64, 128, 256)):
        entry, _ = cache.get(spec(threads), ARCH)
        path = Layer(tmp_path).path(entry.key, ARCH)
        os.utime(path, (1000 + i, 1000 + i))
    layer = Layer(tmp_path)
    assert not verify(layer)
    newest = max(layer.files(), key=lambda p: p.stat().st_mtime)
    damaged = min(layer.files(), key=lambda p: p.stat().st_mtime)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    leftover = newest.parent / ".tmp-dead"
    leftover.write_bytes(b"x")
    os.utime(leftover, (1, 1))
    assert [p for p, _ in verify(layer)] == [damaged]
    removed, _ = collect_garbage(layer, max_bytes=newest.stat().st_size)
    assert removed == 4 and list(layer.files()) == [newest] and not leftover.exists()


def test_compiler_build_is_remembered_and_distrusted_when_it_does_not_fit(tmp_path, monkeypatch):
    Cache(tmp_path).compiler_build()
    (note,) = (tmp_path / "v1").glob("nvrtc-*.json")
    monkeypatch.setattr(nvrtc, "build_id", lambda: pytest.fail("asked NVRTC again"))
    assert re_build(tmp_path) == json.loads(note.read_text())["build"]
    monkeypatch.setattr(nvrtc, "build_id", lambda: "CL-0 V0.0.0")
    note.write_text("{broken")
    assert re_build(tmp_path) == "CL-0 V0.0.0"
    note.write_text(json.dumps({"library": "another", "build": "CL-9 V9.9.9"}))
    assert re_build(tmp_path) == "CL-0 V0.0.0"


def re_build(directory: Path) -> str:
    return Cache(directory).compiler_build()
