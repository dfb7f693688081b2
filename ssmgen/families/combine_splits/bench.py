"""The benchmark of combine_splits: LSEs of base 2, bf16 output, its LSE written too.

Forms. dense: every row has all splits, [n, splits, heads, d_v], passed as a view with splits first. prefix: partial results in
one list, [entries x splits, heads, d_v], with num_splits on the device. pair: two tensors. Heads are 128, or all rows if there are fewer.

Cold: inputs and outputs rotate over enough sets to exceed 640 MB. Hot: one set, if it fits into 30 MB, so that the inputs are in the L2
cache, as right after the attention kernel. TB/s counts partial results and LSEs, read once, outputs and their LSEs, written once.
Ceilings: torch's out-of-place multiplication, which moves the same number of bytes, half of them written; and torch.sum, which reads the
same number of bytes.

Peers: FlashInfer's merge_states, variable_length_merge_states (Triton) and merge_state, for 16-bit values; results that fail the
correctness gate are omitted. They return new tensors, which are kept until the set's next turn. Host times are eager calls with prepared
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes, schema
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import GATE, HOT, Call, Case, Launch, keeping
from ...bench.engine import Bench, Values
from ...bench.prompts import prompt_sets
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import DType

SHAPES = [(16, 2), (16, 64), (128, 2), (128, 16), (128, 64), (1024, 8), (1024, 32), (16384, 2), (16384, 8), (16384, 32)]
HEADS = 128
HOST_ROWS = 1024  # host times are measured up to this size
CHECKED = 64  # entries of out's first axis that the correctness gate compares


class Form(Enum):
    DENSE = "dense"
    PREFIX = "prefix"
    PAIR = "pair"


def settle(at: At) -> Iterator[At]:
    """The case if it exists: a pair has two splits, and a hot case fits into the cache."""
    rows, splits = at.shape
    if (at.form is not Form.PAIR or splits == 2) and not (at.hot and rows * splits * at.d_v * at.dtype.size > HOT):
        yield at


def inputs(at: At, device: torch.device) -> Case:
    (rows, splits), d_v, form, dtype = at.shape, at.d_v, at.form, TORCH_DTYPES[at.dtype]
    heads = math.gcd(rows, HEADS)
    n = rows // heads
    moved = rows * (splits * (d_v * dtype.itemsize + 4) + d_v * 2 + 4)
    sets = 1 if at.hot else prompt_sets(moved)
    inner = {Form.DENSE: (n, splits, heads), Form.PREFIX: (n * splits, heads), Form.PAIR: (2, n, heads)}[form]
    room = -(-moved // dtype.itemsize)  # the ceilings move the same number of bytes
    memory = [torch.randn(room, device=device, dtype=dtype) for _ in range(sets)]
    v, s = ([m[: math.prod(inner) * d_v].view(*inner, d_v) for m in memory], [2 * torch.randn(inner, device=device) for _ in range(sets)])
    starts = torch.arange(0, n * splits + 1, splits, dtype=torch.int32, device=device)
    made: Any = tuple if form is Form.PAIR else (lambda t: t) if form is Form.PREFIX else (lambda t: t.transpose(0, 1))
    rotating = {"o": [*map(made, v)], "lse": [*map(made, s)]}
    rotating |= {"out": [torch.empty(n, heads, d_v, device=device, dtype=torch.bfloat16) for _ in range(sets)]}
    rotating |= {"lse_out": [torch.empty(n, heads, device=device) for _ in range(sets)]}
    half, total, some = room // 2, torch.empty((), device=device, dtype=dtype), slice(min(CHECKED, n))

    def part(call: Call) -> Call:
        chosen = {name: call[name][some] for name in ("out", "lse_out")}
        if form is Form.PREFIX:
            return {**call, **chosen, "num_splits": starts[: some.stop + 1]}
        taken = {name: tuple(t[some] for t in call[name]) if form is Form.PAIR else call[name][:, some] for name in ("o", "lse")}
        return {**call, **chosen, **taken}

    return Case(
        function=ssmgen.combine_splits,
        sets=sets,
        bytes=moved,
        rotating=rotating,
        shared={"lse_base": 2} | ({"num_splits": starts} if form is Form.PREFIX else {}),
        part=part,
        outputs=("out", "lse_out"),
        beside={
            "mul": lambda i: torch.mul(memory[i][:half], 1.0, out=memory[i][half : 2 * half]),
            "sum": lambda i: torch.sum(memory[i], dim=0, out=total),
        },
        ratios=("mul", "sum"),
        peer_limits={"out": 2 * GATE[torch.bfloat16], "lse_out": 1e-3},
        host=rows <= HOST_ROWS,
        more={"v": v, "s": s},
    )


def flashinfer(name: str, module: str, form: Form) -> Any:
    """A peer: FlashInfer's function for this form."""

    def make(case: Case) -> Launch | None:
        function = reports.imported(module, name) if case.at.form is form and case.at.dtype is not DType.F32 else None
        if function is None:
            return None
        calls: list[tuple[Any, ...]] = [*zip(case.more["v"], case.more["s"], strict=True)]
        if form is Form.PREFIX:
            calls = [(*call, case.shared["num_splits"]) for call in calls]
        elif form is Form.PAIR:
            calls = [(v[0], s[0], v[1], s[1]) for v, s in calls]
        return keeping(lambda call: function(*call), [{"call": call} for call in calls])

    return make


def words(row: Mapping[str, Any]) -> str:
    return f"{row['form']}, d_v {row['d_v']}, {row['dtype']}, {'hot: in the L2 cache' if row['hot'] else 'cold'}"


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """The shapes above: no model is known to merge splits."""
    found = product((Form.DENSE, Form.PREFIX), (DType.F32, DType.BF16), (128, 512), SHAPES)
    return [{"form": form, "dtype": dtype, "d_v": d_v, "shape": shape, "hot": False} for form, dtype, d_v, shape in found]


BENCH = Bench(
    op="combine_splits",
    method=__doc__,
    axes=(
        axes.forms(Form, (Form.DENSE, Form.PREFIX), "dense, prefix"),
        axes.several(
            "--dtype", "dtypes", axes.Choice(DType), (DType.F32, DType.BF16),
            "Dtype of partial results; may repeat. Default: f32, bf16; peers take bf16 only.",
        ),
        axes.several("--d-v", "widths", click.IntRange(4, 1024), (128, 512), "Value channels; may repeat. Default: 128, 512."),
        axes.several(
            "--shape", "shapes", axes.Shape("R,S", "128,16"), SHAPES, "Numbers of rows and splits; may repeat. "
                "Default: ten, from 16,2 to 16384,32."
        ),
        axes.HOT,
    ),
    inputs=inputs,
    words=words,
    size_of="rows x splits",
    size=lambda row: " x ".join(map(str, row["shape"])),
    peers={
        "flashinfer.merge_states": flashinfer("merge_states", "flashinfer", Form.DENSE),
        "flashinfer.variable_length_merge_states": flashinfer("variable_length_merge_states", "flashinfer.triton.cascade", Form.PREFIX),
        "flashinfer.merge_state": flashinfer("merge_state", "flashinfer", Form.PAIR),
    },
    quick={"shapes": ((128, 16), (1024, 8)), "widths": (512,), "dtypes": (DType.BF16,)},
    settle=settle,
    measured_fields={"sum_ratio": schema.RATIO},
    tuned=tuned,
    label=lambda at: f"combine, {at.form.value} {at.shape} d_v {at.d_v} {at.dtype.value}",
)  # fmt: skip
