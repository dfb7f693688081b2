"""The lock's form: two lines for each variant, so that a review sees a change of code in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import ssmgen
from ssmgen.compile.nvrtc import Resources
from ssmgen.variants.lock import LOCK, Lock, Locked, LockError, text_of

COMMITTED = Path(ssmgen.__file__).parents[1] / "generated" / LOCK
COMPILERS = {"12": "CL-1 V12.9.1", "13": "CL-2 V13.5.1"}


def locked(registers: int, **more: bool) -> Locked:
    return Locked("slot_copy:slot_bytes=4096", "0" * 64, dict.fromkeys(COMPILERS, Resources(registers, 16, 0, 0, 8)), **more)


LOCKED = Lock(COMPILERS, {"sm_80/a.cu": locked(32), "sm_90a/b.cu": locked(40, shown=True)})


def test_a_variant_is_two_lines():
    numbers = '{"12": {"registers": 40, "shared": 16, "stack": 8}, "13": {"registers": 40, "shared": 16, "stack": 8}}'
    assert str(LOCKED).splitlines()[-5:] == [
        '   "spec": "slot_copy:slot_bytes=4096"},',
        f'  "sm_90a/b.cu": {{"resources": {numbers}, "shown": true, "source_sha256": "{"0" * 64}",',
        '   "spec": "slot_copy:slot_bytes=4096"}',
        " }",
        "}",
    ]


def test_a_change_of_code_changes_one_line():
    before, row = str(LOCKED).splitlines(), LOCKED.variants["sm_80/a.cu"]
    other = replace(row, source_sha256="1" * 64, resources=row.resources | {"12": Resources(33, 0, 0, 0, 0)})
    after = str(replace(LOCKED, variants={**LOCKED.variants, "sm_80/a.cu": other})).splitlines()
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


def test_what_is_written_is_read(tmp_path):
    (tmp_path / LOCK).write_text(str(LOCKED))
    assert Lock.read(tmp_path / LOCK) == LOCKED


def test_a_default_is_left_out(tmp_path):
    """`ssmgen generate --check` compares the text, too."""
    value = json.loads(str(LOCKED))
    value["variants"]["sm_80/a.cu"]["shown"] = False
    (tmp_path / LOCK).write_text(text_of(value))
    assert str(Lock.read(tmp_path / LOCK)) == str(LOCKED) != text_of(value)


def test_the_committed_lock_has_this_form():
    text = COMMITTED.read_text()
    lock, lines = Lock.read(COMMITTED), text.splitlines()
    assert str(lock) == text and len(lock.variants) > 900
    assert len(lines) == 2 * len(lock.variants) + len(lock.compilers) + 6
    assert all(len(line) < 400 for line in lines if ".cu" in line) and max(map(len, lines)) < 1000


@pytest.mark.parametrize("more", [{"spill_loads": 0}, {"spill_stores": 8}])
def test_spills_have_no_place(more, tmp_path):
    value = json.loads(str(LOCKED))
    value["variants"]["sm_80/a.cu"]["resources"]["12"] |= more
    (tmp_path / LOCK).write_text(json.dumps(value))
    with pytest.raises(LockError, match=r"'spill_.*' is unknown; expected one of registers, shared, stack"):
        Lock.read(tmp_path / LOCK)
