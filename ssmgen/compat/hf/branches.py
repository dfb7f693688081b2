"""Runs a branch of a block whose multipliers, and whose sum with another branch, are in the launches of its accelerated products.

Forwards that `branch_texts` has changed call `branch` and `multiplied`. The last layer of a branch multiplies its f32 sums by the branch's
multiplier, adds the other operand and rounds once; the model rounds three times. Calls that no product can finish are computed as the
model writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import PatchError
from . import attentions, branch_texts, gated, scaled
from .replacements import OURS


def branch(module: Any, call: Callable[[], Any], times: Any = None, residual: Any = None) -> Any:
    """call() * times + residual, of a tuple its first item. call: runs the module   times, residual: None for none"""
    times = None if times == 1.0 else times
    layer = None if is_compiling() or torch.is_grad_enabled() else _last(module)
    if layer is None or not (times is None or isinstance(times, (int, float))):
        return _with_first(call(), lambda y: _finished(y, times, residual))
    with scaled.after(layer, scaled.After(times, residual)) as after:
        found = call()

    def check(y: Any) -> Any:
        if after.result is None:
            return _finished(y, times, residual)
        if y is not after.result:
            name = type(module).__name__
            raise PatchError(
                f"{name} changes the result of its last layer; expected its class's own forward. Call undo(), then accelerate."
            )
        return y

    return _with_first(found, check)


def _with_first(found: Any, change: Callable[[Any], Any]) -> Any:
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)


def _finished(y: Any, times: Any, residual: Any) -> Any:
    y = y if times is None else y * times
    return y if residual is None else residual + y


def multiplied(module: Any, parameter: str, x: Any, times: Any) -> Any:
    """x * times as the module's parameter; or x, while the products of its first layers, which have the multiplier, wait for them."""
    if is_compiling() or torch.is_grad_enabled() or not isinstance(times, (int, float)) or not isinstance(x, Tensor):
        return x * times
    if times == 1.0:
        return x
    kind: Any = type(module)
    layers = [getattr(module, name, None) for name in branch_texts.first(kind, parameter)]
    if not layers or _is_changed(module) or gated.parts(kind) is not None or hasattr(kind.forward, OURS) or x.is_inference():
        return x * times
    return x if scaled.prepare(layers, x, times) else x * times


def _last(module: Any) -> Any:
    """The layer that returns what the module returns; None if there is none, or if something listens to the module."""
    kind: Any = type(module)
    name = "" if not isinstance(module, torch.nn.Module) or _is_changed(module) else branch_texts.ending(kind)
    layer = getattr(module, name, None) if name else None
    return layer if type(layer) is torch.nn.Linear else None


def _is_changed(module: Any) -> bool:
    """Whether a module has hooks, or a forward that is neither its class's nor ours."""
    own = module.__dict__.get("forward")
    replaced = own is not None and getattr(own, "__func__", None) not in (gated.forward, attentions.forward)
    return bool(replaced or module._forward_hooks or module._forward_pre_hooks)
