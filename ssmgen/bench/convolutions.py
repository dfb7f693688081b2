"""Options that the benchmarks of short convolutions share."""

from __future__ import annotations

import click

from ..engine.window import MAX_WIDTH
from ..spec.kernel import DType
from . import axes

WIDTH = axes.one("--width", click.IntRange(2, MAX_WIDTH), 4, head=True)
DTYPE = axes.one("--dtype", axes.Choice(DType), DType.BF16, "Dtype of all operands.", head=True)
