"""Tables of operands: the tensors of a family's functions, declared once.

A row names a tensor, its axes and types, whether it is optional, and whether kernels write it. All other facts about tensors are derived
from the table: the order and constness of kernel parameters, strides and their widths, checks of shapes, types and overlap
(`calls/checks.py`), torch's operator schema (`calls/dispatch.py`), rules for DTensors, and the table in the operator's page.

Axes are words. A leading "token" stands for the axes of a call's tokens: [batch], [batch, tokens], or [tokens] of packed sequences.
`|` separates the forms that a call may give; kernels and the reference see the first one. "slot" and "batch" number sequences, "head"
numbers heads and "dim" the channels of a state without heads; a mesh of devices may divide all of these. "group" numbers the groups of
heads that share an operand. "token+" is an axis that may be longer than needed.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any

from .kernel import DType, Index, Narrow, Param

INTEGERS = {Index.I32: "int", Index.I64: "i64"}
LEAD = "token"  # as the first word of a form


class Types(Enum):
    """The element types that an operand may have, in the words of messages."""

    FLOAT = "float32, float16 or bfloat16"
    STATE = "float32, float16 or bfloat16, or with scales int16, int8 or float8_e4m3fn"
    WEIGHT = "float32, float16, bfloat16, or with scales int8 or float8_e4m3fn"
    INDEX = "int32 or int64"
    F32 = "float32"
    I32 = "int32"
    I64 = "int64"
    BOOL = "bool"
    BYTES = "uint8"


# Element types in kernels, for operands whose type is not a field of the problem.
_ELEMENT = {Types.F32: "f32", Types.I32: "int", Types.I64: "i64", Types.BOOL: "u8", Types.BYTES: "u8"}


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor.

    may_be: operands whose memory it may share, element by element, unless an operand of `unless` is given too
    scales: the operand that holds the scales of its rows, if it has a type with scales
    field: the spec's field that says its type, and whether it is there; its own name, if not given
    there: the spec's attributes that say whether it is present, if that is not the field: "stores&g"
    view: the axes as kernels and the reference see them; empty for the first form. `|` separates the kinds of calls
    role: its name in kernels, if different
    note: for its row of the operator's page
    writes: the spec's attributes that say whether its kernel writes it, if only some of a call's kernels do
    strides: the axes whose strides kernels take. "n?loose" is taken where the spec's attribute `loose` holds, "n?!dense" where `dense` does
        not, and "slot:64" is 64 bits wide
    """

    name: str
    axes: str
    types: Types = Types.FLOAT
    optional: bool = False
    written: bool = False
    may_be: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    scales: str = ""
    writes: str = ""
    field: str = ""
    there: str = ""
    strides: str = ""
    view: str = ""
    role: str = ""
    note: str = ""

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """The words of each form."""
        return tuple([tuple(form.split()) for form in self.axes.split("|")])

    def is_in(self, spec: Any) -> bool:
        """Whether a spec's kernels take it."""
        return holds(spec, self.there or (self.field or self.name if self.optional else ""))

    def element(self, spec: Any) -> str:
        """The type of its elements in a spec's kernels."""
        if not self.field and self.types in _ELEMENT:
            return _ELEMENT[self.types]
        return element_of(attrgetter(self.field or self.name)(spec))

    @property
    def parameter(self) -> str:
        """Its name in kernels."""
        return self.role or self.name


@functools.cache
def _conditions(said: str) -> tuple[tuple[Callable[[Any], Any], bool], ...]:
    """(getter of the attribute, whether it must hold) of each condition."""
    return tuple([(attrgetter(each.removeprefix("!")), not each.startswith("!")) for each in said.split("&") if each])


def holds(spec: Any, said: str) -> bool:
    """Whether attributes of a spec hold, such as "stores&g": neither false nor the type of an absent operand. "!g": g does not hold."""
    for get, wanted in _conditions(said):
        value = get(spec)
        if (value is not Index.NONE and bool(value)) is not wanted:
            return False
    return True


@functools.cache
def _strides(said: str) -> tuple[tuple[str, str, str], ...]:
    """(axis, "u32" or "i64", its condition) of each stride."""
    parts = [each.partition("?") for each in said.split()]
    return tuple([(taken.partition(":")[0], "i64" if ":" in taken else "u32", condition) for taken, _, condition in parts])


def element_of(value: Any) -> str:
    """The name of an element type in kernels."""
    if isinstance(value, (DType, Narrow)):
        return str(value.value)
    return INTEGERS[value] if isinstance(value, Index) else str(value)


def _tensors(names: tuple[str, ...]) -> Any:
    """The NamedTuple of operands of these names, each of which may be left out."""
    return namedtuple("Tensors", names, defaults=(None,) * len(names))


class Table:
    """The operands of one torch operator, in the order in which kernels take their pointers."""

    def __init__(self, operands: Iterable[Operand], words: Mapping[str, str] = {}):
        """words: axis -> its name in messages and pages, if that is not the word itself."""
        self.rows: dict[str, Operand] = {}
        for row in operands:
            like = row.axes.removeprefix("like ")
            if like == row.axes:
                self.rows[row.name] = row
            else:
                same = self.rows[like]
                self.rows[row.name] = replace(row, axes=same.axes, view=row.view or same.view, strides=row.strides or same.strides)
        self.words = {LEAD: "tokens", "batch": "batch", "slot": "slots", **words}
        self.names = tuple(self.rows)
        self.required = frozenset([name for name, row in self.rows.items() if not row.optional])
        written = [name for name, row in self.rows.items() if row.written]
        self.written = tuple(sorted(written, key=lambda name: name != "out"))  # messages name the output first
        self.in_place = tuple([(name, other, *row.unless) for name, row in self.rows.items() for other in row.may_be if other in self.rows])
        self.scales = {name: row.scales for name, row in self.rows.items() if row.scales}
        self.Tensors = _tensors(self.names)

    def __getitem__(self, name: str) -> Operand:
        return self.rows[name]

    def __iter__(self) -> Iterator[Operand]:
        return iter(self.rows.values())

    def only(self, *names: str, required: Iterable[str] = ()) -> Table:
        """The same table with these operands alone. required: operands that are optional for other functions."""
        needed = frozenset(required)
        rows = [row for row in self if not names or row.name in names]
        return Table([replace(row, optional=row.optional and row.name not in needed) for row in rows], self.words)

    def beside(self, *more: Operand) -> Table:
        """The same table with more operands at its end."""
        return Table([*self, *more], self.words)

    def turned(self, one: str, other: str) -> Table:
        """The same table with two axes swapped in the operands that have both."""
        swap = {one: other, other: one}
        forms = {row.name: row.axes.split() for row in self}
        changed = {n: " ".join(swap.get(word, word) for word in form) for n, form in forms.items() if {one, other} <= {*form}}
        return Table([replace(row, axes=changed.get(row.name, row.axes)) for row in self], self.words)

    def fields(self) -> dict[str, str]:
        """{field of the problem: operand} of operands whose type a field of the same name says."""
        typed = [row for row in self if row.types in (Types.FLOAT, Types.STATE) and (row.field or row.name) == row.parameter]
        return {row.parameter: row.name for row in typed}

    @functools.cache  # noqa: B019
    def alike(self, name: str) -> tuple[str, ...]:
        """The operands whose type is given by the same field, this one first."""
        field = self.rows[name].field or name
        return (name, *[other for other, row in self.rows.items() if other != name and (row.field or other) == field])

    @functools.cache  # noqa: B019
    def strided(self, name: str) -> int:
        """The number of axes of an operand's view up to the last stride that kernels take. The axes after it must be dense."""
        row = self.rows[name]
        view = (row.view.partition("|")[0] or row.axes.partition("|")[0]).split()
        return max([view.index(axis) + 1 for axis, _, _ in _strides(row.strides)], default=0)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The operands whose elements kernels may have to load one by one."""
        return tuple([name for name, row in self.rows.items() if "?loose" in row.strides])

    # Kernels.

    def of(self, spec: Any) -> list[str]:
        """The operands whose pointers a spec's kernel takes, in order."""
        return [row.name for row in self if row.is_in(spec)]

    # `names`: the operands that a kernel takes, if not `of(spec)`.

    def written_by(self, spec: Any) -> list[str]:
        """The operands that a spec's kernel may write, in order."""
        return [row.name for row in self if row.written and row.is_in(spec) and holds(spec, row.writes)]

    def pointers(self, spec: Any, names: Iterable[str] | None = None) -> list[Param]:
        """The kernel's parameters for these operands; const, unless it writes them."""
        taken, changed = self.of(spec) if names is None else names, self.written_by(spec)
        return [Param.pointer(self.rows[name].parameter, self.rows[name].element(spec), const=name not in changed) for name in taken]

    def _taken(self, spec: Any, names: Iterable[str] | None) -> Iterator[tuple[Operand, str, str]]:
        """(operand, axis, "u32" or "i64") of every stride that a kernel takes."""
        for name in self.of(spec) if names is None else names:
            row = self.rows[name]
            for axis, width, condition in _strides(row.strides):
                if holds(spec, condition):
                    yield row, axis, width

    def strides(self, spec: Any, names: Iterable[str] | None = None) -> list[tuple[str, str, str]]:
        """(operand's name in kernels, axis, "u32" or "i64") of every stride that the kernel takes, in elements."""
        return [(row.parameter, axis, width) for row, axis, width in self._taken(spec, names)]

    def stride_params(self, spec: Any) -> list[Param]:
        """The kernel's parameters for these strides. 8-byte parameters come first, so the buffer needs no padding."""
        params = [(Param.i64 if width == "i64" else Param.u32)(f"{name}_{axis}") for name, axis, width in self.strides(spec)]
        return sorted(params, key=lambda param: param.code != "q")

    @functools.cache  # noqa: B019  # tables live as long as the process
    def axis_of(self, name: str, axis: str, dims: int, kind: int = 0) -> int:
        """The number of an axis of an operand's view with `dims` axes. kind: of the call, where views have several."""
        row = self.rows[name]
        views = [view.split() for view in row.view.split("|")] if row.view else []
        for form in views[min(kind, len(views) - 1) :][:1] if views else row.forms:
            words = [word.rstrip("+") for word in form]
            full = ["batch", *words] if words[0] == LEAD else words
            if axis in full:
                return ([word for word in full if word != LEAD] if words[0] == LEAD and len(full) > dims else full).index(axis)
        raise LookupError(f"{name} has no axis {axis}")

    def stride_values(self, spec: Any, views: Mapping[str, Any], kind: int = 0, names: Iterable[str] | None = None) -> dict[str, int]:
        """The values of those parameters, for the views of a call of this kind."""
        return {
            f"{row.parameter}_{axis}": views[row.name].stride(self.axis_of(row.name, axis, views[row.name].dim(), kind))
            for row, axis, _ in self._taken(spec, names)
        }

    # Shapes.

    def label(self, words: Iterable[str], lead: str) -> str:
        """A form as messages show it. lead: the axes of tokens, such as "batch, tokens"."""
        shown = [lead if i == 0 and word == LEAD else self._shown(word) for i, word in enumerate(words)]
        return f"[{', '.join(shown)}]"

    def _shown(self, word: str) -> str:
        plain = self.words.get(word.rstrip("+"), word.rstrip("+"))
        return f"{plain} or more" if word.endswith("+") else plain

    def shapes(
        self, name: str, sizes: Mapping[str, int], lead: tuple[str, Sequence[int]], have: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        """{form in words: sizes} of the shapes that an operand may have; its actual shape is `have`. sizes: of the words that this call
        knows; forms with other words belong to other calls. lead: the axes of its tokens, in words and sizes."""
        found: dict[str, tuple[int, ...]] = {}
        for words in self.rows[name].forms:
            first = lead[1] if words[0] == LEAD else ()
            inner = words[1:] if words[0] == LEAD else words
            if not all(word.rstrip("+") in sizes or word.isdigit() for word in inner):
                continue
            wanted = [*first, *[int(word) if word.isdigit() else sizes[word.rstrip("+")] for word in inner]]
            if len(have) == len(wanted):
                longer = [word.endswith("+") for word in (*[""] * len(first), *inner)]
                wanted = [max(h, w) if more else w for h, w, more in zip(have, wanted, longer, strict=True)]
            found[self.label(words, lead[0])] = tuple(wanted)
        return found

    def form_of(self, name: str, shape: Sequence[int], sizes: Mapping[str, int], lead: int) -> tuple[str, ...]:
        """The words of the form that an operand of this shape has, in a call with these sizes. lead: the number of token axes."""
        for words in self.rows[name].forms:
            first, inner = (lead, words[1:]) if words[0] == LEAD else (0, words)
            wanted = [int(word) if word.isdigit() else sizes.get(word.rstrip("+")) for word in inner]
            fits = [
                have == want or (word.endswith("+") and want is not None)
                for have, want, word in zip(shape[first:], wanted, inner, strict=False)
            ]
            if len(shape) == first + len(inner) and all(fits):
                return words
        raise LookupError(f"{name} has no form {list(shape)}")

    def view(self, name: str, t: Any, sizes: Mapping[str, int], lead: int = 1) -> Any:
        """A checked operand in its first form. Missing axes are expanded with stride 0; axes that the call lacks have size 1.

        "dim" stands for "row"."""
        words, target = self.form_of(name, t.shape, sizes, lead), self.rows[name].forms[0]
        if words == target:
            return t
        if words == ("1",):
            return t.expand(sizes[target[0]])
        axis = lead if target[0] == LEAD else 0
        for word in target[1:] if target[0] == LEAD else target:
            if word not in words and not (word == "row" and "dim" in words):
                t = t.unsqueeze(axis)
                if word in sizes:
                    t = t.expand(*t.shape[:axis], sizes[word], *t.shape[axis + 1 :])
            axis += 1
        return t

    @property
    def tokenwise(self) -> tuple[str, ...]:
        """The operands with an axis of tokens."""
        return tuple([name for name, row in self.rows.items() if row.forms[0][0] == LEAD])

    # DTensors.

    def axes(self, leads: Sequence[str] = ("*",)) -> dict[str, str]:
        """The same axes in the words of `calls/sharding.py`. leads: the words for the axes of tokens, one for each form of a call."""
        known = {"slot": "batch", "kept": "batch", "sequences": "batch", "dim": "head"}
        found: dict[str, str] = {}
        for name, row in self.rows.items():
            forms: list[str] = []
            for form in row.forms:
                words = [known.get(word, word) for word in (word.rstrip("+").split("*")[0] for word in form)]
                forms += [" ".join((lead, *words[1:])) for lead in leads] if form[0] == LEAD else [" ".join(words)]
            found[name] = "|".join(dict.fromkeys(forms))
        return found

    # torch.

    def schema(self, optional: Iterable[int] = ()) -> list[str]:
        """The operands in the form of torch's operator schemas. optional: positions of further operands that a call may leave out."""
        letters, more = iter("abcdefghijklmnopqrstuvwxyz"), frozenset(optional)
        return [
            f"Tensor{f'({next(letters)}!)' if row.written else ''}{'?' if row.optional or i in more else ''} {row.name}"
            for i, row in enumerate(self)
        ]

    # Pages.

    def page(self, given: Collection[str] = ()) -> str:
        """The table of an operator's page. given: arguments without a default, of which optional ones are given as None."""
        lines = ["| operand | shape | type | |", "|---|---|---|---|"]
        for row in self:
            shapes = " or ".join([f"`{self.label(words, '…')}`" for words in row.forms])
            about = [
                *(["may be None" if row.name in given else "may be left out"] if row.optional else []),
                *(["written"] if row.written else []),
                *([row.note] if row.note else []),
            ]
            lines.append(f"| `{row.name}` | {shapes} | {row.types.value} | {'; '.join(about)} |")
        return "\n".join(lines)


def table(*operands: Operand, **words: str) -> Table:
    """The table of these operands. words: axis -> its name in messages and pages, if that is not the word itself."""
    return Table(operands, words)
