"""`ssmgen generate` and its lock: every alteration, addition and removal is found, and no file of others is lost."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from mangling import mangled

from ssmgen.cache import files
from ssmgen.cli import main
from ssmgen.compile import nvrtc
from ssmgen.compile.nvrtc import Resources
from ssmgen.errors import DriftError, SsmgenError
from ssmgen.variants import generate
from ssmgen.variants.generate import ForeignFilesError
from ssmgen.variants.lock import LOCK, Lock, LockError, text_of

OTHER = "CL-1 V99.9.9"  # a compiler that is not at hand


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Four variants, of which two are committed as text, and a compiler that takes no time."""
    stems = dict.fromkeys(generate.ARCHS, "ssu_h1p") | {"sm_80": "combine_"}  # neither has all lines of the other
    pairs = generate.default_variants()
    chosen = [next(p for p in pairs if p[0].stem.startswith(stem) and str(p[1]) == arch) for arch, stem in stems.items()]
    monkeypatch.setattr(generate, "default_variants", lambda: chosen)
    monkeypatch.setattr(generate, "_resources", lambda source, cache: Resources(len(source.text) % 99, 0, 0, 0, 0))
    return chosen


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder as two compilers left it."""
    folder = tmp_path / "generated"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "build_id", lambda: OTHER)
        generate.write(folder)
    generate.write(folder)
    assert generate.check(folder) == (4, "")
    return folder


def texts(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.cu"))


def snapshot(root: Path) -> dict[str, bytes | str]:
    paths = sorted(root.rglob("*"))
    return {str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "" for p in paths}


def command(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["generate", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output


# Errors that check finds.


def evil(root: Path) -> None:
    (root / "sm_90a/evil.cu").write_text("// evil\n")


def folder(root: Path) -> None:
    (root / "sm_999/deep/deeper").mkdir(parents=True)
    (root / "sm_999/deep/deeper/x.h").write_text("")


def hidden(root: Path) -> None:
    (root / ".evil").write_text("")


def link_to_a_folder(root: Path) -> None:
    (root / "sm_75").symlink_to(root / "sm_90a")


def dangling_link(root: Path) -> None:
    (root / "sm_90a/gone.cu").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (evil, "sm_90a/evil.cu"),
        (folder, "sm_999/deep/deeper/x.h"),
        (hidden, ".evil"),
        (link_to_a_folder, "sm_75"),
        (dangling_link, "gone.cu"),
    ],
)
def test_what_is_not_generated_is_named(add, named, root):
    add(root)
    code, said = command("--check", "--dir", str(root))
    assert code == 3 and f"{named} is not a generated file" in said, said


def test_a_text_that_is_missing_changed_or_no_file(root):
    first, second = texts(root)
    text = first.read_bytes()
    for alter, words in [
        (lambda: first.unlink(), f"{first.name} is missing"),
        (lambda: first.write_bytes(text + b"\n"), f"{first.name} differs"),
        (lambda: first.write_bytes(b"\xff" + text), f"{first.name} differs"),
        (lambda: (first.unlink(), first.symlink_to(second)), "is not a regular file"),
        (lambda: (first.unlink(), os.mkfifo(first)), "is not a regular file"),
        (lambda: (first.unlink(), first.mkdir()), "is missing"),
    ]:
        alter()
        with pytest.raises(DriftError) as e:
            generate.check(root)
        assert any(words in problem for problem in e.value.problems), e.value
        first.rmdir() if first.is_dir() else first.unlink(missing_ok=True)
        first.write_bytes(text)
    assert generate.check(root) == (4, "")


def test_a_name_is_shown_without_what_a_terminal_would_act_on(root):
    (root / "sm_90a/\x1b[2J\u202eevil.cu").write_text("")
    assert "sm_90a/[2Jevil.cu is not a generated file" in command("--check", "--dir", str(root))[1]
    assert "\x1b" not in command("--dir", str(root))[1]


def leaves(value, path=()):
    """The path of every value of a lock, and of every object."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))


ALTERED = {
    "another": lambda old: old + 1 if isinstance(old, int) else old + "0" if isinstance(old, str) else {},
    "evil": lambda old: "EVIL",
    "none": lambda old: None,
    "list": lambda old: [old],
    "negative": lambda old: -1,
    "wide": lambda old: 10**40,
    "nan": lambda old: float("nan"),
    "deep": lambda old: {"a": {"b": old}},
    "flag": lambda old: True,
}


def altered(lock: dict, path: tuple[str, ...], how: str) -> str:
    """The lock's text with the value at a path altered."""
    copy = json.loads(json.dumps(lock))
    *above, last = path
    place = copy
    for name in above:
        place = place[name]
    if how == "removed":
        del place[last]
    elif how == "renamed":
        place[last + "x"] = place.pop(last)
    elif how == "twice":
        place[last + "x"] = place[last]
    else:
        place[last] = ALTERED[how](place[last])
    return text_of(copy)


def unnoticed(root: Path) -> tuple[int, list[str]]:
    """Alters each value of a lock in each way: (number of changes, the changes that check did not find)."""
    text = (root / LOCK).read_text()
    lock, count, passed = json.loads(text), 0, []
    for path in leaves(lock):
        for how in (*ALTERED, "removed", "renamed", "twice"):
            if (changed := altered(lock, path, how)) == text:
                continue
            count += 1
            (root / LOCK).write_text(changed)
            try:
                generate.check(root)
            except (DriftError, LockError):
                continue
            passed.append(f"{'/'.join(path)}: {how}")
    (root / LOCK).write_text(text)
    return count, passed


def test_every_value_of_the_lock_is_compared(root):
    """The exceptions are values that only the other compiler can produce: its build, and registers, shared memory and stack under it."""
    count, passed = unnoticed(root)
    assert count > 600
    others = {f"{name}: {how}" for name in ("registers", "shared", "stack") for how in ("another", "wide")}
    assert {line.rpartition("99/")[2] for line in passed} == others | {"compilers/99: another"}
    assert all("/resources/99/" in line or line.startswith("compilers/99") for line in passed)


def one_line(lock: dict) -> str:
    return json.dumps(lock)


def name_twice(lock: dict) -> str:
    """A name that stands there twice: some readers believe the first, others the last."""
    return '{\n "variants": {},' + json.dumps(lock, indent=1, sort_keys=True).removeprefix("{")


@pytest.mark.parametrize("form", [one_line, name_twice])
def test_a_lock_in_another_form_is_found(form, root):
    (root / LOCK).write_text(form(json.loads((root / LOCK).read_text())) + "\n")
    assert "is not in the form that ssmgen writes" in command("--check", "--dir", str(root))[1]


MALFORMED = {
    "empty": b"",
    "cut": b'{"compilers": {',
    "no UTF-8": b'{"compilers": "\xff\xfe"}',
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "list": b"[]",
    "null": b"null",
    "number": b"1" * 5000,
    "no keys": b"{}",
    "old": b'{"compiler": "CL-1 V13.0.0", "variants": {}}',
    "rows": b'{"compilers": {}, "variants": {"sm_90a/x.cu": 5}}',
    "path": b'{"compilers": {}, "variants": {"../../etc/x.cu": {}}}',
    "surrogate": b'{"compilers": {"12": "\\ud800"}, "variants": {}}',
    "gzip bomb": b"\x1f\x8b\x08\x00",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("option", [["--check"], []], ids=["check", "write"])
def test_a_malformed_lock_is_one_clear_error(data, option, root):
    (root / LOCK).write_bytes(data)
    before = snapshot(root)
    code, said = command(*option, "--dir", str(root))
    assert code == 1 and said.startswith(f"LockError: {root / LOCK} is not a lock of generated files:\n  - "), said
    assert "run: ssmgen generate" in said and len(said) < 2000 and snapshot(root) == before


@pytest.mark.parametrize("option", [["--check"], []], ids=["check", "write"])
def test_a_lock_that_is_no_file(option, root, tmp_path):
    lock = root / LOCK
    lock.unlink()
    lock.mkdir()
    assert command(*option, "--dir", str(root))[1].startswith("LockError: ")
    lock.rmdir()
    os.mkfifo(lock)
    assert "it is not a regular file" in command(*option, "--dir", str(root))[1]
    lock.unlink()
    with open(lock, "wb") as file:
        file.truncate(files.MAX_BYTES + 1)
    assert "more than 32 MiB" in command(*option, "--dir", str(root))[1]


def test_no_lock_is_drift(root):
    (root / LOCK).unlink()
    code, said = command("--check", "--dir", str(root))
    assert code == 3 and f"{LOCK} is missing" in said


# Compilers.


def test_what_another_compiler_said_stays_as_long_as_the_source(root, few, monkeypatch):
    before = Lock.read(root / LOCK)
    (mine,) = set(before.compilers) - {"99"}
    assert set(before.compilers.values()) == {OTHER, nvrtc.build_id()}
    render = generate.render
    monkeypatch.setattr(generate, "render", lambda spec, arch: render(spec, arch) + ("// more\n" if (spec, arch) == few[1] else ""))
    count, note = generate.write(root)
    after = Lock.read(root / LOCK)
    changed = generate.path_of(*few[1])
    for name, row in after.variants.items():
        assert set(row.resources) == ({mine} if name == changed else {mine, "99"}), name
        assert name == changed or row.resources["99"] == before.variants[name].resources["99"]
    assert count == 4 and note == f"1 have no resources under {OTHER}. Run `ssmgen generate` with that NVRTC too."
    with pytest.raises(DriftError) as e:
        generate.check(root)
    assert e.value.problems == [f"{LOCK}: {note}"]
    monkeypatch.setattr(nvrtc, "build_id", lambda: OTHER)
    assert generate.write(root) == (4, "") and generate.check(root) == (4, "")


def test_a_later_build_of_the_same_major_takes_the_others_place(root, monkeypatch):
    monkeypatch.setattr(nvrtc, "build_id", lambda: "CL-2 V99.10.0")
    code, said = command("--check", "--dir", str(root))
    assert code == 3 and "resources were not compared: the lock is of" in said and "this compiler is CL-2 V99.10.0" in said
    code, said = command("--check", "--any-compiler", "--dir", str(root))
    assert code == 0 and "4 variants are up to date; resources were not compared" in said
    evil(root)
    assert command("--check", "--any-compiler", "--dir", str(root))[0] == 3
    (root / "sm_90a/evil.cu").unlink()
    generate.write(root)
    assert Lock.read(root / LOCK).compilers["99"] == "CL-2 V99.10.0" and generate.check(root) == (4, "")


# Files that write leaves unchanged.


@pytest.mark.parametrize("where", ["mine.cu", "sm_90a/mine.cu", "sm_90a/deep/mine.cu", "src/kernels/mine.cu"])
@pytest.mark.parametrize("locked", [True, False])
def test_files_of_others_stay(where, locked, tmp_path, root):
    folder = root if locked else tmp_path / "new"
    mine = folder / where
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("// selective_state_update for sm_90a, says mine\n")
    before = snapshot(folder)
    code, said = command("--dir", str(folder))
    assert code == 1 and said.startswith("ForeignFilesError: ") and f"{where} is not in {LOCK}" in said and "Nothing was changed" in said
    assert snapshot(folder) == before


def test_a_file_under_the_name_of_a_variant_is_not_overwritten(root, tmp_path):
    """It is overwritten only if its text says that it was generated and the lock names it, or if it equals the new text."""
    first, second = texts(root)
    name, ours = first.relative_to(root), first.read_bytes()
    first.write_text("// my own\n")
    with pytest.raises(ForeignFilesError, match=f"{name} does not begin with"):
        generate.write(root)
    assert first.read_text() == "// my own\n"
    first.write_bytes(ours.replace(b"kIlp", b"kOld"))  # as a merge may leave it
    generate.write(root)
    assert first.read_bytes() == ours
    (root / LOCK).unlink()
    generate.write(root)
    (root / LOCK).unlink()
    first.write_bytes(ours + b"\n")
    with pytest.raises(ForeignFilesError, match=f"{name} is not in {LOCK}") as e:
        generate.write(root)
    assert len(e.value.problems) == 1


def test_links_are_not_written_through(root, tmp_path):
    outside = tmp_path / "outside"
    (root / "sm_80").rename(outside)
    (root / "sm_80").symlink_to(outside)
    before = snapshot(outside)
    with pytest.raises(ForeignFilesError, match="sm_80 is a link"):
        generate.write(root)
    (root / "sm_80").unlink()
    outside.rename(root / "sm_80")
    (first, *_) = texts(root)
    (tmp_path / "mine").write_bytes(first.read_bytes())
    first.unlink()
    first.symlink_to(tmp_path / "mine")
    with pytest.raises(ForeignFilesError, match="is a link"):
        generate.write(root)
    assert before and (tmp_path / "mine").is_file()


def test_what_is_no_variant_any_more_is_removed(root, few, monkeypatch):
    (root / "notes.md").write_text("mine")
    gone = generate.path_of(*few[1])
    monkeypatch.setattr(generate, "default_variants", lambda: [pair for pair in few if generate.path_of(*pair) != gone])
    generate.write(root)
    assert not (root / gone).exists() and (root / "notes.md").read_text() == "mine"
    with pytest.raises(DriftError) as e:
        generate.check(root)
    assert e.value.problems == ["notes.md is not a generated file"]


def test_folders_that_cannot_be_written(tmp_path):
    for where in ("/proc/x", "/dev/null/x", tmp_path / "file/x"):
        (tmp_path / "file").write_text("")
        code, said = command("--dir", str(where))
        assert code == 1 and said.startswith("FileError: ") and "cannot be read or written" in said, said
        assert command("--check", "--dir", str(where))[0] == 3


# Whatever bytes.


def ours(lock: bytes) -> dict:
    """The part of a lock that the present compiler can produce."""
    value = json.loads(lock)
    for told in (value["compilers"], *(row["resources"] for row in value["variants"].values())):
        del told["99"]
    return value


def test_a_mangled_lock_is_found_or_refused(root):
    lock = root / LOCK
    data, rng, count = lock.read_bytes(), random.Random(7), int(os.environ.get("ATTACKS", "300"))
    found = {"refused": 0, "drift": 0, "not ours to know": 0}
    for _ in range(count):
        lock.write_bytes(changed := mangled(data, rng))
        try:
            generate.check(root)
            assert ours(changed) == ours(data)
            found["not ours to know"] += 1
        except DriftError:
            found["drift"] += 1
        except SsmgenError:
            found["refused"] += 1
    print(f"{count} mangled locks: {found}")
    assert found["refused"] > count / 2 and found["drift"] > 0 and found["not ours to know"] < count / 10
