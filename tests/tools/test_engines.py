"""tools.engines: the signatures of a release, read from its files, against the recorded ones."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from engine_signatures import SIGNATURES, VERSIONS
from engine_stand_ins import write

from ssmgen.compat.shared.replacing import differences
from tools import ci, engines
from tools.engine_source import Elsewhere, Missing, Source

PLACES = {
    "vllm": [("vllm._custom_ops", "fused_kda_decode"), ("vllm.model_executor.layers.mamba.short_conv", "ShortConv.forward_cuda")],
    "sglang": [("sglang.srt.layers.merge_state", "merge_state")],
}
CHANGED = PLACES["vllm"][1]


def packed(root: Path, package: str, form: str) -> Path:
    """The stand-in package below root as a wheel, as a source distribution, or as the folder that it is."""
    files = sorted(root.rglob("*.py"))
    if form == "wheel":
        path = root.parent / f"{package}-{VERSIONS[package]}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in files:
                archive.write(file, file.relative_to(root))
        return path
    if form == "sdist":
        path = root.parent / f"{package}-{VERSIONS[package]}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for file in files:
                archive.add(file, f"{package}-{VERSIONS[package]}/{file.relative_to(root).as_posix()}")
        return path
    return root


@pytest.mark.parametrize("form", ["wheel", "sdist", "folder"])
@pytest.mark.parametrize("package", VERSIONS)
def test_a_release_with_the_recorded_signatures(package, form, tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    write(root, package)
    assert engines.run([str(packed(root, package, form))])
    count = sum(module.startswith(f"{package}.") for module, _ in SIGNATURES)
    assert f"{count} of {count} signatures are the recorded ones" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("self, hidden_states, output, more", "more is new"), ("self, hidden_states", "output is gone"),
        ("self, hidden_states, output=None", "output=None was output"), (None, "does not exist"),
    ],
)  # fmt: skip
def test_a_drifted_function_is_named(change, words, tmp_path, capsys):
    write(tmp_path, "vllm", signatures={CHANGED: change})
    assert not engines.run([str(tmp_path)])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  drifted: ")]
    assert len(said) == 1 and ".".join(CHANGED) in said[0] and words in said[0]


def test_the_command_fails(tmp_path):
    write(tmp_path, "vllm", signatures={CHANGED: "self"})
    done = subprocess.run([sys.executable, "-m", "tools.engines", str(tmp_path)], cwd=engines.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and ".".join(CHANGED) in done.stdout and "signatures have drifted" in done.stderr


def module(tmp_path: Path, text: str) -> Source:
    """The module p.q of this text, and the module p.other."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").touch()
    (tmp_path / "p" / "other.py").write_text(
        "SLOT: int = -1\ndef elsewhere(a, b=SLOT): ...\nclass Base:\n    def inherited(self, x): ...\n"
    )
    (tmp_path / "p" / "q.py").write_text(text)
    return Source(tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "parameters"),
    [
        ("def f(a, /, b, *c, d=2, **e): ...", "f", "a, /, b, *c, d=2, **e"),
        ("def f(a=128**-0.5, b=(0.0, float('inf')), c=-1): ...", "f", "a=128**-0.5, b=(0.0, float('inf')), c=-1"),
        ("from .other import SLOT as PAD\ndef f(a=PAD): ...", "f", "a=-1"),
        ("from p.other import elsewhere as f", "f", "a, b=-1"),
        ("import torch\nif torch.cuda:\n    def f(a): ...\nelse:\n    def f(b): ...", "f", "a"),
        ("try:\n    from p import missing\nexcept ImportError:\n    def f(a): ...", "f", "a"),
        ("from typing import overload\n@overload\ndef f(a): ...\ndef f(b): ...", "f", "b"),
        ("class C:\n    @staticmethod\n    def f(a): ...", "C.f", "a"),
        ("from .other import Base\nclass C(Base):\n    pass", "C.inherited", "self, x"),
        ("def f(a=torch.float32): ...", "f", "a=..."),
    ],
)  # fmt: skip
def test_signatures_are_read_without_an_import(text, name, parameters, tmp_path):
    found = module(tmp_path, text).signatures("p.q", name)
    assert differences(engines.function_of(parameters), found[0]) == []


def test_a_default_that_cannot_be_read_differs_from_a_recorded_one(tmp_path):
    (found,) = module(tmp_path, "def f(a=torch.float32): ...").signatures("p.q", "f")
    assert differences(engines.function_of("a=1"), found) == ["a=torch.float32 was a=1"]


def test_any_definition_may_be_the_recorded_one(tmp_path):
    source = module(tmp_path, "if x:\n    def f(a): ...\nelse:\n    def f(b): ...")
    for parameters, fine in (("a", True), ("b", True), ("c", False)):
        drifted, elsewhere = engines.compared(source, {("p.q", "f"): parameters})
        assert not elsewhere and (drifted == {}) == fine


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("from other_package import f", Elsewhere, "p.q imports it from other_package"), ("g = 1", Missing, "does not exist"),
        ("class C: ...", Missing, "does not exist"),
    ],
)  # fmt: skip
def test_functions_that_are_not_there(text, error, words, tmp_path):
    with pytest.raises(error, match=words):
        module(tmp_path, text).signatures("p.q", "f")


def test_a_module_that_is_not_there(tmp_path):
    drifted, _ = engines.compared(module(tmp_path, ""), {("p.gone", "f"): "a"})
    assert drifted == {"p.gone.f": "the module p.gone does not exist"}


NEEDS = "Metadata-Version: 2.4\nRequires-Dist: kernels<0.15\nRequires-Dist: sglang-kernel==0.4.10 ; python_version > '3'\n"


@pytest.mark.parametrize("form", ["wheel", "sdist", "folder"])
@pytest.mark.parametrize(("theirs", "fine"), [("v_a, s_a", True), ("v_a, s_a, more", False)])
def test_a_function_of_another_package_is_compared_there(form, theirs, fine, tmp_path, monkeypatch, capsys):
    """In the version that the engine's wheel requires, or beside it in the same folder."""
    root, beside, asked = tmp_path / "root", tmp_path / "beside", []
    for folder, package, text in ((root, "sglang", "from sgl_kernel import f"), (beside, "sgl_kernel", "from .inner import f")):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(text)
    (beside / "sgl_kernel" / "inner.py").write_text(f"def f({theirs}): ...")

    def downloaded(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return beside

    path = packed(root, "sglang", form)
    if form == "wheel":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("sglang-0.5.23.dist-info/METADATA", NEEDS)
    elif form == "sdist":
        (root / "PKG-INFO").write_text(NEEDS)
        with tarfile.open(path, "w:gz") as archive:
            archive.add(root, "sglang-0.5.23")
    else:
        (beside / "sgl_kernel").rename(root / "sgl_kernel")
    monkeypatch.setattr(engines, "downloaded", downloaded)
    assert engines.report("sglang", path, {("sglang", "f"): "v_a, s_a"}) == fine
    assert asked == ([] if form == "folder" else ["sglang-kernel==0.4.10"])
    assert f"{int(fine)} of 1 signatures are the recorded ones" in capsys.readouterr().out


def test_another_package_of_unknown_version_is_not_compared(tmp_path, capsys):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("from sgl_kernel import f")
    assert engines.report("sglang", packed(tmp_path, "sglang", "folder"), {("sglang", "f"): "a"})
    assert "not compared: sglang.f: sglang imports it from sgl_kernel" in capsys.readouterr().out


def test_an_unknown_engine():
    with pytest.raises(SystemExit, match="trt is neither a file nor one of vllm, sglang"):
        engines.run(["trt"])


@pytest.mark.parametrize(("given", "newest", "asked"), [
    ([], False, ["vllm==0.33.0", "sglang==0.5.23"]), ([], True, ["vllm", "sglang"]), (["vllm==0.1"], True, ["vllm==0.1"]),
])  # fmt: skip
def test_releases_that_are_downloaded(given, newest, asked, tmp_path, monkeypatch):
    found: list[str] = []

    def downloaded(requirement: str, folder: Path) -> Path:
        found.append(requirement)
        write(folder, requirement.partition("==")[0])
        return folder

    monkeypatch.setattr(engines, "downloaded", downloaded)
    assert engines.run(given, newest) and found == asked


def test_ci_compares_the_recorded_releases_and_on_request_the_newest(monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(ci, "_python", lambda *words, **how: asked.append(words))
    ci.STEPS["engines"]()
    ci.STEPS["newest_engines"]()
    assert asked == [("tools.engines",), ("tools.engines", "--newest")]
    assert "newest_engines" in ci.ON_REQUEST and "engines" not in ci.ON_REQUEST
