"""The cubin cache: content-addressed, self-verifying, and never needed for correctness. Faults are made in real processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ssmgen
from ssmgen.cache import process_lock
from ssmgen.cache.entry import Entry, cache_key
from ssmgen.cache.layer import Layer
from ssmgen.cache.store import Cache
from ssmgen.cache.upkeep import verify
from ssmgen.compile import nvrtc
from ssmgen.compile.render import render
from ssmgen.errors import NotBuiltError
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch

ARCH = Arch.parse("sm_90a")
ROOT = Path(ssmgen.__file__).parent.parent
ROOT_USER = os.getuid() == 0


def spec(threads: int = 128) -> SlotCopySpec:
    return SlotCopySpec(slot_bytes=16 * 1024, threads=threads)


def only_file(directory: Path) -> Path:
    (path,) = Layer(directory).files()
    return path


def run(program: str, directory: Path | None, *, wait: bool = True, **variables: str):
    """A fresh interpreter with this cache directory."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SSMGEN_")} | {"PYTHONPATH": str(ROOT)} | variables
    if directory is not None:
        env["SSMGEN_CACHE_DIR"] = str(directory)
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return (*process.communicate(timeout=120), process.returncode) if wait else process


GET = """
from ssmgen.cache.store import shared_cache
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch
import hashlib
entry, hit = shared_cache().get(SlotCopySpec(slot_bytes=16 * 1024, threads=128), Arch.parse("sm_90a"))
print(hit, hashlib.sha256(entry.cubin).hexdigest())
"""


@pytest.fixture(scope="module")
def sound() -> bytes:
    """The cubin that every test must end up with."""
    return nvrtc.compile_cubin(render(spec(), ARCH), ARCH, str(spec())).cubin


def digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def test_second_process_finds_what_the_first_compiled(tmp_path, sound):
    assert run(GET, tmp_path)[0].split() == ["False", digest(sound)]
    assert run(GET, tmp_path)[0].split() == ["True", digest(sound)]


def test_warm_hit_takes_less_than_a_millisecond(tmp_path):
    """Render, hash, read and verify, without the memory layer."""
    Cache(tmp_path).get(spec(), ARCH)
    times = []
    for _ in range(60):
        cache = Cache(tmp_path)
        cache.compiler_build()  # once per process
        start = time.perf_counter()
        _, hit = cache.get(spec(), ARCH)
        times.append(time.perf_counter() - start)
        assert hit
    assert min(times) < 1e-3


def test_entry_round_trip(tmp_path):
    entry, _ = Cache(tmp_path).get(spec(), ARCH)
    assert Entry.from_bytes(entry.to_bytes()) == entry
    assert entry.symbol == spec().name and entry.arch == "sm_90a" and entry.compiler == nvrtc.build_id()


def test_entries_hold_json_and_code_only(tmp_path):
    """No pickle: the header is JSON, followed by text and ELF."""
    Cache(tmp_path).get(spec(), ARCH)
    data = only_file(tmp_path).read_bytes()
    length = int.from_bytes(data[8:12], "big")
    header = json.loads(data[12 : 12 + length])
    source = data[12 + length : 12 + length + header["source_bytes"]]
    assert source.startswith(b"// slot_copy") and data[12 + length + header["source_bytes"] :][:4] == b"\x7fELF"


# Keys.


def test_key_depends_on_every_input_and_on_nothing_else():
    base = ("source", ("--a", "--b"), ARCH, "CL-1 V12.9.86")
    key = cache_key(*base)
    assert key == cache_key(*base) and len(key) == 64
    others = [
        ("source ", *base[1:]),
        (base[0], ("--a",), *base[2:]),
        (base[0], ("--b", "--a"), *base[2:]),
        (base[0], ("--a--b",), *base[2:]),
        (*base[:2], Arch.parse("sm_90"), base[3]),
        (*base[:3], "CL-1 V12.9.87"),
    ]
    assert len({cache_key(*o) for o in others} | {key}) == len(others) + 1


# Damage.


def damaged_is_a_miss_and_is_replaced(tmp_path, sound, damage):
    entry, _ = Cache(tmp_path).get(spec(), ARCH)
    path = only_file(tmp_path)
    damage(path)
    again, hit = Cache(tmp_path).get(spec(), ARCH)
    assert not hit and again.cubin == sound
    assert Cache(tmp_path).get(spec(), ARCH)[1], "the damaged entry was replaced"


@pytest.mark.parametrize("keep", [0, 1, 8, 11, 100, 0.5, 0.99, -1])
def test_truncated(tmp_path, sound, keep):
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])

    damaged_is_a_miss_and_is_replaced(tmp_path, sound, damage)


def test_any_flipped_bit_is_found(tmp_path):
    entry, _ = Cache(tmp_path).get(spec(), ARCH)
    data = only_file(tmp_path).read_bytes()
    for position in random.Random(0).sample(range(len(data)), 300):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError):
            Entry.from_bytes(bytes(flipped))


def test_flipped_bit(tmp_path, sound):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)

    damaged_is_a_miss_and_is_replaced(tmp_path, sound, damage)


def test_another_entry_under_this_name(tmp_path, sound):
    def damage(path):
        other, _ = Cache(tmp_path / "other").get(spec(64), ARCH)
        path.write_bytes(other.to_bytes())

    damaged_is_a_miss_and_is_replaced(tmp_path, sound, damage)


def test_sealed_entry_of_another_source_is_not_used(tmp_path, sound):
    """A whole entry with a right digest, whose header claims this key over other code."""
    from dataclasses import replace

    def damage(path):
        entry = Entry.from_bytes(path.read_bytes())
        path.write_bytes(replace(entry, source=entry.source + "// other", cubin=b"\x7fELF other").to_bytes())

    damaged_is_a_miss_and_is_replaced(tmp_path, sound, damage)


# Processes.


@pytest.mark.processes
def test_eight_processes_race_on_an_empty_cache(tmp_path, sound):
    processes = [run(GET, tmp_path, wait=False) for _ in range(8)]
    outputs = [p.communicate(timeout=120) for p in processes]
    assert all(p.returncode == 0 for p in processes), outputs
    assert {out.split()[1] for out, _ in outputs} == {digest(sound)}
    assert len(list(Layer(tmp_path).files())) == 1 and not verify(Layer(tmp_path))
    assert not list(tmp_path.rglob(".tmp-*"))


KILLED = """
from ssmgen.cache.store import shared_cache
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch
print("go", flush=True)
n = 0
while True:
    n += 1
    shared_cache().get(SlotCopySpec(slot_bytes=16 * 32 * n, threads=32), Arch.parse("sm_90a"))
"""


@pytest.mark.processes
def test_killed_at_any_instant(tmp_path):
    """Processes that only fill the cache are killed at random. The remaining files are whole, and the cache still works."""
    rng = random.Random(1)
    for i in range(60):
        process = run(KILLED, tmp_path, wait=False)
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.5 + i // 6))  # a busy machine takes longer to finish one entry
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
        if i >= 5 and list(Layer(tmp_path).files()):
            break
    assert list(Layer(tmp_path).files()) and not verify(Layer(tmp_path))
    assert run(GET, tmp_path)[2] == 0


def test_lock_holder_that_hangs_is_not_waited_for_forever(tmp_path, monkeypatch, sound):
    holder = run(
        "import time\nfrom ssmgen.cache.store import shared_cache\nfrom ssmgen.cache.process_lock import process_lock\n"
        "from ssmgen.families.slot_copy.spec import SlotCopySpec\nfrom ssmgen.spec.kernel import Arch\n"
        "key, _ = shared_cache()._key(SlotCopySpec(slot_bytes=16*1024, threads=128), Arch.parse('sm_90a'))\n"
        "with process_lock(key):\n    print('held', flush=True)\n    time.sleep(60)\n",
        tmp_path,
        wait=False,
    )
    assert holder.stdout.readline() == "held\n"
    monkeypatch.setattr(process_lock, "LOCK_SECONDS", 0.2)
    start = time.monotonic()
    assert Cache(tmp_path).get(spec(), ARCH)[0].cubin == sound
    assert time.monotonic() - start < 20
    holder.kill()
    holder.communicate()


def test_without_a_lock_directory(tmp_path, monkeypatch, sound):
    monkeypatch.setattr(process_lock, "lock_dir", lambda: None)
    assert Cache(tmp_path).get(spec(), ARCH)[0].cubin == sound


def test_threads_compile_once(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    compiled = []
    real = nvrtc.compile_cubin
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *a: compiled.append(1) or real(*a))
    cache = Cache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda _: cache.get(spec(), ARCH)[0], range(16)))
    assert len(compiled) == 1 and all(e is entries[0] for e in entries)


# Places that cannot be written.


def test_full_disk(tmp_path, monkeypatch, sound):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        cache = Cache(tmp_path)
        assert cache.get(spec(), ARCH)[0].cubin == sound
    assert not list(tmp_path.rglob("*.ssmgen")) and not list((tmp_path / "v1" / "sm_90a").rglob(".tmp-*"))
    assert cache.get(spec(), ARCH)[1], "kept in memory"


def test_full_disk_for_real(tmp_path, sound):
    """A file-size limit of 1 KiB: every write of an entry fails half way."""
    program = (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        + GET
    )
    out, err, code = run(program, tmp_path)
    assert code == 0 and out.split() == ["False", digest(sound)] and err.count("in memory only") == 1
    assert not list(tmp_path.rglob("*.ssmgen"))


@pytest.mark.parametrize("directory", ["/proc/ssmgen", "/dev/null/ssmgen"])
def test_directory_that_cannot_be_made(directory, sound):
    out, err, code = run(GET, Path(directory))
    assert code == 0 and out.split() == ["False", digest(sound)] and err.count("in memory only") == 1


@pytest.mark.skipif(ROOT_USER, reason="root may write anywhere")
def test_read_only_directory(tmp_path, sound):
    tmp_path.chmod(0o500)
    out, err, code = run(GET, tmp_path)
    tmp_path.chmod(0o700)
    assert code == 0 and out.split()[1] == digest(sound) and err.count("in memory only") == 1


@pytest.mark.parametrize("home", [None, "/"])
def test_no_home(home, sound):
    """A container's user may lack an entry in the password file, or have the home /."""
    program = "import pathlib\n" + ("def none(): raise RuntimeError('no home')\npathlib.Path.home = none\n" if home is None else "") + GET
    variables = {"HOME": home} if home else {}
    env_drop = {"XDG_CACHE_HOME": ""}
    out, err, code = run(program, None, **variables, **env_drop)
    assert code == 0 and out.split() == ["False", digest(sound)] and err.count("in memory only") == 1


# Layers.


def test_read_only_layer_comes_first_and_is_never_written(tmp_path, sound):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    Cache(shipped).get(spec(), ARCH)
    before = {p: p.stat().st_mtime_ns for p in shipped.rglob("*")}
    cache = Cache(own, [shipped])
    assert cache.get(spec(), ARCH)[1] and not list(Layer(own).files())
    cache.get(spec(64), ARCH)
    assert len(list(Layer(own).files())) == 1
    assert {p: p.stat().st_mtime_ns for p in shipped.rglob("*")} == before


def test_layer_that_is_missing_or_open_to_everyone_is_ignored_with_a_warning(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.warns(UserWarning, match="ignores the cache layer"):
        assert Cache(tmp_path / "own", [tmp_path / "missing"]).read_only == []
    with pytest.warns(UserWarning, match="writable by everyone"):
        assert Cache(tmp_path / "own", [open_to_all]).read_only == []


def test_deny_prints_the_build_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SSMGEN_COMPILE", "deny")
    with pytest.raises(NotBuiltError) as e:
        Cache(tmp_path).get(spec(), ARCH)
    assert f"ssmgen build --spec '{spec()}' --arch sm_90a" in str(e.value)
    monkeypatch.setenv("SSMGEN_COMPILE", "allow")
    Cache(tmp_path).get(spec(), ARCH)
    monkeypatch.setenv("SSMGEN_COMPILE", "deny")
    assert Cache(tmp_path).get(spec(), ARCH)[1]
    monkeypatch.setenv("SSMGEN_COMPILE", "maybe")
    with pytest.raises(ValueError, match="is unknown; expected allow or deny"):
        Cache(tmp_path / "other").get(spec(), ARCH)
