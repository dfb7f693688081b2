"""Cases and contenders for causal_conv1d, with a bias and SiLU.

x and out rotate over as many sets as exceed 640 MB; weight and bias do not rotate. TB/s counts x, read once, and out, written once. The
ceiling is torch's multiplication of dense tensors of as many elements, out of place, on the memory of the same sets.

Forms. odd: an odd number of tokens, of a slice that begins one element into a wider tensor. varlen: all tokens packed as 8 sequences of
different lengths, with a pool of states, of which every second sequence has one. seq_idx: 8 sequences in each row. states: initial states
are read, final ones written.

Peer: Dao-AILab's causal_conv1d, which has seq_idx and states only where channels are contiguous, and nothing packed. It returns a new
tensor; that is kept until the set's next turn, so that its outputs rotate too. Host times are eager calls, arguments at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema
from ...bench.convolutions import DTYPE, WIDTH, checked, columns, heading
from ...bench.multiplied import PROMPT, keeping, measure
from ...bench.progress import PRINTING, Watch
from ...bench.rows import Point
from ...bench.schema import COUNT, TEXT
from ...calls.checks import TORCH_DTYPES
from ...models import Model
from ...spec import DType
from .reference import causal_conv1d as reference
from .spec import ConvLayout

SHAPES = [(1, 1536, 2048), (16, 1536, 2048), (4, 4096, 4096), (1, 8192, 8192), (1, 2048, 131072), (2, 12288, 16384)]
SET_BYTES, MIN_SETS = 640e6, 2
HOST_BYTES = 2**25  # host times are of cases up to this
SEQUENCES = 8
CHECKED = 16  # channels that the gate looks at


OPTIONS = (
    cli.several(
        "--shape",
        "shapes",
        cli.Shape("B,D,L", "1,1536,2048"),
        help="Batch, channels, tokens; may repeat. Default: six, 6 to 800 MB of x.",
    ),
    cli.several("--layout", "layouts", cli.Choice(ConvLayout), help="Which axis of x is contiguous; may repeat. Default: both."),
    cli.several("--form", "forms", click.Choice(["plain", "odd", "varlen", "seq_idx", "states"]), help="May repeat. Default: plain."),
    WIDTH,
    DTYPE,
)
REPORT = schema.Report(
    {"layout": TEXT, "form": TEXT, "width": COUNT, "dtype": TEXT, "shape": schema.list_of(COUNT, 3)},
    {"width": COUNT, "dtype": TEXT},
    schema.MUL,
    **schema.MULTIPLIED,
)
QUICK: dict[str, Any] = {"shapes": ((1, 1536, 2048), (4, 4096, 4096))}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a model that has a short convolution; tp: already divided by."""
    if not model.conv_channels:
        return None
    sizes = (1, 4) if quick else (1, 4, 16, 64)
    return {"shapes": tuple((n, model.conv_channels, PROMPT) for n in sizes), "width": model.conv_width}


class Form(Enum):
    PLAIN = "plain"
    ODD = "odd"
    VARLEN = "varlen"
    SEQ_IDX = "seq_idx"
    STATES = "states"


@dataclass
class Case:
    """Rotating inputs of one shape, (batch, dim, length)."""

    shape: tuple[int, int, int]
    layout: ConvLayout = ConvLayout.FIRST
    form: Form = Form.PLAIN
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        B, D, L = self.shape
        odd, packed = self.form is Form.ODD, self.form is Form.VARLEN
        B, L = (1, B * L) if packed else (B, (L - 1) | 1 if odd else L)
        first = self.layout is ConvLayout.FIRST
        rows = (B, D, L) if first else (B, L, D)
        self.numel = B * D * L
        self.sets = min(reports.MAX_SETS, max(MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))

        def made(*shape: int, margin: int = 0, fill: Callable[..., Tensor] = torch.randn) -> tuple[Tensor, Tensor]:
            """(what is convolved, the memory that it is of)"""
            memory = fill(*shape[:-1], shape[-1] + 2 * margin, device=self.device, dtype=self.dtype)
            inner = memory[..., margin : shape[-1] + margin]
            return (inner if first else inner.transpose(1, 2)), memory.flatten()

        def states(count: int) -> Tensor:
            return made(count, *((D, self.width - 1) if first else (self.width - 1, D)))[0]

        self.x, self.inputs = zip(*[made(*rows, margin=int(odd)) for _ in range(self.sets)], strict=True)
        self.out, self.outputs = zip(*[made(*rows, fill=torch.empty) for _ in range(self.sets)], strict=True)
        self.weight = torch.randn(D, self.width, device=self.device, dtype=self.dtype) / self.width**0.5
        self.bias = torch.randn(D, device=self.device, dtype=self.dtype)
        self.more: dict[str, Any] = {}
        cuts = torch.randperm(L - 1)[: SEQUENCES - 1].sort().values + 1
        self.starts = torch.tensor([0, *cuts.tolist(), L], dtype=torch.int32, device=self.device)
        count = len(self.starts) - 1  # SEQUENCES, or as many as there are tokens
        if packed:
            self.more = {
                "query_start_loc": self.starts,
                "conv_states": states(2 * count),
                "conv_state_indices": torch.randperm(2 * count, device=self.device)[:count].int(),
                "has_initial_state": torch.arange(count, device=self.device) % 2 == 0,
            }
        elif self.form is Form.SEQ_IDX:
            ids = torch.arange(count, device=self.device, dtype=torch.int32).repeat_interleave(self.starts.diff())
            self.more = {"seq_idx": ids.expand(B, L).contiguous()}
        elif self.form is Form.STATES:
            self.more = {"initial_states": states(B), "return_final_states": True, "final_states_out": states(B)}

    @property
    def function(self) -> Callable[..., Any]:
        return ssmgen.causal_conv1d

    @property
    def bytes_moved(self) -> int:
        return 2 * self.numel * self.dtype.itemsize

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        call = {"x": self.x[i], "weight": self.weight, "bias": self.bias, "activation": "silu"}
        return call | self.more | {"out": self.out[i]}

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.inputs[i][: self.numel], 1.0, out=self.outputs[i])

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64, in some channels. Raises SsmgenError when it is more than its rounding, or
        when a state is not the exact copy of inputs that it should be."""
        call = self.arguments(0)
        D = self.shape[1]
        some = torch.linspace(0, D - 1, min(D, CHECKED), device=self.device).long()
        state = next((n for n in ("conv_states", "final_states_out") if n in call), None)
        expected = {n: call[n][:, some].clone() for n in ("x", "out", "initial_states", "conv_states", "final_states_out") if n in call}
        expected["out"] = expected["out"].double()
        views = {n.removesuffix("_out"): t for n, t in expected.items()} | {"weight": self.weight[some], "bias": self.bias[some]}
        views |= {n: t for n, t in self.more.items() if n in ("query_start_loc", "conv_state_indices", "has_initial_state")}
        options: dict[str, Any] = {"silu": True, "dtype": torch.float64}
        if self.form is Form.SEQ_IDX:  # the same as packed sequences, of which the reference is faster
            for row in range(len(expected["x"])):
                one = {n: expected[n][row : row + 1] for n in ("x", "out")}
                reference(**views | one, query_start_loc=self.starts, **options)
        else:
            reference(**views, **options)
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        return checked(
            f"causal_conv1d {self.shape} {self.layout.value} {self.form.value}", call["out"][:, some], expected["out"],
            state is None or torch.equal(call[state][:, some], expected[state]),
        )  # fmt: skip


def dao(case: Case) -> reports.Peer | None:
    """Dao-AILab's kernels."""
    function = reports.imported(PEER, "causal_conv1d_fn")
    stateful = case.form in (Form.SEQ_IDX, Form.STATES)
    if function is None or case.form is Form.VARLEN or (stateful and case.layout is ConvLayout.FIRST):
        return None
    return keeping(function, [{n: t for n, t in case.arguments(i).items() if n != "out"} for i in range(case.sets)])


PEER = "causal_conv1d"
PEERS = {PEER: dao}


@torch.no_grad()
def run(
    shapes: Sequence[tuple[int, int, int]] = (),
    layouts: Sequence[ConvLayout] = (),
    forms: Sequence[Form | str] = (),
    width: int = 4,
    dtype: DType = DType.BF16,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__)
    report |= {"op": "causal_conv1d", "width": width, "dtype": dtype.value}
    points = list(itertools.product(map(Form, forms or [Form.PLAIN]), layouts or list(ConvLayout), shapes or SHAPES))
    watch.begins(report["op"], len(points))
    for form, layout, shape in points:
        named = {"shape": list(shape), "layout": layout.value, "form": form.value, "width": width, "dtype": dtype.value}
        with reports.case(report, named, watch, _line) as row:
            host = 2 * math.prod(shape) * dtype.size <= HOST_BYTES
            row |= measure(Case(shape, layout, form, width, TORCH_DTYPES[dtype], device), PEERS if peers else {}, rounds, host, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    what = f"{row['layout'].replace('_', ' ')}, {row['form']}, width {row['width']}, {row['dtype']}"
    return Point(what, "batch x channels x tokens", " x ".join(map(str, row["shape"])), "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['layout']} {row['form']} {tuple(row['shape'])}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's."""
    lines = [
        *reports.head(report),
        f"causal_conv1d: width {report['width']}, {report['dtype']}, bias, SiLU; (batch, dim, length)",
        f"{'case':44}{heading(PEER)}",
    ]
    return "\n".join(lines + [f"{_what(row):44}{columns(row, PEER)}" for row in report["rows"]])
