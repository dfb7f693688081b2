"""The template lines that each variant renders, and a few variants that together render all of them.

`ssmgen generate` commits the text of those few. A test checks it: every line that a default variant renders must be in a committed text.
"""

from __future__ import annotations

import bisect
import functools
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from ..compile.render import environment, render, templates_dir
from ..spec.kernel import Arch, KernelSpec

Line = tuple[str, int]  # a template, relative to the folder of templates, and a line of it


def lines_of(spec: KernelSpec, arch: Arch) -> frozenset[Line]:
    """The template lines that are executed to render a variant. A Jinja template runs as Python code, which this traces."""
    root, seen = f"{templates_dir()}/", set()

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(root):
            return None

        def stepped(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                seen.add((name.removeprefix(root), frame.f_lineno))
            return stepped

        return stepped

    render(spec, arch)  # loads the templates: their outermost lines run only here
    before = sys.gettrace()
    sys.settrace(entered)
    try:
        render(spec, arch)
    finally:
        sys.settrace(before)
    return frozenset([(template, _line_of(template, number)) for template, number in seen])


def _line_of(template: str, number: int) -> int:
    """The template's line that a line of its Python code was compiled from."""
    starts, lines = _debug_info(template)
    at = bisect.bisect_right(starts, number)
    return lines[at - 1] if at else 1


@functools.cache
def _debug_info(template: str) -> tuple[list[int], list[int]]:
    pairs = sorted((code, line) for line, code in environment().get_template(template).debug_info)
    return [code for code, _ in pairs], [line for _, line in pairs]


def cover(lines: Mapping[str, frozenset[Line]], lengths: Mapping[str, int], kept: Iterable[str] = ()) -> list[str]:
    """Names of variants that together have every line: first variants of `kept` that add one, then the variant that adds the most.

    lines, lengths: by name, the template lines and the length of the text; the shorter text wins a tie
    """
    left = set().union(*lines.values())
    found = []

    def take(name: str) -> None:
        found.append(name)
        left.difference_update(lines[name])

    for name in sorted({*kept} & {*lines}, key=lambda name: (-len(lines[name]), name)):
        if lines[name] & left:
            take(name)
    while left:
        take(max(sorted(lines), key=lambda name: (len(lines[name] & left), -lengths[name])))
    return sorted(found)
