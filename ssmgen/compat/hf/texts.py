"""Digests of the source of transformers' classes, for table look-ups. Text that does not affect results is left out."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cache

UNRELATED = ("__init__", "extra_repr")  # methods that a norm's result does not follow from


class _Bare(ast.NodeTransformer):
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
    text = "\n".join(ast.unparse(_Bare().visit(method)) for method in methods)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
