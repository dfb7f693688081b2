"""What stands between the layers of transformers' models: RMSNorms, and the sums of a layer's output and what went into it.

`patch(fuse=True)` replaces the norms' forwards, each a launch instead of eight, and those of blocks, in which every `h = residual + h` asks
here instead. A norm that comes next is then a part of the sum's launch: what it will give is kept until it is called with that sum.

Neither is listed by name. A norm is a class whose name ends in RMSNorm and which computes, to the bit, what one of STYLES does, with its
casts; a block is a class whose forward has such a sum. Which norm comes behind a sum is seen when it is called with it the first time.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...engine.norm_kernel import MAX_GROUP
from ...errors import ArgumentError, UnsupportedError
from ...families.gated_rms_norm import plain as native
from .functions import OURS, Replacement, attempt, call

# Recognising norms.


class Style(NamedTuple):
    """How a norm's forward goes on behind v = x rsqrt(mean(x^2) + eps), in f32."""

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
        """The dtype of what the norm gives."""
        return torch.promote_types(x, weight) if self.rounded else x


STYLES = [
    Style(weighted, rounded, offset, eps, grouped)
    for weighted, rounded, offset in ((True, True, False), (True, False, False), (True, False, True), (False, False, False))
    for eps in ("variance_epsilon", "eps")
    for grouped in (False, True)
]


@cache
def style_of(norm: Any) -> Style | None:
    """What a class of norms computes, or None for something else: tried on numbers in bf16, of which casts at other places give others."""
    if (
        not (norm.__name__.endswith("RMSNorm") and issubclass(norm, torch.nn.Module))
        or len(inspect.signature(norm.forward).parameters) != 2
    ):
        return None
    g, grouped = torch.Generator("cpu").manual_seed(0), "group_size" in inspect.signature(norm.__init__).parameters
    x, weight = (torch.randn(shape, generator=g, device="cpu").bfloat16() for shape in ((8, 64), (64,)))
    found = None
    for group_size in (None, 16) if grouped else (None,):
        try:
            got = _stand_in(norm, weight, group_size)(x)
        except (AttributeError, RuntimeError, TypeError):  # it needs what norms do not have
            return None
        same = [s for s in STYLES if s.grouped == grouped and torch.equal(s.of(x, weight, _EPS[s.eps], group_size), got)]
        found = next((s for s in same if found in (None, s)), None)
        if found is None:
            return None
    return found


_EPS = {"variance_epsilon": 0.125, "eps": 0.25}


def _stand_in(norm: Any, weight: Tensor, group_size: int | None) -> Callable[[Tensor], Tensor]:
    """The forward of an object of the class that nothing has made, with these numbers."""
    made: Any = norm.__new__(norm)
    torch.nn.Module.__init__(made)
    vars(made).update(_EPS, weight=weight, group_size=group_size)
    forward: Callable[[Tensor], Tensor] = torch.no_grad()(made.forward)
    return forward


@cache  # as they are before any of them is replaced
def classes(modeling: ModuleType) -> tuple[str, ...]:
    """Names of a modeling file's own classes that are replaced: norms, and blocks."""
    own: list[Any] = [
        c for c in vars(modeling).values() if isinstance(c, type) and c.__module__ == modeling.__name__ and "forward" in vars(c)
    ]
    kinds = [c for c in own if issubclass(c, torch.nn.Module)]
    return tuple(c.__name__ for c in kinds if style_of(c) is not None or has_sums(c))


# Sums. One of a block is known by the block and its number there.


class Link(NamedTuple):
    """The norm behind a sum."""

    norm: ref[Any]
    cast: bool  # which is given the sum in its weight's dtype


class Last(threading.local):
    """The sum that was computed last in this thread, and what the norm behind it gives, where that is known."""

    total: Callable[[], Tensor | None] = staticmethod(lambda: None)
    site: tuple[Any, int] | None = None
    norm: Any = None
    normed: Tensor | None = None

    def set(self, total: Tensor, site: tuple[Any, int] | None, norm: Any = None, normed: Tensor | None = None) -> None:
        self.total, self.site, self.norm, self.normed = ref(total), site, norm, normed

    def drop_unused(self) -> None:
        """Forgets a norm that was computed and not called: it is not the one behind that sum."""
        if self.normed is not None and self.site is not None:
            block, number = self.site
            _links[block].pop(number, None)
            self.forget()

    def forget(self) -> None:
        self.site = self.norm = self.normed = None


_last = Last()
_links: WeakKeyDictionary[Any, dict[int, Link | None]] = WeakKeyDictionary()


def add(block: Any, number: int, residual: Tensor, x: Tensor) -> Tensor:
    """residual + x: with the norm behind it, if that is known."""
    if is_compiling() or torch.is_grad_enabled():
        return residual + x
    _last.drop_unused()
    links = _links.get(block)
    link = None if links is None else links.get(number)
    norm = None if link is None else link.norm()
    if link is None or norm is None:
        total = residual + x
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
    found = [] if 1 <= size <= MAX_GROUP else [f"its groups have {size} elements, not 1 … {MAX_GROUP}"]
    if (
        style.weighted and (result := style.result(dtype, norm.weight.dtype)) != dtype
    ):  # v is rounded to the one, what is given to the other
        found.append(f"weight is {norm.weight.dtype} and makes {result} of {dtype}".replace("torch.", ""))
    return found


def _in_rows(x: Tensor) -> Tensor:
    """x, of tokens that are alone in their sequences; else [rows, channels], so that prompts and steps have the same kernels."""
    alone = x.dim() < 3 or x.shape[-2] == 1
    return x if alone and x.is_contiguous() else x.reshape(-1, x.shape[-1])


# Replacing.


class Forward:
    """A class's own forward, as its attribute `forward`: the function that what is around it calls, such as transformers' checkpointing of
    gradients, which asks whether it is still the class's forward itself."""

    def __init__(self, owner: type):
        self.__dict__.update(owner=owner, cell=_cell(owner))

    def __getattr__(self, name: str) -> Any:
        if name != "forward":
            raise AttributeError(name)
        return self.owner.forward if self.cell is None else self.cell.cell_contents

    def __setattr__(self, name: str, value: Any) -> None:
        if self.cell is None:
            setattr(self.owner, name, value)
        else:
            self.cell.cell_contents = value


def _cell(owner: Any) -> Any:
    """The cell in which the innermost wrapper of a forward holds it; None without wrappers. transformers 5.24 has up to two."""
    outer, cell = owner.forward, None
    while inspect.isfunction(outer) and not hasattr(outer, OURS) and (inner := getattr(outer, "__wrapped__", None)) is not None:
        found = next((c for c in outer.__closure__ or () if c.cell_contents is inner), None)
        if found is None:
            break
        outer, cell = inner, found
    return cell


def run(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for the forward of a norm or of a block."""
    style = style_of(replacement.module.owner)
    return rewritten(original) if style is None else _norm_run(replacement, original, style)


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


class _Sums(ast.NodeTransformer):
    """Puts `add` and `normed` into a forward. count: of sums; norms: whether it calls any."""

    def __init__(self) -> None:
        self.count, self.norms = 0, False

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.BinOp(ast.Name(a), ast.Add(), ast.Name(b))) if name in (a, b) and a != b:
                residual = a if b == name else b
                self._replace(node, residual, ast.Name(name, ast.Load()))
            case ast.Assign(
                targets=[ast.Name()], value=ast.BinOp(ast.Name(residual), ast.Add(), (ast.Call() | ast.BinOp(_, ast.Mult())) as x)
            ):
                self._replace(node, residual, x)
        return node

    def _replace(self, node: ast.Assign, residual: str, x: ast.expr) -> None:
        made = ast.parse(f"_ssmgen_add(self, {self.count}, {residual})", mode="eval").body
        assert isinstance(made, ast.Call)
        made.args.append(x)
        node.value, self.count = made, self.count + 1

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        self.norms |= isinstance(node.func, ast.Attribute) and "norm" in node.func.attr
        match node:
            case ast.Call(
                ast.Attribute(ast.Name("self"), norm),
                [ast.Call(ast.Attribute(ast.Name(given), "to"), [], [ast.keyword("dtype", dtype)])],
                [],
            ) if ast.unparse(dtype) == f"self.{norm}.weight.dtype":
                return ast.parse(f"_ssmgen_normed(self.{norm}, {given})", mode="eval").body
        return node


@cache
def _tree(forward: Any) -> tuple[ast.Module, int] | None:
    """(a maker of the forward with its sums replaced, their number); None for what has no source, or is made by more than that."""
    if not inspect.isfunction(forward) or forward.__code__.co_freevars or hasattr(forward, "__wrapped__"):
        return None  # what a decorator has put around a function, whose source alone would be seen here
    try:
        lines, first = inspect.getsourcelines(forward)
    except OSError:
        return None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or [a.arg for a in function.args.args][:1] != ["self"]:
        return None
    function.decorator_list = []
    sums = _Sums()
    sums.visit(function)
    ast.increment_lineno(tree, first - 1)
    maker = ast.parse("def make(_ssmgen_add, _ssmgen_normed):\n  pass")
    outer = maker.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function, ast.Return(ast.Name(function.name, ast.Load()))]
    return ast.fix_missing_locations(maker), sums.count if sums.norms else 0


def has_sums(block: Any) -> bool:
    """Whether the forward of a class has sums that can be replaced."""
    found = _tree(Forward(block).forward)
    return found is not None and found[1] > 0


def rewritten(forward: Any) -> Callable[..., Any]:
    """A forward of the same source but for its sums, with the same globals, in which what is patched is looked up as before."""
    found = _tree(forward)
    assert found is not None, "of `classes`, and these have sums"
    module = compile(found[0], inspect.getsourcefile(forward) or "<forward>", "exec")  # of which nothing is run but its one function
    maker = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    run: Callable[..., Any] = FunctionType(maker, forward.__globals__)(add, normed)
    return run
