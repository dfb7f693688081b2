"""RMSNorms and residual sums between the layers of transformers' models.

`patch(fuse=True)` replaces the norms' forwards, which take one launch instead of eight. It also replaces the blocks' forwards, whose sums
`h = residual + h` then call this module. A norm that follows a sum is computed in the sum's launch, and its result is kept until the norm
is called with that sum.

`norm_styles` has the arithmetic of each norm, `block_sums` finds the sums of a block. The norm that follows a sum is learnt from its first
call with that sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...engine.norm_kernel import MAX_GROUP
from ...errors import ArgumentError, UnsupportedError
from ...families.gated_rms_norm import plain as native
from . import block_sums, branches, norm_styles, texts
from .functions import call
from .norm_styles import Style, style_of
from .replacements import Replacement, attempt


@cache  # as they are before any of them is replaced
def classes(modeling: ModuleType) -> tuple[str, ...]:
    """Names of a modeling file's own classes that are replaced: norms, and blocks."""
    kinds = [c for c in texts.own_modules(modeling).values() if "forward" in vars(c)]
    return tuple(c.__name__ for c in kinds if style_of(c) is not None or c.__name__ in block_sums.KNOWN or block_sums.count(c))


@cache  # as above
def recognised(kind: Any) -> str:
    """Why a class that is in no table is taken for a norm or a block; empty for one that is in a table."""
    return norm_styles.recognised(kind) or block_sums.recognised(kind)


@cache  # as above
def objection(kind: Any) -> str:
    """Why a norm or a block is left alone, or nothing."""
    return "" if style_of(kind) is not None else block_sums.objection(kind)


# Sums. One of a block is known by the block and its number there.


class Link(NamedTuple):
    """The norm that follows a sum."""

    norm: ref[Any]
    cast: bool  # which is given the sum in its weight's dtype


class Last(threading.local):
    """The last sum computed in this thread and, if known, the output of the norm that follows it."""

    total: Callable[[], Tensor | None] = staticmethod(lambda: None)
    site: tuple[Any, int] | None = None
    norm: Any = None
    normed: Tensor | None = None

    def set(self, total: Tensor, site: tuple[Any, int] | None, norm: Any = None, normed: Tensor | None = None) -> None:
        self.total, self.site, self.norm, self.normed = ref(total), site, norm, normed

    def drop_unused(self) -> None:
        """Forgets a norm that was computed and not called: it does not follow that sum."""
        if self.normed is not None and self.site is not None:
            block, number = self.site
            _links[block].pop(number, None)
            self.forget()

    def forget(self) -> None:
        self.site = self.norm = self.normed = None


_last = Last()
_links: WeakKeyDictionary[Any, dict[int, Link | None]] = WeakKeyDictionary()


_computed: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # sums of a block after modules, whose norms would be known


def add(block: Any, number: int, residual: Tensor, x: Any, module: Any = None) -> Any:
    """residual + x, together with the norm that follows it, if known; else with the last product of a module.

    x: a tensor, or a function that runs the module and returns its result
    """
    if is_compiling() or torch.is_grad_enabled():
        return residual + (x if module is None else x())
    summed: Tensor | None = None
    if module is not None:
        known = _computed.setdefault(block, set())
        step = isinstance(residual, Tensor) and residual.dim() == 3 and residual.shape[1] == 1  # prompts have the same bits in every call
        if step and number in known and _norm_after(block, number) is None:
            summed = branches.branch(module, x, residual=residual)
        else:
            x = x()
            known.add(number)
    _last.drop_unused()
    links = _links.get(block)
    link = None if links is None else links.get(number)
    norm = None if link is None else link.norm()
    if summed is not None or link is None or norm is None:
        total = residual + x if summed is None else summed
        if not isinstance(total, Tensor):
            return total
        unseen = links is None or number not in links or link is not None
        _last.set(total, (block, number) if unseen else None)
        return total
    found = _together(norm, link.cast, residual, x)
    if found is None:
        _links[block][number] = None  # is not asked again
        return residual + x
    normed, total = found
    _last.set(total, (block, number), norm, normed)
    return total


def _norm_after(block: Any, number: int) -> Any:
    """The norm that is known to follow a sum; None for none."""
    link = _links.get(block, {}).get(number)
    return None if link is None else link.norm()


def _together(norm: Any, cast: bool, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(what the norm gives, the sum), or None where no kernel rounds as the two by themselves do."""
    kind: Any = type(norm)
    style = style_of(kind)
    if style is None or x.shape != residual.shape:
        return None
    weight = norm.weight if style.weighted else None
    given = torch.promote_types(x.dtype, residual.dtype) if weight is None or not cast else weight.dtype  # to the norm
    if _faults(norm, style, given, x.shape[-1]):
        return None
    rows, added = _in_rows(x), _in_rows(residual)
    more = _told(norm, style) if given == x.dtype else _told(norm, style) | {"out": torch.empty_like(rows, dtype=given)}
    try:
        normed, total = call(native.rms_norm, rows, weight, getattr(norm, style.eps), residual=added, **more)
    except (ArgumentError, UnsupportedError):  # before anything was launched or written
        return None
    return (normed, total) if rows is x else (normed.view(x.shape), total.view(x.shape))


def _told(norm: Any, style: Style) -> dict[str, Any]:
    how: dict[str, Any] = {"unit_offset": style.unit_offset, "round_before_weight": style.rounded}
    return how | {"group_size": norm.group_size} if style.grouped else how


def normed(norm: Any, total: Tensor) -> Tensor:
    """norm(total.to(dtype=norm.weight.dtype))"""
    behind = not (is_compiling() or torch.is_grad_enabled()) and _last.total() is total
    if behind and _last.norm is norm:
        known: Tensor = norm(total)  # which is not looked at
        return known
    site = _last.site if behind else None
    result: Tensor = norm(total.to(dtype=norm.weight.dtype))
    _learn(site, norm, cast=True)
    return result


def _learn(site: tuple[Any, int] | None, norm: Any, cast: bool) -> None:
    if site is not None:
        block, number = site
        _links.setdefault(block, {})[number] = Link(ref(norm), cast)


def rms_norm(norm: Any, style: Style, x: Tensor) -> Tensor:
    """The norm by itself, in one launch. Raises UnsupportedError where none computes it as the model does."""
    weight = norm.weight if style.weighted else None
    if reasons := _faults(norm, style, x.dtype, x.shape[-1]):
        raise UnsupportedError("rms_norm", reasons)
    rows = _in_rows(x)
    out: Tensor = call(native.rms_norm, rows, weight, getattr(norm, style.eps), **_told(norm, style))
    return out if rows is x else out.view(x.shape)


def _faults(norm: Any, style: Style, dtype: torch.dtype, width: int) -> list[str]:
    """Why no kernel computes a norm of such numbers, in words that do not depend on how many there are."""
    size = norm.group_size or width if style.grouped else width
    found = [] if 1 <= size <= MAX_GROUP else [f"its groups have {size} elements; expected 1 … {MAX_GROUP}"]
    if (
        style.weighted and (result := style.result(dtype, norm.weight.dtype)) != dtype
    ):  # v is rounded to the first, the result to the second
        found.append(f"weight is {norm.weight.dtype} and promotes {dtype} to {result}".replace("torch.", ""))
    return found


def _in_rows(x: Tensor) -> Tensor:
    """x, of tokens that are alone in their sequences; else [rows, channels], so that prompts and steps have the same kernels."""
    alone = x.dim() < 3 or x.shape[-2] == 1
    return x if alone and x.is_contiguous() else x.reshape(-1, x.shape[-1])


# Replacing.


def run(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of the forward of a norm or a block."""
    style = style_of(replacement.module.owner)
    return (
        block_sums.rewritten(original, add, normed, branches.branch, branches.multiplied)
        if style is None
        else _norm_run(replacement, original, style)
    )


def _norm_run(replacement: Replacement, original: Callable[..., Any], style: Style) -> Callable[..., Any]:
    """The original one, without a count, with grad enabled and in compiled code, which fuses the norm's operations by itself."""

    def run(self: Any, hidden_states: Tensor) -> Any:
        if is_compiling() or torch.is_grad_enabled():
            return original(self, hidden_states)
        if _last.total() is hidden_states:
            known, site = _last.normed if _last.norm is self else None, _last.site
            _last.forget()
            if known is not None:
                replacement.served += 1
                return known
            _learn(site, self, cast=False)
        result, reason = attempt(replacement, rms_norm, self, style, hidden_states)
        if reason is None:
            return result
        replacement.keep(reason)
        return original(self, hidden_states)

    return run
