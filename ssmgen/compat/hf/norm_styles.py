"""Finds the variant of RMSNorm that a class of transformers computes: by a table of source digests, else by a trial on numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import texts


class Style(NamedTuple):
    """How a norm's forward continues after v = x rsqrt(mean(x^2) + eps), in f32."""

    weighted: bool = True
    rounded: bool = False  # v to x's dtype, which the weight multiplies
    unit_offset: bool = False  # 1 + weight multiplies
    eps: str = "variance_epsilon"  # the attribute
    grouped: bool = False  # the mean is over `group_size` neighbours, where that is not None

    def of(self, x: Tensor, weight: Tensor, eps: float, group_size: int | None) -> Tensor:
        """The same, cast by cast."""
        v: Tensor = x.float().unflatten(-1, (-1, group_size or x.shape[-1]))
        v = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
        if self.rounded:
            v = weight * v.to(x.dtype)
            return v
        if self.weighted:
            v = v * (1.0 + weight.float() if self.unit_offset else weight.float())
        return v.to(x.dtype)

    def result(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype of the norm's output."""
        return torch.promote_types(x, weight) if self.rounded else x

    def words(self) -> str:
        """A description of the style for messages."""
        weight = (
            ("that rounds before its weight" if self.rounded else "that rounds behind its weight") if self.weighted else "without a weight"
        )
        return f"an RMSNorm {weight}{', of 1 + weight' * self.unit_offset}{', in groups' * self.grouped}"


STYLES = [
    Style(weighted, rounded, offset, eps, grouped)
    for weighted, rounded, offset in ((True, True, False), (True, False, False), (True, False, True), (False, False, False))
    for eps in ("variance_epsilon", "eps")
    for grouped in (False, True)
]

KNOWN = {
    "9635bcd843f309a0": Style(rounded=True),  # Llama's, in most models
    "eef4e978a32aa4a4": Style(),  # OLMo's
    "b6d7ab076811b6bb": Style(),  # Nemotron-H's
    "d2c09eabcc5efb2e": Style(unit_offset=True, eps="eps"),  # Gemma's, in Qwen3-Next and Qwen3.5
    "a02e37ab1cc369e6": Style(unit_offset=True, eps="eps", grouped=True),  # Qwen4-Exp's
    "e3105f4b9224a69d": Style(weighted=False, eps="eps"),  # Falcon-Mamba's norms of B, C and dt
    "2c0d5a3de6fa5022": Style(weighted=False, eps="eps"),  # Inkling's without a weight
}
"""{digest of the methods of a norm of transformers 5.15 to 5.24: what it computes}; tests try each of them on numbers."""


def style_of(norm: Any) -> Style | None:
    """The style that a class of norms computes, or None if there is none."""
    return KNOWN.get(texts.of_class(norm)) or tried(norm)


def recognised(norm: Any) -> str:
    """Why a class of norms has the style that `style_of` returns, if no table has its text; empty if a table has it."""
    style = None if texts.of_class(norm) in KNOWN else tried(norm)
    return "" if style is None else f"its source is not in ssmgen's table; on random numbers it gives the bits of {style.words()}"


@cache
def tried(norm: Any) -> Style | None:
    """The style of which a norm gives the bits, on random numbers in bf16: casts at other places give others. None for no norm."""
    if not (norm.__name__.endswith("RMSNorm") and issubclass(norm, torch.nn.Module)):
        return None
    if len(inspect.signature(norm.forward).parameters) != 2:
        return None
    g, grouped = torch.Generator("cpu").manual_seed(0), "group_size" in inspect.signature(norm.__init__).parameters
    x, weight = (torch.randn(shape, generator=g, device="cpu").bfloat16() for shape in ((8, 64), (64,)))
    found = None
    for group_size in (None, 16) if grouped else (None,):
        try:
            got = _stand_in(norm, weight, group_size)(x)
        except (AttributeError, RuntimeError, TypeError):  # it needs what norms do not have
            return None
        same = [s for s in STYLES if s.grouped == grouped and torch.equal(s.of(x, weight, EPS[s.eps], group_size), got)]
        found = next((s for s in same if found in (None, s)), None)
        if found is None:
            return None
    return found


EPS = {"variance_epsilon": 0.125, "eps": 0.25}


def _stand_in(norm: Any, weight: Tensor, group_size: int | None) -> Callable[[Tensor], Tensor]:
    """The forward of an object of the class that nothing has made, with these numbers."""
    made: Any = norm.__new__(norm)
    torch.nn.Module.__init__(made)
    vars(made).update(EPS, weight=weight, group_size=group_size)
    forward: Callable[[Tensor], Tensor] = torch.no_grad()(made.forward)
    return forward
