"""Writers that the cache trusts, and its directories: umasks, owners, links, devices."""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_attacks import ARCH, NOBODY, cubin_of, entry, got, in_child, public_directory, spec, use_fake_compiler

from ssmgen.cache.layer import Layer
from ssmgen.cache.store import Cache
from ssmgen.cache.upkeep import collect_garbage, verify
from ssmgen.errors import SsmgenError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away and become somebody else")


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as path:
        yield path


def filled(root: Path, number: int = 1) -> Path:
    """The file of the one kernel in a cache."""
    in_child(got(root, number))
    (path,) = Layer(root).files()
    return path


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in [root, *root.rglob("*")] if path.is_dir()}


# Modes.


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o277, 0o777], ids=oct)
@pytest.mark.parametrize("uid", [None, pytest.param(NOBODY, marks=as_root)], ids=["self", "nobody"])
def test_every_new_directory_is_private_and_believed_again_whatever_the_umask(public, umask, uid):
    public.chmod(0o777 if uid else 0o711)
    top = public / "deep"
    root = top / "er" / "cache"
    assert in_child(got(root), uid, umask) == (False, True, [])
    assert modes(top) == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()} == {0o600}
    assert in_child(got(root), uid, umask) == (True, True, [])


def test_threads_see_no_other_umask(tmp_path):
    """Modes do not come from a umask that is changed for a moment: other threads make files during that moment."""
    from concurrent.futures import ThreadPoolExecutor

    def work() -> set[int]:
        os.umask(0o027)
        with ThreadPoolExecutor(4) as pool:
            written = [pool.submit(Layer(tmp_path / str(n)).write, entry(n)) for n in range(8)]
            seen = set()
            while not all(job.done() for job in written):
                (tmp_path / "other").write_text("")
                seen.add(stat.S_IMODE((tmp_path / "other").stat().st_mode))
                (tmp_path / "other").unlink()
            for job in written:
                job.result()
        return seen

    assert in_child(work) <= {0o640}


# Owners.


def test_root_that_appears_after_the_first_look_is_looked_at(tmp_path):
    filled(tmp_path / "theirs")

    def work() -> tuple[bool, list[str]]:
        use_fake_compiler()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache = Cache(tmp_path / "cache")
            (tmp_path / "theirs").rename(tmp_path / "cache")
            (tmp_path / "cache").chmod(0o777)
            _, hit = cache.get(spec(), ARCH)
        return hit, [str(w.message) for w in told]

    hit, (told,) = in_child(work)
    assert not hit and told.endswith(f"{tmp_path / 'cache'} is writable by everyone")


@pytest.mark.parametrize("level", [0, 1, 2, 3], ids=["root", "version", "arch", "digits"])
@pytest.mark.parametrize("how", ["writable by everyone", pytest.param(f"belongs to user {NOBODY}", marks=as_root)])
def test_directory_that_others_can_write_to_is_neither_read_nor_written_and_said_once(tmp_path, level, how):
    path = filled(tmp_path / "cache")
    place = [tmp_path / "cache", *reversed(path.parents[:3])][level]
    place.chmod(0o777) if "everyone" in how else os.chown(place, NOBODY, NOBODY)
    before = path.stat().st_ino
    hit, right, (told,) = in_child(got(tmp_path / "cache"))
    assert not hit and right and told == f"ssmgen keeps compiled kernels in memory only: {place} {'is ' * ('everyone' in how)}{how}"
    assert path.stat().st_ino == before, "nothing was written"
    assert str(place) in [str(where) for where, _ in verify(Layer(tmp_path / "cache"))]


@pytest.mark.parametrize("how", ["mode", pytest.param("owner", marks=as_root)])
def test_entry_that_others_can_write_is_replaced(tmp_path, how):
    path = filled(tmp_path)
    path.chmod(0o666) if how == "mode" else os.chown(path, NOBODY, NOBODY)
    assert [where for where, _ in verify(Layer(tmp_path))] == [path]
    assert in_child(got(tmp_path)) == (False, True, [])
    assert path.stat().st_uid == os.geteuid() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert in_child(got(tmp_path)) == (True, True, [])


@as_root
def test_layer_of_root_serves_others(public):
    """A wheel, or the file system of a container's image."""
    filled(public / "layer")
    for path in [public / "layer", *(public / "layer").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert in_child(got(None, layers=(public / "layer",)), NOBODY)[:2] == (True, True)


@as_root
def test_layer_that_may_not_be_read_says_so(public):
    path = filled(public / "layer")
    for directory in [public / "layer", *(public / "layer").rglob("*")]:
        directory.chmod(0o755 if directory.is_dir() else 0o600)
    hit, right, told = in_child(got(None, layers=(public / "layer",)), NOBODY)
    assert not hit and right and f"ssmgen ignores the cache layer {public / 'layer'}: {path} cannot be read: Permission denied" in told


# Links.


def test_root_may_be_a_link_that_the_user_made(tmp_path):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    assert in_child(got(tmp_path / "cache")) == (False, True, [])
    assert in_child(got(tmp_path / "disk")) == (True, True, [])
    assert not verify(Layer(tmp_path / "cache"))
    assert collect_garbage(Layer(tmp_path / "cache"), 0)[0] == 1


@pytest.mark.parametrize("level", [1, 2, 3], ids=["version", "arch", "digits"])
def test_linked_directory_is_not_followed_out_of_the_cache(tmp_path, level):
    path = filled(tmp_path / "cache")
    outside = tmp_path / "outside"
    place = [tmp_path / "cache", *reversed(path.parents[:3])][level]
    place.rename(outside)
    place.symlink_to(outside)
    kept = sorted(outside.rglob("*"))
    for old in kept:
        os.utime(old, (1, 1))
    (left := next(p for p in kept if p.is_file()).parent / ".tmp-dead").write_bytes(b"")
    os.utime(left, (1, 1))
    hit, right, (told,) = in_child(got(tmp_path / "cache"))
    assert not hit and right and f"{place} is a symbolic link" in told
    assert [where for where, _ in verify(Layer(tmp_path / "cache"))] == [place]
    assert collect_garbage(Layer(tmp_path / "cache"), 0) == (0, 0)
    assert sorted(outside.rglob("*")) == sorted([*kept, left])


def test_linked_entry_is_a_miss_and_clearing_removes_the_link_only(tmp_path):
    path = filled(tmp_path / "cache")
    outside = tmp_path / path.name
    path.rename(outside)
    path.symlink_to(outside)
    assert [where for where, _ in verify(Layer(tmp_path / "cache"))] == [path]
    assert collect_garbage(Layer(tmp_path / "cache"), 1e9)[0] == 1
    assert outside.exists() and not path.is_symlink()
    path.symlink_to(outside)
    assert in_child(got(tmp_path / "cache")) == (False, True, [])
    assert not path.is_symlink()


# Paths that are not files.


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(20 * 2**30)


def socket(path: Path) -> None:
    import socket as sockets

    here = os.getcwd()
    os.chdir(path.parent)  # its name may have no more than 107 bytes
    try:
        sockets.socket(sockets.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


ODD = [fifo, sparse, socket, zeros, directory]


@pytest.mark.parametrize("make", ODD)
def test_odd_file_in_the_place_of_an_entry(tmp_path, make):
    """A miss at once, listed, and removed or replaced."""
    path = filled(tmp_path)
    path.unlink()
    make(path)
    hit, right, told = in_child(got(tmp_path))
    assert not hit and right and len(told) == (make is directory), "a directory is not replaced"
    if make is not directory:
        assert in_child(got(tmp_path)) == (True, True, [])
        path.unlink()
        make(path)
    assert in_child(lambda: [where for where, _ in verify(Layer(tmp_path))]) == [path]
    assert in_child(lambda: list(Layer(tmp_path).entries())) == []
    assert in_child(lambda: collect_garbage(Layer(tmp_path), 1e12)[0]) == 1
    assert not os.path.lexists(path)


@pytest.mark.parametrize("make", ODD)
def test_odd_file_in_the_place_of_the_note_on_the_compiler(tmp_path, make):
    filled(tmp_path)
    (note,) = (tmp_path / "v1").glob("nvrtc-*.json")
    note.unlink()
    make(note)
    hit, right, told = in_child(got(tmp_path))
    assert hit and right and len(told) == (make is directory)


@as_root
def test_device_in_the_place_of_an_entry(tmp_path):
    path = filled(tmp_path)
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    assert in_child(got(tmp_path)) == (False, True, [])


# Files that cannot be removed or written.


def test_what_stays_is_listed_after_the_rest_is_removed(tmp_path):
    path = filled(tmp_path, 1)
    in_child(got(tmp_path, 2))
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("kept")
    with pytest.raises(
        SsmgenError, match=rf"(?s)1 files that could not be removed \(1 were\).*{path.name} cannot be removed: Directory not empty"
    ):
        collect_garbage(Layer(tmp_path), 0)
    assert list(Layer(tmp_path).files()) == [path] and (path / "mine").exists()


def test_failed_write_names_the_file_and_the_reason(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    layer, one = Layer(tmp_path), entry(1)
    with pytest.raises(SsmgenError) as e:
        layer.write(one)
    assert str(e.value) == f"{layer.path(one.key, ARCH)} cannot be written: No space left on device"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_entry_too_large_to_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[Layer.__module__], "MAX_BYTES", 1000)
    with pytest.raises(SsmgenError, match="bytes; expected at most"):
        Layer(tmp_path).write(entry(1))
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_writers_go(tmp_path):
    """The next write to their directory removes them, and so does collecting garbage. Fresh ones may belong to a live writer."""
    path = filled(tmp_path)
    old = [path.parent / ".tmp-1", tmp_path / "v1" / ".tmp-2", path.parent.parent / ".tmp-3"]
    for leftover in old:
        leftover.write_bytes(b"x")
        os.utime(leftover, (1, 1))
    fresh = path.parent / ".tmp-4"
    fresh.write_bytes(b"x")
    one = Layer(tmp_path).load(path)
    Layer(tmp_path).write(one)
    assert [leftover.exists() for leftover in old] == [False, True, True]
    assert collect_garbage(Layer(tmp_path), 1e9) == (2, 0)
    assert fresh.exists() and one.cubin == cubin_of(one.source)
    assert Layer(tmp_path).sweep(-1) == 1 and not fresh.exists()
