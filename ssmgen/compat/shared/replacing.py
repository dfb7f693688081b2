"""Replaces an engine's functions with ssmgen's in this process, and restores them.

A function is replaced where it is defined, as soon as that module has been executed, so that whoever imports it by name later gets the
replacement. Names that hold it already, in the engine's own modules, are rebound. Nothing of the engine is imported for this: some of
its modules ask for the GPU when they are imported, and the processes that load plugins may still fork.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import partial, wraps
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling

from ...errors import ArgumentError, BatchInvarianceError, CaptureError, NotBuiltError, UnsupportedError
from ...settings import NOISY, kept_functions, linear_layers_are_asked_for
from . import noise
from .invariance import Mode
from .names import NAMES

# Raised before anything is launched or written, so that the engine's own function can still do the call.
REFUSALS = (ArgumentError, UnsupportedError, CaptureError, NotBuiltError)


class NotReplaced(Exception):  # noqa: N818
    """A replacement raises it before it writes anything: calls of this kind stay the engine's own, without a warning."""


# The counterpart of warm() for users who do not make the calls themselves.
IN_AN_ENGINE = "\nIn an engine, run a step of the same batch size before the capture."

# Advice in a batch-invariant mode.
NO_FALLBACK = "The engine's own function has other bits. Change what it refuses, or leave the mode."
OTHER_RELEASE = "Name nothing of it in SSMGEN_ENGINE_KEEP, install {} {}, or leave the mode."

REPLACED, WAITING = "replaced", "replaced when it is imported"
NOT_ASKED = "off; SSMGEN_ENGINE_LINEAR=allow replaces it"


@dataclass(frozen=True)
class Replacement:
    """module: where the engine defines the function; name: its name there, of a method Class.name; function: ours, of the same parameters.

    says: attributes that its class gets too, where the engine looks up what the method can do
    behind: wraps the engine's own method for refused calls, because its class now claims more than that method can do
    impossible: of a refused call's arguments, why the engine's own function cannot run it either; None if it can
    traced: torch.compile may trace calls of it, which stay the engine's own, or call `compiled` with the engine's own before the arguments
    needs: places of other replacements, whose modules a call imports; if one of them is not made, calls of this one stay the engine's own
    around: function takes the engine's own before the other arguments, and calls it itself
    asked: replaced only if SSMGEN_ENGINE_LINEAR asks for it
    backward: the engine's own has one, so ours sees whether gradients are recorded
    decorated: decorates ours as the engine's own is; the function inside the decorator is behind ours
    """

    module: str
    name: str
    function: Callable[..., Any]
    says: Mapping[str, Any] = field(default_factory=dict)
    behind: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    impossible: Callable[..., str | None] | None = None
    traced: bool = False
    compiled: Callable[..., Any] | None = None
    needs: tuple[str, ...] = ()
    around: bool = False
    asked: bool = False
    backward: bool = False
    decorated: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    @property
    def place(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def form(self) -> Callable[..., Any]:
        """A function of the engine's parameters."""
        return partial(self.function, None) if self.around else self.function


class Engine:
    """One engine's replacements, in this process. package: its top-level module; version: the one they were written against.

    strict: whether the engine is in its batch-invariant mode, where a refused call is an error and is not the engine's own
    """

    def __init__(self, package: str, version: str, replacements: Sequence[Replacement], strict: Mode | None = None):
        self.package, self.version, self.replacements, self.strict = package, version, tuple(replacements), strict or Mode(lambda: False)
        self.promised: set[str] = set()  # places that have to be ours from now on
        self.log = logging.getLogger(f"{package}.ssmgen")  # below the engine's logger, so that its settings apply
        self.finder = _Finder(self)
        self.undo: list[Callable[[], None]] = []  # of each replacement that was made; of a module that was executed twice, both
        self.outcome: dict[str, str] = {}

    def register(self) -> dict[str, str]:
        """{place: its outcome}. A second call changes nothing; without the engine, and without CUDA, there is nothing to do."""
        if self.finder in sys.meta_path:
            return dict(self.outcome)
        if not _locations(self.package):
            return {}
        if torch.version.cuda is None:
            self.log.info("ssmgen replaces nothing: this torch is not built for CUDA")
            return {}
        kept, asked = self._kept(), linear_layers_are_asked_for()
        noise.rounds.cache_clear()
        for kind in NOISY:
            if count := noise.rounds(kind):
                words = "ssmgen rounds 16-bit states with noise of %d rounds in decode steps (%s), as SSMGEN_ENGINE_NOISE asks"
                self.log.info(words, count, kind)
        self.strict.watch(True)
        noise.watch(self.package, self.log)
        self._compare_versions()
        for r in self.replacements:
            if r.asked and not asked:
                self.outcome[r.place] = NOT_ASKED
            elif r.name in kept or "all" in kept:
                self._keep(r, "SSMGEN_ENGINE_KEEP names it", logging.INFO)
            elif r.module in sys.modules:
                self.replace(r, sys.modules[r.module])
            elif self._has_module(r.module):
                self.outcome[r.place] = WAITING
            else:
                self._keep(r, f"the module does not exist; ssmgen was written for {self.package} {self.version}")
        sys.meta_path.insert(0, self.finder)
        return dict(self.outcome)

    def unregister(self) -> None:
        """Every name that holds one of ours gets the engine's function back; nothing is replaced from here on."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.strict.watch(False)
        noise.watch(self.package, None)
        for undo in self.undo:
            undo()
        self.undo, self.outcome, self.promised = [], {}, set()

    def not_ours(self, places: Sequence[str]) -> list[str]:
        """Why functions at these places are the engine's own, in words; none of them that is ours or will be when it is imported."""
        outcomes = [(place, self.outcome.get(place, "not registered")) for place in places]
        return [f"{place} is {self.package}'s own: {what}" for place, what in outcomes if what not in (REPLACED, WAITING)]

    def promise(self, places: Sequence[str]) -> None:
        """From now on it is an error if a function at one of these places turns out to be the engine's own when it is imported."""
        self.promised |= set(places)

    def replace(self, r: Replacement, module: ModuleType) -> None:
        """Replaces r in its module, which has been executed, and wherever the engine has imported it to."""
        of_class, _, name = r.name.rpartition(".")
        owner: Any = vars(module).get(of_class) if of_class else module
        original: Any = None if owner is None else inspect.getattr_static(owner, name, None)  # of a class, inherited ones as well
        kind = next((k for k in (staticmethod, classmethod) if isinstance(original, k)), None)
        plain = original if kind is None else original.__func__
        if plain is None:
            self._keep(r, f"the function does not exist; ssmgen was written for {self.package} {self.version}")
        elif drift := differences(r.form, plain):
            self._keep(r, f"its parameters differ from those of {self.package} {self.version}: {'; '.join(drift)}")
        else:
            inner = getattr(plain, "__wrapped__", plain) if r.decorated else plain
            ours = _around(r, plain) if r.around else self.with_the_original_behind(self._with_others(r), inner)
            ours = r.decorated(ours) if r.decorated and inner is not plain else ours
            if of_class:
                self.undo.append(_given(owner, {name: ours if kind is None else kind(ours), **r.says}))
            else:
                self._rebind(original, ours)
                self.undo.append(partial(self._rebind, ours, original))
            self.outcome[r.place] = REPLACED
            self.log.info("ssmgen replaces %s", r.place)

    def _with_others(self, r: Replacement) -> Replacement:
        """r, whose function refuses calls while a replacement that it needs is not made."""
        if not r.needs:
            return r

        @wraps(r.function)
        def function(*args: Any, **kwargs: Any) -> Any:
            if missing := [f"{place} is {self.package}'s own" for place in r.needs if not self._made(place)]:
                raise UnsupportedError(f"{self.package}'s {r.name}", missing)
            return r.function(*args, **kwargs)

        return changed(r, function=function)

    def _made(self, place: str) -> bool:
        """Whether the function at a place is ours. Its module is imported if it was not: engines import some in their calls.

        A module that cannot be imported is tried once. Its function is then the engine's own, with a warning that says why.
        """
        if self.outcome.get(place) == WAITING:
            waiting = next(r for r in self.replacements if r.place == place)
            try:
                import_module(waiting.module)
            except Exception as e:  # of any kind, as the engine's code runs
                self._keep(waiting, f"its module cannot be imported: {e}")
        return self.outcome.get(place) == REPLACED

    def with_the_original_behind(self, r: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
        """Ours, for calls that it takes; the engine's for the others, with a warning, once per reason, or in the strict mode an error."""
        told: set[tuple[type, str]] = set()
        behind = original if r.behind is None else r.behind(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if r.backward or not torch.is_grad_enabled():
                    return r.function(*args, **kwargs)
                with torch.no_grad():  # SGLang's one_batch records its graphs with autograd on; the engine's functions lack a backward too
                    return r.function(*args, **kwargs)
            except NotReplaced:
                pass
            except REFUSALS as e:
                advice = IN_AN_ENGINE if isinstance(e, CaptureError) else ""
                if self.strict():
                    raise BatchInvarianceError(r.place, [f"ssmgen refuses the call: {e}{advice}"], NO_FALLBACK) from e
                if r.impossible is not None and (why := r.impossible(*args, **kwargs)) is not None:
                    raise UnsupportedError(f"{self.package}'s {r.name}", [f"{e}{advice}", why]) from e
                if (kind := _kind(e)) not in told:
                    told.add(kind)
                    words = "%s's own %s runs, not ssmgen's (said once for calls like this): %s%s"
                    self.log.warning(words, self.package, r.name, e, advice)
            return behind(*args, **kwargs)

        if not r.traced:
            return call

        traced = original if r.compiled is None else partial(r.compiled, original)

        @wraps(original)
        def run_or_traced(*args: Any, **kwargs: Any) -> Any:
            return traced(*args, **kwargs) if is_compiling() else call(*args, **kwargs)

        return run_or_traced

    def executed(self, module: ModuleType) -> None:
        """Called when one of the modules has been imported."""
        for r in self.replacements:
            if r.module == module.__name__ and self.outcome.get(r.place) in (WAITING, REPLACED):
                self.replace(r, module)

    def _has_module(self, name: str) -> bool:
        """Whether there is a file for it. find_spec would import the packages around it."""
        inner = name.split(".")[1:]
        for location in _locations(self.package):
            folder, stem = Path(location, *inner[:-1]), inner[-1]
            if (folder / stem).is_dir() or any((folder / (stem + suffix)).is_file() for suffix in all_suffixes()):
                return True
        return False

    def _keep(self, r: Replacement, why: str, level: int = logging.WARNING) -> None:
        self.outcome[r.place] = f"kept: {why}"
        self.log.log(level, "ssmgen does not replace %s: %s", r.place, why)
        if r.place in self.promised:
            raise BatchInvarianceError(self.package, self.not_ours([r.place]), OTHER_RELEASE.format(self.package, self.version))

    def _rebind(self, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        for name, module in list(sys.modules.items()):
            if name == self.package or name.startswith(f"{self.package}."):
                for attribute in [a for a, value in getattr(module, "__dict__", {}).items() if value is old]:
                    setattr(module, attribute, new)

    def _kept(self) -> frozenset[str]:
        kept = kept_functions()
        if unknown := sorted(kept - {"all", *NAMES}):
            raise ArgumentError(
                f"ssmgen.compat.{self.package}.register",
                [f"SSMGEN_ENGINE_KEEP names {', '.join(unknown)}; expected all, {', '.join(NAMES)}"],
            )
        return kept

    def _compare_versions(self) -> None:
        try:
            found = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            found = "of unknown version"
        if found.partition("+")[0] != self.version:  # after the +: the CUDA version of the wheel
            message = "ssmgen was written for %s %s, and this is %s: functions whose parameters differ are not replaced"
            self.log.warning(message, self.package, self.version, found)


def _locations(package: str) -> list[str]:
    """The directories of a package that is installed; a directory of that name alone is none."""
    if package in sys.modules:
        return list(getattr(sys.modules[package], "__path__", []))
    spec = find_spec(package)
    return list(spec.submodule_search_locations or []) if spec and spec.origin else []


def differences(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """How the parameters differ, in words: names, order, kinds and defaults count, annotations do not. Our default ... is like any."""
    try:
        mine, found = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    except (TypeError, ValueError) as e:
        return [f"its parameters cannot be read ({e})"]
    said = [f"{name} is new" for name in found if name not in mine] + [f"{name} is gone" for name in mine if name not in found]
    for name in mine:
        if name in found and not _alike(mine[name], found[name]):
            said.append(f"{found[name].replace(annotation=inspect.Parameter.empty)} was {_plain(mine[name])}")
    if not said and list(mine) != list(found):
        said.append(f"their order is {', '.join(found)}")
    return said


def _alike(mine: inspect.Parameter, found: inspect.Parameter) -> bool:
    any_default = mine.default is ... and found.default is not inspect.Parameter.empty
    return mine.kind == found.kind and (any_default or mine.default == found.default)


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=inspect.Parameter.empty)


def _given(owner: type, attributes: Mapping[str, Any]) -> Callable[[], None]:
    """Gives a class these attributes. Returns what takes them back."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)

    def undo() -> None:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)  # inherited

    return undo


def _around(r: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, with the engine's own as its first argument."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return r.function(original, *args, **kwargs)

    return call


def _kind(e: Exception) -> tuple[type, str]:
    """The key by which a warning is given once: the kind of error and, for refused arguments, the reason with its numbers masked. A refusal
    during an engine's warm-up then silences no other reason that its requests meet."""
    return type(e), re.sub(r"\d+", "#", str(e)) if isinstance(e, (ArgumentError, UnsupportedError)) else ""


class _Finder(MetaPathFinder):
    """Finds the modules of an engine's replacements as others would, and tells the engine when they have been executed."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.modules = {r.module for r in engine.replacements}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.engine)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Loader, engine: Engine):
        self.loader, self.engine = loader, engine

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module sees its own loader: inspect and Triton read its source through it.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.engine.executed(module)
