"""The classes of transformers' modeling files and their source, without text that does not affect results."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cache
from types import ModuleType
from typing import Any

import torch

UNRELATED = ("__init__", "extra_repr")  # methods that a norm's result does not follow from


def own_modules(modeling: ModuleType) -> dict[str, Any]:
    """{name: class} of the modules of torch that a modeling file itself defines."""
    held = {name: c for name, c in vars(modeling).items() if isinstance(c, type) and c.__module__ == modeling.__name__}
    return {name: c for name, c in held.items() if issubclass(c, torch.nn.Module)}


class Bare(ast.NodeTransformer):
    """Takes out annotations, decorators and docstrings."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            node.body = node.body[1:]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


@cache
def of_class(kind: type) -> str:
    """The digest of a class's own methods; empty if the source is not available, as in a notebook."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return ""
    (found,) = tree.body
    if not isinstance(found, ast.ClassDef):
        return ""
    methods = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name not in UNRELATED]
    text = "\n".join(ast.unparse(Bare().visit(method)) for method in methods)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
