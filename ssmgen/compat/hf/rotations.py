"""Rotary embeddings applied to q and k of a decode step, in three operations of torch each; transformers' own function has five or six.

    x cos + rotate_half(x) sin    ->    x cos, to whose halves one fused multiply-add each adds its part

The function is replaced in the modeling files of accelerated models, and only steps of `accelerate` use ours. A trial on numbers decides
whether a file's function is this one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import found, positions

NAME = "apply_rotary_pos_emb"
_lock = threading.Lock()


class _Padded(threading.local):
    """The last cos that was extended by ones: all layers of a token have the same."""

    of: Callable[[], Tensor | None] = staticmethod(lambda: None)
    cos: Tensor | None = None


_padded = _Padded()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, 1, channels] turned; cos, sin [batch, 1, rotary channels]. Further channels stay."""
    width, half = sin.shape[-1], sin.shape[-1] // 2
    out = x * _extended(cos, x.shape[-1])[:, None]
    sin = sin[:, None]
    out[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1)
    out[..., half:width].addcmul_(x[..., :half], sin[..., half:])
    return out


def _extended(cos: Tensor, width: int) -> Tensor:
    if cos.shape[-1] == width:
        return cos
    known = _padded.cos
    if known is None or _padded.of() is not cos or known.shape[-1] != width:
        known = torch.nn.functional.pad(cos, (0, width - cos.shape[-1]), value=1.0)
        _padded.of, _padded.cos = ref(cos), known
    return known


@cache
def kinds(function: Any) -> tuple[bool, bool]:
    """(whether a function turns all channels as `turned` does, whether it turns the first ones so), tried on numbers."""
    g = torch.Generator("cpu").manual_seed(0)
    q, k, cos, sin = (torch.randn(shape, generator=g, device="cpu") for shape in ((2, 4, 1, 8), (2, 2, 1, 8), (2, 1, 8), (2, 1, 8)))
    same = []
    for width in (8, 4):
        given = (cos[..., :width], sin[..., :width])
        try:
            got = function(q.clone(), k.clone(), *given)
            pairs = [(g, turned(x, *given)) for g, x in zip(got, (q, k), strict=True)]
            same.append(all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            same.append(False)
    return same[0], same[1]


def run(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a modeling file's function."""
    kind: Any = original
    whole, part = kinds(kind)

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not positions.is_step() or is_compiling():
            return original(*args, **kwargs)
        q, k, cos, sin = args
        for x in (q, k):
            fits = x.dim() == 4 and x.shape[2] == 1 and cos.dim() == 3 and x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
            if not fits or not (whole if cos.shape[-1] == x.shape[-1] else part and cos.shape[-1] < x.shape[-1]):
                return original(*args, **kwargs)
        return turned(q, cos, sin), turned(k, cos, sin)

    run.original, run.owners = original, 0  # type: ignore[attr-defined]
    return run


class Rotations:
    """The replaced functions of a model's modeling files. `undo` puts the originals back with the last model."""

    def __init__(self, model: torch.nn.Module):
        names = {type(m).__module__ for m in model.modules()}
        files = [sys.modules[name] for name in sorted(names) if found.is_modeling(name) and hasattr(sys.modules[name], NAME)]
        self._runs: list[tuple[Any, Any]] = []
        with _lock:
            for file in files:
                now: Any = getattr(file, NAME)
                if not hasattr(now, "owners") and any(kinds(now)):
                    now = run(now)
                    setattr(file, NAME, now)
                if hasattr(now, "owners"):
                    now.owners += 1
                    self._runs.append((file, now))

    def undo(self) -> None:
        """A second time: nothing."""
        with _lock:
            for file, now in self._runs:
                now.owners -= 1
                if not now.owners and getattr(file, NAME) is now:
                    setattr(file, NAME, now.original)
            self._runs = []
