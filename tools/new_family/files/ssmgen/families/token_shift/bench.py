"""Cases and contenders for token_shift, all of one dtype.

State, x and output rotate over as many sets as exceed 640 MB, each set on random slots of its own; mix does not rotate. TB/s counts state
and x, read once, state and output, written once. The ceiling is torch's multiplication out of place, which moves as many bytes. The peer is
torch itself: a gather, lerp and a scatter. Host times are eager calls, arguments at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ... import runtime
from ...accuracy import norm_error
from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema, timing
from ...bench.progress import PRINTING, Watch
from ...bench.report import GATE, cell
from ...bench.rows import Point
from ...calls.checks import TORCH_DTYPES
from ...errors import SsmgenError
from ...models import Model
from ...spec import SM90, DType
from .reference import token_shift as reference

BATCHES = (1, 8, 64, 256)
DIMS = (4096,)
SET_BYTES = 640e6

OPTIONS = (
    cli.several("--dim", "dims", click.IntRange(1), help="Channels; may repeat. Default: 4096."),
    cli.several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1, 8, 64, 256."),
    cli.several("--dtype", "dtypes", cli.Choice(DType), help="May repeat. Default: bf16."),
)
REPORT = schema.Report({"dim": schema.COUNT, "dtype": schema.TEXT, "batch": schema.COUNT}, row=schema.MUL, **schema.MULTIPLIED)
QUICK: dict[str, Any] = {"batches": (1, 64)}


def of_model(model: Model, tp: int, quick: bool) -> None:
    """Options of `run` for a model: no model of models.toml says that it has this operator."""
    return None


@dataclass
class Case:
    """Rotating inputs of one size."""

    batch: int
    dim: int = DIMS[0]
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        self.sets = min(reports.MAX_SETS, max(reports.MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))
        rows, how = self.sets * self.batch, {"dtype": self.dtype, "device": self.device}
        self.read = torch.randn(self.sets, 2, self.batch, self.dim, **how)  # x, and as much again for the ceiling
        self.written = torch.empty_like(self.read)  # out, likewise
        self.mix = torch.rand(self.dim, **how)
        self.state = reports.normal_pool(rows, (self.dim,), self.dtype, self.device)
        self.slots = torch.randperm(rows, device=self.device).int().view(self.sets, self.batch)

    @property
    def function(self) -> Callable[..., Any]:
        return ssmgen.token_shift

    @property
    def bytes_moved(self) -> int:
        return 4 * self.batch * self.dim * self.dtype.itemsize

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        x, out = self.read[i, 0], self.written[i, 0]
        return {"state": self.state, "x": x, "mix": self.mix, "state_indices": self.slots[i], "out": out}

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.read[i], 1.0, out=self.written[i])

    def chain(self, i: int) -> Tensor:
        """What PyTorch does, kernel by kernel."""
        x, slots = self.read[i, 0], self.slots[i]
        out = torch.lerp(x, self.state[slots], self.mix)
        self.state[slots] = x
        return out

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call. Raises SsmgenError when it is more than its rounding."""
        call = self.arguments(0)
        state, right = self.state[self.slots[0]].double(), torch.empty_like(call["out"], dtype=torch.float64)
        reference(state, call["x"], self.mix, out=right, dtype=torch.float64)
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        error = norm_error(call["out"], right)
        if not error < GATE[self.dtype] or not torch.equal(self.state[self.slots[0]], call["x"]):
            raise SsmgenError(f"token_shift {self.batch} x {self.dim}: output error {error:.1e}, or another state; not timed")
        return error


def measure(case: Case, peers: bool, rounds: int, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case."""
    arch = runtime.device_arch(case.state.device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    error = max(reports.gates(case.gate, pdls))
    others = reports.usable({"torch.chain": case.chain}) if peers else {}
    contenders = {"ssmgen_pdl" if pdl else "ssmgen": reports.bound(case, pdl) for pdl in pdls} | {"mul": case.ceiling} | others
    watch.timing(len(contenders))
    us = timing.device_us(contenders, case.sets, rounds)
    served = us.get("ssmgen_pdl", us["ssmgen"])  # pdl=None is pdl=True where the device can
    return {
        "us": us,
        "sm_mhz": timing.sm_mhz(),
        "served_us": served,
        "bytes": case.bytes_moved,
        "tbs": case.bytes_moved / served / 1e6,
        "mul_ratio": served / us["mul"],
        "peer_ratio": {name: served / us[name] for name in others},
        "host_us": reports.host_us(case.function, (), case.arguments(0), others) if case.batch <= reports.HOST_BATCH else {},
        "out_error": error,
        **reports.served(case.function, (), case.arguments(0), arch),
    }


@torch.no_grad()
def run(
    dims: Sequence[int] = (),
    batches: Sequence[int] = (),
    dtypes: Sequence[DType] = (),
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__) | {"op": "token_shift"}
    points = list(itertools.product(dims or DIMS, dtypes or (DType.BF16,), batches or BATCHES))
    watch.begins(report["op"], len(points))
    for dim, dtype, batch in points:
        named = {"dim": dim, "dtype": dtype.value, "batch": batch}
        with reports.case(report, named, watch, _line) as row:
            row |= measure(Case(batch, dim, TORCH_DTYPES[dtype], device), peers, rounds, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    return Point(f"dim {row['dim']}, {row['dtype']}", "batch", str(row["batch"]), "out_of_place")


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['batch']} x {row['dim']} {row['dtype']}"


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = [*reports.head(report), f"{'token_shift':20}{'us':>9}{'TB/s':>7}{'mul':>9}{'x mul':>8}{'torch':>9}{'host us':>9}{reports.LAST}"]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        lines.append(
            f"{_what(row):20}" + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["mul"], 9) + cell(row["mul_ratio"], 8, 3)
            + cell(us.get("torch.chain"), 9) + cell(host.get("ssmgen"), 9) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
