"""Colours of code on pages."""

from __future__ import annotations

from pygments.formatters import HtmlFormatter

from ssmgen.cli.highlight import coloured


def as_html(text: str, form: str) -> str:
    """<span>s to put into a <pre class="code">, everything escaped; `stylesheet` has their colours."""
    return coloured(text, form, HtmlFormatter(nowrap=True))


def stylesheet() -> str:
    """Colours of `as_html`, for light pages and, where the reader prefers that, for dark ones."""
    light, dark = (HtmlFormatter(style=style).get_style_defs(".code") for style in ("default", "github-dark"))
    return f"{_tokens(light)}\n@media (prefers-color-scheme: dark) {{\n{_tokens(dark)}\n}}\n"


def _tokens(css: str) -> str:
    """The rules for tokens, without rules for line numbers and for the page itself."""
    return "\n".join(line for line in css.splitlines() if line.startswith(".code .") and "background" not in line)
