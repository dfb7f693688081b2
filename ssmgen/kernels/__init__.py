"""The operator families. Each module holds a family's spec, argument layout, tuning space and heuristics; `families` has tables of all.

The package imports none of them itself. A thread that imports a family holds the family's lock and wants the package's; one that imports
the package, and with it the families, would want the same locks the other way round, and Python then hands out what is half made. As it is,
no two modules of ssmgen wait for each other, whichever are imported first, and by however many threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .families import FAMILIES, OPERATOR_OF, OPERATORS

__all__ = ["FAMILIES", "OPERATORS", "OPERATOR_OF"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        value = globals()[name] = getattr(import_module(".families", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
