"""An engine's Python files, in a wheel, a source distribution or a folder, and the signatures in them. Nothing is installed or imported."""

from __future__ import annotations

import ast
import inspect
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

_MAKES = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "orelse", "handlers", "finalbody")


class Elsewhere(Exception):  # noqa: N818
    """A name comes from another package: `name` of its module `whence`, which `module` imports."""

    def __init__(self, module: str, whence: str, name: str):
        super().__init__(f"{module} imports it from {whence}")
        self.whence, self.name = whence, name

    @property
    def package(self) -> str:
        return self.whence.partition(".")[0]


class Missing(Exception):  # noqa: N818
    """There is no function, class or constant of that name."""


class Opaque:
    """A default that only the engine's code can compute. It equals nothing else."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Source:
    """The modules of a package: path is a wheel, a source distribution, or a folder that has the package's folder."""

    def __init__(self, path: Path):
        self.read_file, self.files = _opened(path)
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> tuple[list[ast.stmt], bool]:
        """(the module's statements, whether it is a package)."""
        stem = module.replace(".", "/")
        for name, package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            if name in self.files:
                return ast.parse(self.read_file(name)).body, package
        raise Missing(f"the module {module} does not exist")

    def signatures(self, module: str, name: str) -> list[Callable[..., Any]]:
        """Stand-ins with the parameters of the function, or method Class.name; several if a condition chooses one of them.

        Raises Missing, or Elsewhere for a function that the module imports from another package.
        """
        of_class, _, method = name.rpartition(".")
        found = self._methods(module, of_class, method) if of_class else self._functions(module, method)
        made = [_stand_in(self._signature(where, node)) for where, node in found]
        if not made:
            raise Missing("the function does not exist")
        return made

    def _functions(self, module: str, name: str) -> Iterator[tuple[str, _MAKES]]:
        for where, node in self._named(module, name):
            if isinstance(node, _MAKES):
                yield where, node

    def _methods(self, module: str, of_class: str, name: str) -> list[tuple[str, _MAKES]]:
        """A class's own method, or the one that it inherits."""
        for where, node in self._named(module, of_class):
            if isinstance(node, ast.ClassDef):
                if own := [(where, found) for found in _defined(node.body, name) if isinstance(found, _MAKES)]:
                    return own
                for base in node.bases:
                    if isinstance(base, ast.Name) and (inherited := self._methods(where, base.id, name)):
                        return inherited
        return []

    def _named(self, module: str, name: str) -> Iterator[tuple[str, ast.stmt]]:
        """(module, statement) of each definition of a name; imports inside the package are followed."""
        body, package = self.tree(module)
        for node in _defined(body, name):
            if not isinstance(node, ast.ImportFrom):
                yield module, node
                continue
            (alias,) = [a for a in node.names if (a.asname or a.name) == name]
            whence = _absolute(module, package, node)
            if whence.partition(".")[0] != module.partition(".")[0]:
                raise Elsewhere(module, whence, alias.name)
            yield from self._named(whence, alias.name)

    def _signature(self, module: str, node: _MAKES) -> inspect.Signature:
        given, kinds = node.args, inspect.Parameter
        plain = [(a, kinds.POSITIONAL_ONLY) for a in given.posonlyargs] + [(a, kinds.POSITIONAL_OR_KEYWORD) for a in given.args]
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
        rows: list[tuple[ast.arg, Any, ast.expr | None]] = [(a, kind, default) for (a, kind), default in zip(plain, defaults, strict=True)]
        rows += [(given.vararg, kinds.VAR_POSITIONAL, None)] if given.vararg else []
        rows += [(a, kinds.KEYWORD_ONLY, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        rows += [(given.kwarg, kinds.VAR_KEYWORD, None)] if given.kwarg else []
        return inspect.Signature([kinds(a.arg, kind, default=kinds.empty if d is None else self._value(module, d)) for a, kind, d in rows])

    def _value(self, module: str, node: ast.expr) -> Any:
        """A default: a literal, arithmetic with numbers, or a module's constant."""
        if isinstance(node, ast.Name):
            try:
                for where, statement in self._named(module, node.id):
                    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                        return self._value(where, statement.value)
            except (Missing, Elsewhere):
                pass
            return Opaque(node.id)
        if any(isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) != "float" for part in ast.walk(node)):
            return Opaque(ast.unparse(node))
        return eval(compile(ast.Expression(node), "<default>", "eval"), {"__builtins__": {"float": float}})


def required(path: Path, distribution: str) -> str | None:
    """The version of another distribution that a package requires exactly, as "name==version"; None if its metadata names none."""
    for line in _metadata(path).splitlines():
        said = line.removeprefix("Requires-Dist:").partition(";")[0].replace(" ", "").replace("(", "").replace(")", "")
        if line.startswith("Requires-Dist:") and said.lower().replace("_", "-").startswith(f"{distribution}=="):
            return said
    return None


def _metadata(path: Path) -> str:
    """The metadata of a wheel or a source distribution; empty for a folder, whose packages may be of several distributions."""
    if path.is_dir():
        return ""
    if zipfile.is_zipfile(path):
        wheel = zipfile.ZipFile(path)
        return "".join(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    archive = tarfile.open(path)  # noqa: SIM115
    files = [archive.extractfile(m) for m in archive.getmembers() if m.isfile() and m.name.count("/") == 1 and m.name.endswith("/PKG-INFO")]
    return "".join(file.read().decode() for file in files if file is not None)


def _stand_in(signature: inspect.Signature) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> None: ...

    setattr(function, "__signature__", signature)  # noqa: B010
    return function


def _opened(path: Path) -> tuple[Callable[[str], bytes], frozenset[str]]:
    """(how to read a file, the names of all) of a package."""
    if path.is_dir():
        names = [f.relative_to(path).as_posix() for f in path.rglob("*.py")]
        return lambda name: (path / name).read_bytes(), frozenset(names)
    if zipfile.is_zipfile(path):
        wheel = zipfile.ZipFile(path)
        return wheel.read, frozenset(wheel.namelist())
    archive = tarfile.open(path)  # noqa: SIM115
    inside = {m.name.partition("/")[2]: m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")}
    inside |= {name.partition("python/")[2]: m for name, m in inside.items() if name.startswith("python/")}  # as SGLang's repository has it

    def read(name: str) -> bytes:
        file = archive.extractfile(inside[name])
        assert file is not None  # a file is not a folder
        return file.read()

    return read, frozenset(inside)


def _defined(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements that bind a name, also inside conditions; overloads do not count."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, _MAKES | ast.ClassDef):
            if node.name == name and not any(ast.unparse(d).endswith("overload") for d in node.decorator_list):
                found.append(node)
        elif isinstance(node, ast.ImportFrom):
            found += [node] if any((a.asname or a.name) == name for a in node.names) else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [node] if any(isinstance(t, ast.Name) and t.id == name for t in targets) else []
        else:
            inner = [part for block in _BLOCKS for part in getattr(node, block, [])]
            found += _defined([part for part in inner if not isinstance(part, ast.ExceptHandler)], name)
            for handler in (part for part in inner if isinstance(part, ast.ExceptHandler)):
                found += _defined(handler.body, name)
    return found


def _absolute(module: str, package: bool, node: ast.ImportFrom) -> str:
    """The module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + package]
    return ".".join([*parts, *(node.module or "").split(".")]).rstrip(".")
