"""ssmgen: specialised CUDA decode kernels for state-space and linear-attention models, generated, compiled at run time, cached.

Importing this package touches neither CUDA nor the file system; names are loaded when they are first used.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_AROUND = {  # names that belong to no family
    "BoundCall": "calls.api",
    "accelerate": "compat.hf.accelerating",
    "bind": "calls.api",
    "explain": "calls.api",
    "is_warm": "calls.api",
    "stats": "select.registry",
    "supported": "calls.api",
    "warm": "compat.warming",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .spec.family import public_names

    if name in _AROUND:
        value = getattr(import_module(f".{_AROUND[name]}", __name__), name)
    elif name in public_names():
        family, place = public_names()[name]
        value = family.part(place)
    elif name == "__all__":
        return sorted([*_AROUND, *public_names()])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # also so that the module of the same name does not hide the function after the first use
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
