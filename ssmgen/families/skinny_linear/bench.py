"""The benchmark of skinny_linear: x and output of one dtype, and weights of it, or of 8 bits with f32 scales.

Weights rotate over enough sets to exceed 640 MB: each call reads its weight from memory, as a decode step does. x and the output rotate
too. TB/s counts the weight, x and the output, each once. The ceiling is torch's multiplication out of place: it reads half of the
weight and writes the other half. The peer is torch.mm with `out`, which is cuBLAS, as torch.nn.functional.linear is; instead of weights of
8 bits it reads their products with the scales, in x's dtype. Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes
from ...bench.axes import At
from ...bench.case import Call, Case, Launch, kept, sets_of
from ...bench.engine import Bench, Values
from ...calls.checks import STORED_DTYPES, TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import DType, Narrow

# N x K: Mamba-Codestral's projections; a smaller model's; a head.
SHAPES = [(18560, 4096), (4096, 8192), (12288, 2048), (2048, 4096)]
CHECKED = 256  # rows of the weight that the correctness gate compares


class Stored(Enum):
    """The types of weights."""

    LIKE_X = "x"
    I8 = Narrow.I8.value
    E4M3 = Narrow.E4M3.value


def inputs(at: At, device: torch.device) -> Case:
    (n, k), rows, dtype = at.shape, at.rows, TORCH_DTYPES[at.dtype]
    narrow = None if at.weight is Stored.LIKE_X else Narrow(at.weight.value)
    stored = STORED_DTYPES[narrow] if narrow else dtype
    moved = n * k * stored.itemsize + rows * (n + k) * dtype.itemsize + (4 * n if narrow else 0)
    sets = sets_of(moved)
    weight, scales = torch.empty(sets, n, k, device=device, dtype=stored), {}
    for one in weight:
        values = torch.randn(n, k, device=device)
        one.copy_(values.mul_(narrow.largest / 5).clamp_(-narrow.largest, narrow.largest) if narrow else values.mul_(k**-0.5))
    if narrow:
        scales["scale"] = torch.rand(sets, n, device=device).add_(0.5).mul_(5 / narrow.largest * k**-0.5)
    x, out = torch.randn(sets, rows, k, device=device, dtype=dtype), torch.empty(sets, rows, n, device=device, dtype=dtype)
    half, some = n * k // 2, slice(min(CHECKED, n))

    def part(call: Call) -> Call:
        return {**call, **{name: call[name][some] for name in ("weight", *scales)}, "out": call["out"][:, some]}

    flat = weight.view(sets, -1).view(torch.uint8) if narrow else weight.view(sets, -1)
    return Case(
        function=ssmgen.skinny_linear,
        sets=sets,
        bytes=moved,
        rotating={"x": x, "weight": weight, "out": out, **scales},
        shared={},
        part=part,
        beside={"mul": lambda i: torch.mul(flat[i][:half], 1, out=flat[i][half : 2 * half])},
        ratios=("mul",),
        host=True,
    )


def cublas(case: Case) -> Launch:
    """cuBLAS, as torch.nn.functional.linear calls it."""
    calls = case.calls
    if "scale" in calls[0]:
        whole = [(c["weight"].to(c["x"].dtype) * c["scale"].to(c["x"].dtype)[:, None]) for c in calls]
        calls = [{**call, "weight": weight} for call, weight in zip(calls, whole, strict=True)]

    def run(i: int) -> torch.Tensor:
        call = calls[i]
        return torch.mm(call["x"], call["weight"].t(), out=call["out"])

    return kept(run)


def words(row: Mapping[str, Any]) -> str:
    weight = row.get("weight", Stored.LIKE_X.value)
    return f"{' x '.join(map(str, row['shape']))}, {row['dtype']}" + ("" if weight == Stored.LIKE_X.value else f", weights of {weight}")


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
        axes.several("--weight", "weights", axes.Choice(Stored), (Stored.LIKE_X,), "x: as --dtype; may repeat. Default: x.", later=True),
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
