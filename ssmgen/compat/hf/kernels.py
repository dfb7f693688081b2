"""ssmgen's functions for the package `kernels`, through which transformers takes functions from others: `mapping()` gives them to it.

`hf.patch` needs none of this and replaces more. Use this where an application already chooses its functions by `kernels`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ...errors import PatchError, bullets
from . import found, functions, replacements, targets
from .functions import FUNCTIONS
from .replacements import Tally

Mapping = dict[str, dict[str, dict[Any, "Kernel"]]]


class Kernel:
    """A function of ssmgen under its name in `kernels`, such as "causal_conv1d_fn". `kernels` calls `load()`.

    calls: how many calls ssmgen computed, and how many transformers' own function did
    """

    def __init__(self, name: str, ours: Callable[..., Any], signature: inspect.Signature):
        self.name = name
        self._tally = tally = Tally(name)

        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return functions.serve(tally, ours, partial(type(self).forward, self), args, kwargs)

        forward.__doc__ = ours.__doc__
        forward.__signature__ = signature  # type: ignore[attr-defined]  # `kernels` compares the number of parameters and their kinds
        # No member more than these: `kernels` refuses a class with a state.
        members = {"forward": forward, "can_torch_compile": True, "has_backward": True}
        self._layer = type(name, (torch.nn.Module,), members)

    @property
    def calls(self) -> replacements.Calls:
        return replacements.Calls(self._tally.served, self._tally.kept)

    def load(self) -> type[torch.nn.Module]:
        """The class whose forward `kernels` puts into transformers' function; a call that ssmgen does not serve goes to that function."""
        return self._layer

    def __deepcopy__(self, memo: Any) -> Kernel:
        return self  # `kernels` copies its table, and one function counts its calls once

    def __str__(self) -> str:
        return f"ssmgen's {self.name}"


_kernel = cache(Kernel)  # `kernels` loads an object once


def mapping(model: torch.nn.Module | None = None, device: str = "cuda") -> Mapping:
    """ssmgen's functions for inference, as `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping` take them.

    model: only the functions that its modeling files have. Default: the functions of all models of the installed transformers
    device: the type of device on which models use them
    Warns of functions that this transformers does not have as expected, and leaves them out. `kernels` sees only a name, so a function
    that has other parameters in one modeling file is left out for all.
    Raises PatchError if this transformers cannot use `kernels` here.
    """
    mode = _mode()
    kinds: dict[str, set[tuple[Callable[..., Any], inspect.Signature]]] = {}
    lost: dict[str, str] = {}
    for folder in found.names() if model is None else found.kinds(model):
        module = found.modeling(folder)
        assert module is not None
        for target in targets.targets(module, fuse=False):
            function = inspect.unwrap(getattr(module, target.name, None))  # type: ignore[arg-type]
            name = getattr(function, "kernel_layer_name", None)
            if name is None:  # a class, or no such function
                continue
            if words := target.objection(function):
                lost[name] = f"in {folder}, {words}"
            kinds.setdefault(name, set()).add((FUNCTIONS[target.name], inspect.signature(type(function).forward)))
    lost |= {name: "its parameters differ between modeling files" for name, versions in kinds.items() if len(versions) > 1}
    if lost:
        lines = bullets([f"{name}: {words}" for name, words in lost.items()])
        warnings.warn(f"ssmgen does not pass these functions to `kernels`:\n{lines}", RuntimeWarning, stacklevel=2)
    kept = {name: _kernel(name, *next(iter(versions))) for name, versions in kinds.items() if name not in lost}
    if not kept:
        raise PatchError(
            "`kernels` can replace no function of these models. "
            "Check that USE_HUB_KERNELS is not 0 and that the models are of transformers."
        )
    return {name: {device: {mode.INFERENCE: kernel, mode.INFERENCE | mode.TORCH_COMPILE: kernel}} for name, kernel in kept.items()}


def _mode() -> Any:
    """The flags of `kernels`. Raises PatchError if it is not installed, or in a version that transformers does not take."""
    found.version()
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        least, below = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
        raise PatchError(
            "`kernels` is missing or of another version; expected one that this transformers supports. "
            f"Run pip install 'kernels>={least},<{below}' before "
            "transformers is imported, or use ssmgen.compat.hf.patch, which needs no `kernels`."
        )
    from kernels import Mode

    return Mode
