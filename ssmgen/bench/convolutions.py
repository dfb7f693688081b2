"""What the benchmarks of short convolutions have in common: options, the gate, the columns of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from torch import Tensor

from ..accuracy import norm_error
from ..engine.window import MAX_WIDTH
from ..errors import SsmgenError
from ..spec import DType
from . import options as cli
from . import report as reports
from .report import GATE, cell

WIDTH = click.option("--width", type=click.IntRange(2, MAX_WIDTH), default=4, show_default=True)
DTYPE = click.option("--dtype", type=cli.Choice(DType), default=DType.BF16.value, show_default=True, help="Of x, and of all else.")


def checked(what: str, out: Tensor, expected: Tensor, states_equal: bool) -> float:
    """The output's norm error. Raises SsmgenError when that is more than its rounding, or states are wrong."""
    error = norm_error(out, expected)
    if not (error < GATE[out.dtype] and states_equal):
        raise SsmgenError(f"{what}: output error {error:.1e}, states {'as they should be' if states_equal else 'wrong'}; not timed")
    return error


def heading(peer: str) -> str:
    """The heading of the columns that all tables have; peer: a package."""
    return (
        f"{'us':>9}{'TB/s':>7}{'no pdl':>9}{'mul':>9}{'x mul':>8}{peer:>15}{'ratio':>7}"
        f"{'host us':>9}{'bound':>7}{'peer':>7}{'compile s':>11}{reports.LAST}"
    )


def columns(row: Mapping[str, Any], peer: str) -> str:
    """A row under the heading."""
    us, host = row["us"], row["host_us"]
    return (
        cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["ssmgen"], 9) + cell(us["mul"], 9) + cell(row["mul_ratio"], 8, 3)
        + cell(us.get(peer), 15) + cell(row["peer_ratio"].get(peer), 7) + cell(host.get("ssmgen"), 9)
        + cell(host.get("ssmgen_bound"), 7) + cell(host.get(peer), 7, 1) + cell(row["compile_seconds"], 11, 3)
        + reports.last(row)
    )  # fmt: skip
