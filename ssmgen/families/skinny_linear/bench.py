"""The benchmark of skinny_linear: x, weight and output of one dtype.

Weights rotate over enough sets to exceed 640 MB: each call reads its weight from memory, as a decode step does. x and the output rotate
too. TB/s counts the weight, x and the output, each once. The ceiling is torch's multiplication out of place: it reads half of the
weight and writes the other half. The peer is torch.mm with `out`, which is cuBLAS, as torch.nn.functional.linear is. Host times are
eager calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes
from ...bench.axes import At
from ...bench.case import Call, Case, Launch, kept, sets_of
from ...bench.engine import Bench, Values
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import DType

# N x K: Mamba-Codestral's projections; a smaller model's; a head.
SHAPES = [(18560, 4096), (4096, 8192), (12288, 2048), (2048, 4096)]
CHECKED = 256  # rows of the weight that the correctness gate compares


def inputs(at: At, device: torch.device) -> Case:
    (n, k), rows, dtype = at.shape, at.rows, TORCH_DTYPES[at.dtype]
    moved = (n * k + rows * (n + k)) * dtype.itemsize
    sets = sets_of(moved)
    weight = torch.randn(sets, n, k, device=device, dtype=dtype).mul_(k**-0.5)
    x, out = torch.randn(sets, rows, k, device=device, dtype=dtype), torch.empty(sets, rows, n, device=device, dtype=dtype)
    half, some = n * k // 2, slice(min(CHECKED, n))

    def part(call: Call) -> Call:
        return {**call, "weight": call["weight"][some], "out": call["out"][:, some]}

    return Case(
        function=ssmgen.skinny_linear,
        sets=sets,
        bytes=moved,
        rotating={"x": x, "weight": weight, "out": out},
        shared={},
        part=part,
        beside={"mul": lambda i: torch.mul(weight[i].view(-1)[:half], 1.0, out=weight[i].view(-1)[half : 2 * half])},
        ratios=("mul",),
        host=True,
    )


def cublas(case: Case) -> Launch:
    """cuBLAS, as torch.nn.functional.linear calls it."""
    calls = case.calls

    def run(i: int) -> torch.Tensor:
        call = calls[i]
        return torch.mm(call["x"], call["weight"].t(), out=call["out"])

    return kept(run)


def words(row: Mapping[str, Any]) -> str:
    return f"{' x '.join(map(str, row['shape']))}, {row['dtype']}"


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """The shapes above, of 8 and 16 rows."""
    return [{"shape": shape, "rows": rows} for shape, rows in product(SHAPES, (8, 16))]


BENCH = Bench(
    op="skinny_linear",
    method=__doc__,
    axes=(
        axes.several(
            "--shape", "shapes", axes.Shape("N,K", "18560,4096"), SHAPES,
            "Rows of the weight, elements of each; may repeat. Default: four.",
        ),
        axes.several("--dtype", "dtypes", axes.Choice(DType), (DType.BF16,), "May repeat. Default: bf16."),
        axes.several("--rows", "rows", click.IntRange(1, 16), (1, 8, 16), "Of x; may repeat. Default: 1, 8, 16."),
    ),
    inputs=inputs,
    words=words,
    size_of="rows",
    size=lambda row: str(row["rows"]),
    peers={"cublas": cublas},
    quick={"rows": (1, 8)},
    tuned=tuned,
    label=lambda at: f"product of {at.rows} rows, {' x '.join(map(str, at.shape))}",
)  # fmt: skip
