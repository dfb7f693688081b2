"""Sums of a residual in the forwards of transformers' blocks, and the same forward with calls instead of the sums.

    hidden_states = residual + hidden_states    ->    hidden_states = _ssmgen_add(self, 0, residual, hidden_states)

Only these statements change; all else is the text that transformers has. A table says how many of them a known block has: one that has
more or fewer of them is left alone. A block that is in no table is rewritten, too, and `Patch.recognised` says so.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from . import branch_texts
from .replacements import OURS

KNOWN = {
    "BailingHybridDecoderLayer": 2,
    "BambaDecoderLayer": 2,
    "FalconH1DecoderLayer": 2,
    "FalconMambaBlock": 1,
    "Glm5NextVisionBlock": 2,
    "GraniteMoeHybridDecoderLayer": 3,
    "Inkling2VisionEncoderLayer": 1,
    "InklingDecoderLayer": 2,
    "JambaAttentionDecoderLayer": 2,
    "JambaMambaDecoderLayer": 2,
    "KimiLinearDecoderLayer": 2,
    "LaraMiniDecoderLayer": 2,
    "Lfm2DecoderLayer": 2,
    "Lfm2MoeDecoderLayer": 2,
    "Lfm3DecoderLayer": 2,
    "Mamba2Block": 1,
    "MambaBlock": 1,
    "NemotronHBlock": 1,
    "OlmoHybridAttentionDecoderLayer": 2,
    "OlmoHybridLinearAttentionDecoderLayer": 2,
    "Qwen3NextDecoderLayer": 2,
    "Qwen3_5DecoderLayer": 2,
    "Qwen3_5MoeDecoderLayer": 2,
    "Qwen3_5MoeVisionBlock": 2,
    "Qwen3_5VisionBlock": 2,
    "Qwen4ExpTextPLELayer": 1,
    "Qwen4ExpVisionBlock": 2,
    "Zamba2MambaDecoderLayer": 1,
    "ZambaMambaDecoderLayer": 1,
}
"""{class of a block of transformers 5.15 to 5.24: sums in its forward}"""


SHARED = {"BailingHybridMoE": 1, "Glm5NextTextMoE": 1, "KimiLinearMoE": 1, "LaraMiniSparseMoeBlock": 1, "NemotronHMoE": 1}
"""{class that adds the output of shared experts: sums in its forward}. It calls no norm. Another number of sums is no objection."""
NAMES = ("_ssmgen_add", "_ssmgen_normed", "_ssmgen_branch", "_ssmgen_input")  # of functions that changed forwards call


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
        of_module = isinstance(x, ast.Call) and branch_texts.is_attribute(x.func)  # whose last product may add the residual
        text = f", lambda: 0, {ast.unparse(x.func)}" if of_module else ""  # type: ignore[attr-defined]
        made = ast.parse(f"_ssmgen_add(self, {self.count}, {residual}{text})", mode="eval").body
        assert isinstance(made, ast.Call)
        match made.args:
            case [*_, ast.Lambda() as call, _]:
                call.body = x
            case _:
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
def _tree(forward: Any) -> tuple[ast.Module, int, bool] | None:
    """(a maker of the forward with its sums replaced, their number, whether it calls norms); None without the function's whole source."""
    if not inspect.isfunction(forward) or forward.__code__.co_freevars or hasattr(forward, "__wrapped__"):
        return None  # getsourcelines returns the source of a decorated function without its decorator
    try:
        lines, first = inspect.getsourcelines(forward)
    except OSError:
        return None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or [a.arg for a in function.args.args][:1] != ["self"]:
        return None
    function.decorator_list = []
    branch_texts.fold(function)
    sums = _Sums()
    sums.visit(function)
    ast.increment_lineno(tree, first - 1)
    maker = ast.parse(f"def make({', '.join(NAMES)}):\n  pass")
    outer = maker.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function, ast.Return(ast.Name(function.name, ast.Load()))]
    return ast.fix_missing_locations(maker), sums.count, sums.norms


def count(block: Any) -> int:
    """Sums in the forward of a class that calls norms, or that has shared experts."""
    found = _tree(Forward(block).forward)
    return found[1] if found is not None and (found[2] or block.__name__ in SHARED) else 0


def objection(block: Any) -> str:
    """Why a block's sums are left alone, or nothing."""
    found, known = count(block), KNOWN.get(block.__name__)
    return "" if known in (None, found) else f"its forward adds to a residual {found} times; expected {known}"


def recognised(block: Any) -> str:
    """Why a block that is in no table is rewritten; empty for one that is."""
    found = count(block)
    return (
        ""
        if block.__name__ in KNOWN | SHARED or not found
        else f"it is not in ssmgen's table; its forward calls norms and adds to a residual {found} times"
    )


def rewritten(
    forward: Any, add: Callable[..., Any], normed: Callable[..., Any], branch: Callable[..., Any], multiplied: Callable[..., Any]
) -> Callable[..., Any]:
    """A forward of the same source except its sums, with the same globals, so patched names are looked up as before.

    add: takes (block, number of the sum, residual, x); normed: takes (norm, sum), where the forward casts a sum to the norm's dtype
    branch, multiplied: called with the arguments that `branch_texts` writes
    """
    found = _tree(forward)
    assert found is not None, "of `classes`, and these have sums"
    module = compile(found[0], inspect.getsourcefile(forward) or "<forward>", "exec")  # only its one function runs
    maker = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    run: Callable[..., Any] = FunctionType(maker, forward.__globals__)(add, normed, branch, multiplied)
    return run
