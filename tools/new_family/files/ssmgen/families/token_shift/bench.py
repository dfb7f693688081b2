"""The benchmark of token_shift, all of one dtype.

State, x and output rotate over enough sets to exceed 640 MB, each set on different random slots; mix does not rotate. TB/s counts state and
x, read once, state and output, written once. The ceiling is torch's multiplication out of place, which moves the same number of bytes. The
peer is torch itself: a gather, lerp and a scatter. Host times are eager calls with prepared arguments.
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
from ...bench.case import EXACT, HOST_BATCH, Case, Launch, drawn, kept, normal_pool, sets_of, some_of, some_rows
from ...bench.engine import Bench, Values
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import DType

DIMS = (4096,)
CHECKED = 8  # rows that are held against float64


def inputs(at: At, device: torch.device) -> Case:
    """The calls of one case. Each has other inputs and slots."""
    B, dim, dtype = at.batch, at.dim, TORCH_DTYPES[at.dtype]
    moved = 4 * B * dim * dtype.itemsize
    sets = sets_of(moved)
    read = torch.randn(sets, 2, B, dim, device=device, dtype=dtype)  # x, and as much again for the ceiling
    written = torch.empty_like(read)  # out, likewise
    rows = some_of(B, CHECKED, device)
    return Case(
        function=ssmgen.token_shift,
        sets=sets,
        bytes=moved,
        rotating={"x": read[:, 0], "out": written[:, 0], "state_indices": drawn(sets * B, sets, B, device)},
        shared={"state": normal_pool(sets * B, (dim,), dtype, device), "mix": torch.rand(dim, device=device, dtype=dtype)},
        part=lambda call: some_rows(call, rows, ("x", "out")),
        limits={"state": EXACT},  # it becomes x
        beside={"mul": lambda i: torch.mul(read[i], 1.0, out=written[i])},
        ratios=("mul",),
        host=B <= HOST_BATCH,
    )


def chain(case: Case) -> Launch:
    """PyTorch's kernels, one after the other."""
    calls = case.calls

    def run(i: int) -> torch.Tensor:
        call = calls[i]
        state, slots = call["state"], call["state_indices"]
        out = torch.lerp(call["x"], state[slots], call["mix"])
        state[slots] = call["x"]
        return out

    return kept(run)


def words(row: Mapping[str, Any]) -> str:
    return f"dim {row['dim']}, {row['dtype']}"


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """The default channels: no model shifts tokens."""
    return [{"dim": dim, "batch": batch} for dim, batch in product(DIMS, batches)]


BENCH = Bench(
    op="token_shift",
    method=__doc__,
    axes=(
        axes.several("--dim", "dims", click.IntRange(1), DIMS, "Channels; may repeat. Default: 4096."),
        axes.several("--dtype", "dtypes", axes.Choice(DType), (DType.BF16,), "May repeat. Default: bf16."),
        axes.batches(1, 8, 64, 256),
    ),
    inputs=inputs,
    words=words,
    peers={"torch.chain": chain},
    quick={"batches": (1, 64)},
    tuned=tuned,
    label=lambda at: f"token_shift, dim {at.dim} batch {at.batch}",
)
