"""Replaces a function of a modeling file, or a method, with ours; counts calls, and decides when the original computes one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch.compiler import is_compiling

from ...errors import ArgumentError, CaptureError, SsmgenError, UnsupportedError, bullets

OURS = "_ssmgen"  # an attribute that marks ssmgen's replacements


class Calls(NamedTuple):
    """Calls of one function: how many ssmgen computed, and how many transformers' own function did."""

    ssmgen: int
    original: int


class Tally:
    """Counts the calls of one function, except in code made by torch.compile, and says why the original computed some.

    label: such as "mamba2.causal_conv1d_update"
    """

    def __init__(self, label: str):
        self.label = label
        self.served = self.kept = 0  # calls that ours computed, and that the original did
        self.reasons: dict[str, str] = {}  # why the original computed calls: in which layer first

    def keep(self, reason: str) -> None:
        """Counts a call that goes to the original, and says why, once for each reason."""
        self.kept += 1
        if reason not in self.reasons:
            self.reasons[reason] = calling_layer()
            warnings.warn(
                f"transformers' own {self.label} computes this call, first in {self.reasons[reason]}:\n{reason}",
                RuntimeWarning, stacklevel=4,
            )  # fmt: skip


class Replacement(Tally):
    """Our function instead of a function of a modeling file, or of a method. The original computes calls that ours does not serve."""

    def __init__(self, label: str, module: Any, name: str, run_of: Callable[[Replacement, Callable[..., Any]], Callable[..., Any]]):
        """run_of: makes our function from this object and the original. The constructor puts it into the module, or the class."""
        super().__init__(label)
        self.module, self.name = module, name
        self.original = getattr(module, name)
        self.owners: set[object] = set()
        self.run = run = cast(Any, run_of(self, self.original))
        run.__name__, run.__doc__, run.__wrapped__ = name, run.__doc__ or self.original.__doc__, self.original
        setattr(run, OURS, True)
        setattr(module, name, run)

    @property
    def in_place(self) -> bool:
        return getattr(self.module, self.name, None) is self.run

    def restore(self) -> None:
        setattr(self.module, self.name, self.original)


def attempt(tally: Tally, ours: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
    """(what ours returns, None), or (None, why ours does not serve the call). Raises errors that the original cannot resolve."""
    try:
        result = ours(*args, **kwargs)
    except ArgumentError as e:  # this and the next are raised before anything is launched or written
        return None, bullets(e.problems)
    except UnsupportedError as e:
        return None, bullets(e.reasons)
    except SsmgenError as e:
        all_of_it = "\nTo load all kernels of a model, call ssmgen.compat.hf.warm(model, batches=…)." if isinstance(e, CaptureError) else ""
        e.args = (f"{tally.label}, in {calling_layer()}: {e.args[0]}{all_of_it}", *e.args[1:])
        raise
    if not is_compiling():
        tally.served += 1
    return result, None


def calling_layer() -> str:
    """The layer of a model that the call comes from, in words: the nearest caller that is a method of a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (owner._modules or owner._parameters):  # with `kernels`, functions are modules
            index = getattr(owner, "layer_idx", None)
            return type(owner).__name__ + ("" if index is None else f" of layer {index}")
        frame = frame.f_back
    return "a call outside of all layers"
