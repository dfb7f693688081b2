"""Colours for the output of `show` and `diff`: CUDA, PTX, SASS and differences, by pygments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from pygments import highlight
from pygments.filter import Filter
from pygments.formatter import Formatter
from pygments.formatters import TerminalFormatter
from pygments.lexer import Lexer, RegexLexer
from pygments.lexers import CudaLexer, DiffLexer, PtxLexer
from pygments.token import Comment, Error, Generic, Keyword, Name, Number, Operator, Punctuation, String, Text, Token, Whitespace

# The terminal colours, among its sixteen, that are readable on a light and on a dark background.
_TERMINAL = {
    Token: "",
    Comment: "brightblack",
    Comment.Preproc: "cyan",
    Generic.Deleted: "red",
    Generic.Heading: "**",
    Generic.Inserted: "green",
    Generic.Subheading: "magenta",
    Keyword: "magenta",
    Keyword.Type: "cyan",
    Name.Attribute: "cyan",
    Name.Builtin: "cyan",
    Name.Decorator: "cyan",
    Name.Label: "**",
    Number: "green",
    Operator.Word: "magenta",
    String: "green",
}


class SassLexer(RegexLexer):
    """The output of nvdisasm: address, predicate, opcode with modifiers, operands; labels on separate lines."""

    name = "SASS of nvdisasm"
    tokens: ClassVar = {
        "root": [
            (r"\s+", Whitespace),
            (r"/\*[0-9a-f]+\*/", Comment),
            (r"\.L_\w+:?", Name.Label),
            (r"@!?U?P\w+", Name.Decorator),
            (r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)*", Keyword, "operands"),
        ],
        "operands": [
            (r";.*\n?|\n", Punctuation, "#pop"),
            (r"[ \t]+", Whitespace),
            (r"\.L_\w+", Name.Label),
            (r"U?(R|P)(\d+|Z|T)\b|(SR|SRZ|B|SB|UB)_?[A-Z0-9_.]*\b", Name.Variable),
            (r"-?0x[0-9a-f]+|-?\d+(\.\d+(e[+-]?\d+)?)?|[+-]?(INF|QNAN)", Number),
            (r"\b(c|cx|desc|gdesc)(?=\[)", Name.Builtin),
            (r"\.\w+", Name.Attribute),
            (r"[\[\],()`|!~+\-@*]", Punctuation),
            (r"\w+", Text),
        ],
    }


class Plain(Filter):
    """Leaves tokens without a colour as plain text, which saves a third of the HTML. Errors too: the PTX lexer does not know predicates."""

    KINDS = (Whitespace, Punctuation, Error, Name, Name.Variable, Operator)

    def filter(self, lexer: Lexer, stream: Iterator[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
        plain = ""
        for kind, text in stream:
            if kind in self.KINDS or kind in Text:
                plain += text
                continue
            if plain:
                yield Text, plain
                plain = ""
            yield kind, text
        if plain:
            yield Text, plain


LEXERS: dict[str, type[Lexer]] = {"cu": CudaLexer, "ptx": PtxLexer, "sass": SassLexer, "diff": DiffLexer}


def wanted() -> bool:
    """Whether a terminal should get colours: it can, and its user did not say no (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def for_terminal(text: str, form: str) -> str:
    """A text in one of the forms of LEXERS, with a terminal's colours."""
    return coloured(text, form, TerminalFormatter(colorscheme={token: (name, name) for token, name in _TERMINAL.items()}))


def coloured(text: str, form: str, formatter: Formatter) -> str:
    """A text in one of the forms of LEXERS, in a formatter's colours."""
    lexer = LEXERS[form](stripnl=False, ensurenl=False)
    lexer.add_filter(Plain())
    coloured: str = highlight(text, lexer, formatter)
    return coloured
