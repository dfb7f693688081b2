"""Cases and contenders for selective_scan: bf16 but for A, D, the bias and states, which are f32; softplus, D, a gate; N 16, one group.

Inputs and outputs rotate over as many sets as exceed 640 MB; A, D and delta_bias do not rotate. Bytes: u, delta, z, B, C and the output
once, and the states that are written. The ceiling is torch's multiplication of dense tensors, out of place, that moves as many bytes.

Forms. first: [batch, dim, T], tokens contiguous, as mamba-ssm has them. last: [batch, T, dim], channels contiguous. Sequences of equal
lengths, from zeros, which leave their final states.

Peer: mamba-ssm's selective_scan_fn, of channels first. It returns new tensors; those are kept until the set's next turn, so that its
outputs rotate too. Host times are eager calls, arguments at hand.
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

from ...accuracy import norm_error
from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema
from ...bench.multiplied import PROMPT, keeping, measure
from ...bench.progress import PRINTING, Watch
from ...bench.report import GATE, cell
from ...bench.rows import Point
from ...bench.schema import COUNT, TEXT
from ...errors import SsmgenError
from ...models import Model
from .reference import selective_scan as reference

SHAPES = [(8192, 1, 2048), (8192, 1, 8192), (8192, 1, 32768), (8192, 8, 2048)]
SET_BYTES, MIN_SETS = 640e6, 2
HOST_TOKENS = 2048  # host times are of cases up to this
CHECKED = 64  # channels that are compared with float64: as many as are next to each other in any block, and of others


class Form(Enum):
    FIRST = "first"
    LAST = "last"


OPTIONS = (
    cli.several("--shape", "shapes", cli.Shape("D,B,T", "8192,1,8192"), help="Channels, sequences, tokens; may repeat. Default: four."),
    cli.several("--form", "forms", click.Choice([form.value for form in Form]), help="May repeat. Default: both."),
    click.option("--d-state", type=click.IntRange(1, 256), default=16, show_default=True),
)
REPORT = schema.Report({"form": TEXT, "d_state": COUNT, "shape": schema.list_of(COUNT, 3)}, {}, schema.MUL, **schema.MULTIPLIED)
QUICK: dict[str, Any] = {"shapes": ((8192, 1, 2048),)}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a Mamba-1; tp: already divided by."""
    if model.kind != "mamba1":
        return None
    dim, d_state, _ = model.shape
    return {"shapes": tuple((dim, n, PROMPT) for n in ((1,) if quick else (1, 4, 16))), "d_state": d_state}


@dataclass
class Case:
    """Rotating inputs of one shape, (channels, sequences, tokens of each)."""

    shape: tuple[int, int, int]
    form: Form = Form.LAST
    d_state: int = 16
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        dim, count, length = self.shape
        N = self.d_state
        self.sets = min(reports.MAX_SETS, max(MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))

        def made(inner: int) -> Tensor:
            axes = (inner, length) if self.form is Form.FIRST else (length, inner)
            return torch.randn(self.sets, count, *axes, device=self.device, dtype=torch.bfloat16)

        self.u, self.delta, self.z, self.B, self.C = made(dim), made(dim), made(dim), made(N), made(N)
        self.out = torch.empty_like(self.u)
        # Log-uniform, as trained ones are or so; steps of 0.001 … 0.1.
        self.A = -torch.exp(torch.rand(dim, N, device=self.device) * math.log(N))
        self.D, self.bias = torch.ones(dim, device=self.device), torch.rand(dim, device=self.device) * 4.6 - 6.9
        self.states = torch.zeros(self.sets, count, dim, N, device=self.device)
        words = self.bytes_moved // 8
        self.copied = [torch.empty(self.sets, words, device=self.device) for _ in range(2)]

    @property
    def function(self) -> Callable[..., Any]:
        return ssmgen.selective_scan

    @property
    def bytes_moved(self) -> int:
        dim, count, length = self.shape
        return count * (length * (8 * dim + 4 * self.d_state) + 4 * dim * self.d_state)

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        call: dict[str, Any] = {
            "u": self.u[i],
            "delta": self.delta[i],
            "A": self.A,
            "B": self.B[i],
            "C": self.C[i],
            "D": self.D,
            "z": self.z[i],
        }
        how = {"delta_softplus": True, "channels_first": self.form is Form.FIRST, "return_final_states": True}
        return call | how | {"delta_bias": self.bias, "final_states_out": self.states[i], "out": self.out[i]}

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.copied[0][i], 1.0, out=self.copied[1][i])

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64, in some channels. Raises SsmgenError when it, or that of states, is more than
        that of bf16 outputs."""
        call = self.arguments(0)
        dim = self.shape[0]
        some = torch.arange(0, dim, max(1, dim // CHECKED), device=self.device)[:CHECKED]

        def view(name: str) -> Tensor:
            t: Tensor = call[name]
            return t.transpose(1, 2) if self.form is Form.FIRST else t

        views: dict[str, Any] = {n: view(n)[..., some] for n in ("u", "delta", "z")} | {n: view(n).unsqueeze(2) for n in "BC"}
        views |= {n: call[n][some] for n in ("A", "D", "delta_bias")}
        expected = {"out": torch.empty_like(views["u"], dtype=torch.float64), "final_states": call["final_states_out"][:, some].double()}
        reference(**views, **expected, delta_softplus=True, dtype=torch.float64)
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        found = view("out")[..., some], call["final_states_out"][:, some]
        errors = [norm_error(a.reshape(1, -1), b.reshape(1, -1)) for a, b in zip(found, expected.values(), strict=True)]
        if not max(errors) < GATE[torch.bfloat16]:
            raise SsmgenError(
                f"selective_scan {self.shape} {self.form.value}: errors {errors[0]:.1e} and {errors[1]:.1e} of states; not timed"
            )
        return errors[0]


def mamba_ssm(case: Case) -> reports.Peer | None:
    function = reports.imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    if function is None or case.form is not Form.FIRST:
        return None
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")
    calls = [{n: call[n] for n in names} | {"return_last_state": True} for call in map(case.arguments, range(case.sets))]
    return keeping(function, calls)


PEERS = {"mamba_ssm.selective_scan_fn": mamba_ssm}


def run(
    shapes: Sequence[tuple[int, int, int]] = (),
    forms: Sequence[str] = (),
    d_state: int = 16,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__) | {"op": "selective_scan"}
    points = list(itertools.product(map(Form, forms or [form.value for form in Form]), shapes or SHAPES))
    watch.begins(report["op"], len(points))
    for form, shape in points:
        named = {"form": form.value, "d_state": d_state, "shape": list(shape)}
        with reports.case(report, named, watch, _line) as row:
            host = shape[1] * shape[2] <= HOST_TOKENS
            row |= measure(Case(shape, form, d_state, device), PEERS if peers else {}, rounds, host, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    dim, count, length = row["shape"]
    return Point(f"channels {row['form']}, {dim} x {row['d_state']}", "sequences x tokens", f"{count} x {length}", "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['form']} {' x '.join(map(str, row['shape']))}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's."""
    peer = next(iter(PEERS))
    ours, host = f"{'us':>10}{'TB/s':>7}{'no pdl':>10}{'mul':>9}{'x mul':>8}", f"{'host us':>9}{'bound':>7}{'compile s':>11}"
    heading = f"{ours}{'mamba-ssm':>11}{'ratio':>7}{host}"
    lines = [*reports.head(report), "selective_scan: channels x sequences x tokens", f"{'case':24}{heading}{reports.LAST}"]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        lines.append(
            f"{_what(row):24}" + cell(row["served_us"], 10) + cell(row["tbs"], 7) + cell(us["ssmgen"], 10) + cell(us["mul"], 9)
            + cell(row["mul_ratio"], 8, 3) + cell(us.get(peer), 11) + cell(row["peer_ratio"].get(peer), 7) + cell(host.get("ssmgen"), 9)
            + cell(host.get("ssmgen_bound"), 7) + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
