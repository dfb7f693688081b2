"""Entries whose header is odd, under a digest that is right: a miss, listed as damaged, and removed like any other."""

from __future__ import annotations

import json
import os

import pytest
from cache_attacks import ARCH, ODD, entry, got, header_of, in_child, resealed
from click.testing import CliRunner

from ssmgen.cache.layer import Layer
from ssmgen.cache.upkeep import collect_garbage, verify
from ssmgen.cli import main

HEADERS = [b"5", b"null", b"[]", b'"x"', b"{}", b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 20_000, b"{" + b" " * 2**17 + b"}"]
FIELDS = sorted(header_of(entry(1)))


def written(root, data: bytes, number: int = 1):
    """The file of an entry, with other bytes in it."""
    layer, one = Layer(root), entry(number)
    layer.write(one)
    path = layer.path(one.key, ARCH)
    path.write_bytes(data)
    return path


def is_damaged(root, path) -> None:
    layer = Layer(root)
    assert layer.read(path.stem, ARCH) is None
    assert list(layer.entries()) == []
    assert [where for where, _ in verify(layer)] == [path]
    assert collect_garbage(layer, 1e12)[0] == 1 and not path.exists()


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: repr(h[:8]))
def test_header_that_is_none(tmp_path, header):
    is_damaged(tmp_path, written(tmp_path, resealed(entry(1), header=header)))


@pytest.mark.parametrize("field", [*FIELDS, "more"])
def test_field_of_a_wrong_type(tmp_path, field):
    """A field accepts few of nineteen odd values: a number of the right size, or a text if it holds text."""
    believed = []
    for value in ODD:
        values = header_of(entry(1)) | {field: value}
        path = written(tmp_path, resealed(entry(1), header=json.dumps(values).encode()))
        if Layer(tmp_path).read(path.stem, ARCH) is None:
            is_damaged(tmp_path, path)
        else:
            believed.append(value)
    assert believed == {"seconds": [0, 5, 2**70, 1.5], "spec": ["x", "9" * 400], "symbol": ["x", "9" * 400]}.get(field, [])


@pytest.mark.parametrize("field", FIELDS)
def test_missing_field(tmp_path, field):
    values = header_of(entry(1))
    del values[field]
    is_damaged(tmp_path, written(tmp_path, resealed(entry(1), header=json.dumps(values).encode())))


@pytest.mark.parametrize("name", sorted(header_of(entry(1))["resources"]))
def test_resource_of_a_wrong_type(tmp_path, name):
    for value in ODD:
        values = header_of(entry(1))
        values["resources"][name] = value
        path = written(tmp_path, resealed(entry(1), header=json.dumps(values).encode()))
        if type(value) is not int or not 0 <= value < 2**20:
            is_damaged(tmp_path, path)


def test_source_that_is_not_text(tmp_path):
    is_damaged(tmp_path, written(tmp_path, resealed(entry(1), source=b"// \xff\xfe")))


def test_entry_under_another_key(tmp_path):
    is_damaged(tmp_path, written(tmp_path, entry(2).to_bytes()))


def test_entry_of_another_symbol_is_compiled_again(tmp_path):
    """The key is of the source alone: a kernel that the driver would not find in the cubin is not believed."""
    in_child(got(tmp_path))
    (path,) = Layer(tmp_path).files()
    one = Layer(tmp_path).load(path)
    path.write_bytes(resealed(one, header=json.dumps(header_of(one) | {"symbol": "another"}).encode()))
    assert in_child(got(tmp_path)) == (False, True, [])
    assert Layer(tmp_path).load(path) == one


@pytest.mark.parametrize("note", [b"5", b"[" * 50_000, b"\xff", b"{}"])
def test_note_on_the_compiler(tmp_path, note):
    in_child(got(tmp_path))
    (path,) = (tmp_path / "v1").glob("nvrtc-*.json")
    told = json.loads(path.read_text())
    path.write_bytes(note)
    assert in_child(got(tmp_path)) == (True, True, [])
    assert json.loads(path.read_text()) == told


@pytest.mark.parametrize("build", ["\ud800", "\x1b[2J", "", 5, None])
def test_note_with_an_odd_build(tmp_path, build):
    in_child(got(tmp_path))
    (path,) = (tmp_path / "v1").glob("nvrtc-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"build": build}))
    assert in_child(got(tmp_path)) == (True, True, [])


@pytest.fixture
def odd_cache(own_cache):
    """A cache of every kind of damage, and one whole entry."""
    Layer(own_cache).write(entry(0))
    for number, header in enumerate(HEADERS, 1):
        written(own_cache, resealed(entry(number), header=header), number)
    text = json.dumps(header_of(entry(50)) | {"symbol": "\x1b[2J", "seconds": "x"}).encode()
    written(own_cache, resealed(entry(50), header=text), 50)
    (own_cache / "v1" / "sm_90a" / "ab").mkdir(exist_ok=True)
    (own_cache / "v1" / "sm_90a" / "ab" / "\x1b[2J\udcff.ssmgen").write_bytes(b"x")
    return own_cache


@pytest.mark.parametrize(
    "command, code, says",
    [
        ("cache ls", 0, "k0"),
        ("cache ls --json", 0, '"name": "k0"'),
        ("cache path", 0, "cache"),
        ("cache verify", 1, f"{len(HEADERS) + 2} damaged"),
        ("cache gc", 0, f"removed {len(HEADERS) + 2} files"),
        ("cache clear", 0, f"removed {len(HEADERS) + 3} files"),
        ("list", 0, "k0"),
        ("show slot_copy:slot_bytes=16384,threads=128", 0, "slot_copy"),
        ("env", 0, "cache_layers"),
    ],
)
def test_commands(odd_cache, command, code, says):
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == code and says in done.output, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "\x1b" not in done.output


@pytest.mark.parametrize("size, code", [("nan", 2), ("-1", 2), ("x", 2), ("inf", 0), ("1e308", 0), ("1e400", 0), ("0.5", 0)])
def test_size_to_keep(odd_cache, size, code):
    done = CliRunner().invoke(main, ["cache", "gc", "--max-mib", size])
    assert done.exit_code == code and (done.exception is None or isinstance(done.exception, SystemExit)), done.output
    assert len(list(Layer(odd_cache).files())) == (1 if code == 0 else len(HEADERS) + 3)


def test_clearing_what_may_not_be_written_fails(own_cache):
    Layer(own_cache).write(entry(0))
    own_cache.chmod(0o777)
    with pytest.warns(UserWarning, match="writable by everyone"):
        done = CliRunner().invoke(main, ["cache", "clear"])
    assert done.exit_code == 1 and "has no directory that this user may write. Nothing was removed" in done.output
    assert os.listdir(own_cache)
