"""A small legal call of every public function on CPU tensors, for tests that make it illegal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import memoryless
import torch
from torch import Tensor

from ssmgen.calls.api import FUNCTIONS

BY_NAME: dict[str, Callable[..., Any]] = {f.__name__: f for f in FUNCTIONS}
OTHERS = ("layer-mamba", "layer-gdn", "layer-kda", "commit-gated_delta_rule", "commit-kda")  # which several ranks do not share


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    """The first call of each function, without options that it may leave out, and with the output that it may be given."""
    found: dict[str, dict[str, Any]] = {}
    for form in memoryless.forms():
        if (form.id.startswith("shared-") or form.id in OTHERS) and "channels-first" not in form.id:
            function, call = form.make()
            parameters, options = signature(function).parameters, scalars_of(function)
            needed = {n: v for n, v in call.items() if n not in options or parameters[n].default is Parameter.empty}
            found.setdefault(function.__name__, needed)
    for name, call in found.items():
        if "out" in signature(BY_NAME[name]).parameters and "out" not in call:
            result = BY_NAME[name](**copy.deepcopy(call))
            call["out"] = torch.zeros_like(result[0] if isinstance(result, tuple) else result)
    return found


def call_of(name: str) -> dict[str, Any]:
    """Keyword arguments of a call, of new tensors, always the same."""
    return copy.deepcopy(_all()[name])


def tensors_of(call: dict[str, Any]) -> dict[str, Tensor]:
    flat = {n: t for n, t in call.items() if isinstance(t, Tensor)}
    return flat | {f"{n}.{i}": t for n, v in call.items() if isinstance(v, tuple) for i, t in enumerate(v) if isinstance(t, Tensor)}


def bits_of(call: dict[str, Any]) -> dict[str, bytes]:
    return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else b"" for n, t in tensors_of(call).items()}


def scalars_of(function: Callable[..., Any]) -> list[str]:
    """The parameters that are not tensors, by their annotations: of all kinds, whatever checks them."""
    parameters = signature(function).parameters.values()
    of_tensors = ("Tensor", "Ring")
    return [p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD or not any(word in str(p.annotation) for word in of_tensors)]
