"""Packages that stand in for the engines: the published functions, which only report that they ran, and their published imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engine_signatures import IMPORTS, SIGNATURES, VERSIONS

DEFINED = "def {name}({parameters}):\n    return {answer!r}\n"
CLASS = "class {owner}(Kernel):\n    pass\n"
METHOD = "{kind}    def {name}({parameters}):\n        return {answer!r}\n"
# A class inherits its methods' capabilities from here.
KERNEL = """class Kernel:
    supports_track_state_snapshot = False
    @classmethod
    def supports_batch_invariance(cls):
        return False
"""
KINDS = {"self": "", "cls": "    @classmethod\n"}


def answer(module: str, name: str) -> str:
    """The value that a stand-in returns."""
    return f"the engine's {module}.{name}"


def write(root: Path, package: str, version: str | None = None, signatures: dict[tuple[str, str], str] | None = None) -> None:
    """The package below root, with its metadata. signatures: other parameters than the published ones, None for no such function."""
    text: dict[str, str] = {}
    for (module, name), published in (SIGNATURES | (signatures or {})).items():
        text.setdefault(module, "")
        if published is not None:
            owner, _, function = name.rpartition(".")
            kind = KINDS.get(published.partition(",")[0], "    @staticmethod\n")
            said = {"owner": owner, "name": function, "parameters": published, "answer": answer(module, name), "kind": kind}
            if owner and f"class {owner}(" not in text[module]:
                text[module] += (KERNEL if "class Kernel" not in text[module] else "") + CLASS.format(**said)
            if function != "supports_batch_invariance":  # inherited
                text[module] += (METHOD if owner else DEFINED).format(**said)
    for module, statements in IMPORTS.items():
        text[module] = text.get(module, "") + statements + "\n"
    for module, source in text.items():
        if module.partition(".")[0] == package:
            folder = root.joinpath(*module.split(".")[:-1])
            inner = folder / module.rpartition(".")[2]
            is_package = any(other.startswith(f"{module}.") for other in text)
            file = inner / "__init__.py" if is_package else inner.with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
    for folder in [d for d in (root / package).rglob("*") if d.is_dir()] + [root / package]:
        (folder / "__init__.py").touch()
    info = root / f"{package}-{version or VERSIONS[package]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version or VERSIONS[package]}\n")


def found(module: str, name: str) -> Any:
    """The function or method of that name; None for none."""
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def modules_of(package: str) -> list[ModuleType]:
    """Imports every module that defines or imports one of the functions."""
    names = [*dict.fromkeys([module for module, _ in SIGNATURES] + list(IMPORTS))]
    return [import_module(name) for name in names if name.partition(".")[0] == package]


@contextmanager
def importable(root: Path, package: str) -> Iterator[None]:
    """The package below root is the one that is imported; afterwards, all is as before."""

    def take() -> dict[str, ModuleType]:
        return {n: sys.modules.pop(n) for n in list(sys.modules) if n == package or n.startswith(f"{package}.")}

    before = take()
    sys.path.insert(0, str(root))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        take()
        sys.modules.update(before)


@pytest.fixture(autouse=True)
def all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that are replaced only on request, too. For modules that import this."""
    monkeypatch.setenv("SSMGEN_ENGINE_LINEAR", "allow")
