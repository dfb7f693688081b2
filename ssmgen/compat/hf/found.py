"""Modeling files of the installed transformers, and which of them have something that ssmgen replaces.

Files are searched as text first, because importing all of them takes a minute; only files whose text has a known name are imported. A
model's name is the name of its folder.
"""

from __future__ import annotations

import importlib
import re
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ...errors import PatchError
from . import layers, lightning
from .functions import FUNCTIONS

TESTED = (5, 24)
"""The newest transformers that ssmgen was tested with."""
OLDEST = (5, 15)
"""The oldest: modeling files of older ones do not look functions up."""
_PREFIX = "transformers.models."
_told: set[str] = set()  # versions that have been warned of


def version() -> str:
    """The version of the installed transformers. Warns once of one newer than tested. Raises PatchError for none or an older one."""
    try:
        import transformers
    except ImportError as e:
        raise PatchError("transformers is not installed. Install it with: pip install 'ssmgen[hf]'") from e
    found = str(transformers.__version__)
    release = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if release < OLDEST:
        raise PatchError(
            f"transformers is {found}; expected 5.15 or later, whose modeling files look up functions that ssmgen can replace. Run: "
            "pip install -U 'ssmgen[hf]'. Nothing was replaced."
        )
    if release > TESTED and found not in _told:
        _told.add(found)
        newest = ".".join(map(str, TESTED))
        words = f"transformers is {found}; ssmgen was tested up to {newest}. Functions that changed since are not replaced."
        warnings.warn(words, RuntimeWarning, stacklevel=2)
    return found


def folder() -> Path:
    """Where transformers has its models."""
    import transformers

    return Path(transformers.__file__).parent / "models"


@cache
def _matching(root: Path) -> tuple[str, ...]:
    """Names of models in whose modeling file a name occurs that ssmgen knows, in alphabetical order."""
    words = [w.encode() for w in (*FUNCTIONS, *layers.TABLE, *lightning.CLASSES)]
    texts = ((file.parent.name, file.read_bytes()) for file in sorted(root.glob("*/modeling_*.py")) if _is_of_its_folder(file))
    return tuple(name for name, text in texts if any(word in text for word in words))


def _is_of_its_folder(file: Path) -> bool:
    return file.stem == f"modeling_{file.parent.name}"


def names() -> tuple[str, ...]:
    """Models of the installed transformers of which something is replaced. Imports their modeling files."""
    return tuple(name for name in _matching(folder()) if has(modeling(name)))


def is_folder(name: str) -> bool:
    """Whether transformers has a model folder of this name."""
    return name.isidentifier() and (folder() / name).is_dir()


def modeling(name: str) -> ModuleType | None:
    """The modeling file of a model, or None where transformers has none of that name."""
    path = f"{_PREFIX}{name}.modeling_{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as e:
        if e.name is not None and path.startswith(e.name):
            return None
        raise


def is_modeling(module: str) -> bool:
    """Whether a module of this name is a modeling file of transformers."""
    return module.startswith(_PREFIX) and ".modeling_" in module


def has(module: ModuleType | None) -> bool:
    """Whether a modeling file has a function of a name that ssmgen knows, or a layer."""
    held = vars(module) if module is not None else {}
    return any(name in held for name in (*FUNCTIONS, *layers.TABLE, *lightning.CLASSES))


def kinds(model: torch.nn.Module) -> list[str]:
    """Names of the models of transformers that the classes of a model's layers come from, of which something is replaced."""
    modules = dict.fromkeys(c.__module__ for layer in model.modules() for c in type(layer).__mro__)
    found = [name.removeprefix(_PREFIX).partition(".")[0] for name in modules if is_modeling(name)]
    return [name for name in dict.fromkeys(found) if has(modeling(name))]
