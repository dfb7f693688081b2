"""The time that the rules lose to a measured row. `ssmgen tuned` prints it, and a test bounds it for the rows that are shipped."""

from __future__ import annotations

from dataclasses import fields

from ..errors import SpecError
from ..select import registry
from ..select.catalog import parse
from ..select.tuned import Row, problem_of
from ..spec.kernel import Arch, KernelSpec


def ruled(row: Row) -> KernelSpec:
    """The variant that the rules choose today for the row's problem and size."""
    spec, kind = parse(row.spec), problem_of(row.operator)
    problem = kind(**{f.name: getattr(spec, f.name) for f in fields(kind)})
    return registry.select(row.operator, problem, row.size, Arch.parse(row.arch), row.pdl)


def loss(row: Row) -> float:
    """The loss of the rules relative to a valid row, as a share of its time: zero if they choose its variant by now, the runner-up's loss
    if they choose that variant, else the measured loss."""
    now = str(ruled(row))
    if now == _launched(row, row.spec):
        return 0.0
    return (row.runner_up_us if now == _runner_up(row) else row.rule_us) / row.us - 1


def _launched(row: Row, text: str) -> str:
    """The text of the variant that calls of the row's size launch for this one."""
    return str(registry.launched(row.operator, parse(text), row.size))


def _runner_up(row: Row) -> str:
    """The text of the second fastest variant, as it is launched; empty if it is no longer legal, or of another class."""
    family, _, said = row.spec.partition(":")
    values = dict(field.split("=", 1) for text in (said, row.runner_up) for field in text.split(",") if "=" in field)
    try:
        return _launched(row, f"{family}:{','.join(f'{name}={value}' for name, value in values.items())}")
    except SpecError:
        return ""
