"""Cases and contenders for causal_conv1d_update, with a bias and SiLU.

Slots are drawn at random from a pool of 640 MB, or of four batches if that is more; every set has slots and inputs of its own, weight and
bias do not rotate. Several tokens: the window rolls, and of each sequence's last tokens a random number was accepted. TB/s counts x, out,
the width - 1 inputs of each channel's window that are read, and all of the window that is written: 16 bytes per channel for one token,
width 4 and 16-bit types. The ceiling is torch's multiplication in place, of as many bytes of the pool, dense. Beside a draft tree the same
tokens are timed as a chain.

Peer: Dao-AILab's causal_conv1d_update, for one token; it does not roll. It returns a new tensor; that is kept until the set's next turn.
Host times are eager calls, arguments at hand.
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
from ...bench.multiplied import keeping, measure
from ...bench.progress import PRINTING, Watch
from ...bench.report import HOST_BATCH, MIN_SETS, cell
from ...bench.rows import Point
from ...bench.schema import COUNT, FLAG, TEXT
from ...calls.checks import TORCH_DTYPES
from ...models import Model
from ...spec import DType, must
from .reference import causal_conv1d_update as reference

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
POOL_BYTES = 640e6
MAX_SETS = 2048  # slots are small: fewer would stay in the cache
CHECKED = 8  # rows that the gate looks at


OPTIONS = (
    cli.batches,
    cli.several("--tokens", "tokens", click.IntRange(1), help="Per sequence; may repeat. Several: the window rolls. Default: 1."),
    cli.several("--state-layout", "layouts", click.Choice(["window", "channels"]), help="What is contiguous; may repeat. Default: both."),
    click.option("--dim", type=click.IntRange(1), default=12288, show_default=True),
    WIDTH,
    DTYPE,
    cli.tree,
)
REPORT = schema.Report(
    {"layout": TEXT, "tokens": COUNT, "batch": COUNT, "dim": COUNT, "width": COUNT, "dtype": TEXT},
    {"dim": COUNT, "width": COUNT, "dtype": TEXT, "tree?": FLAG},
    schema.MUL,
    **schema.MULTIPLIED,
)
QUICK: dict[str, Any] = {"batches": (1, 16, 128)}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a model that has a short convolution; tp: already divided by."""
    return {"dim": model.conv_channels, "width": model.conv_width} if model.conv_channels else None


class Innermost(Enum):
    """What is contiguous in the pool: a channel's window, or the channels."""

    WINDOW = "window"
    CHANNELS = "channels"


@dataclass
class Case:
    """Rotating inputs at one batch size, on the device of the pool: [slots, dim, entries], or with the last two the other way round."""

    pool: Tensor
    innermost: Innermost
    batch: int
    tokens: int = 1
    width: int = 4
    tree: bool = False
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.pool if self.innermost is Innermost.WINDOW else self.pool.transpose(1, 2)
        slots, dim, _ = self.state.shape
        B, T, device, dtype = self.batch, self.tokens, self.pool.device, self.pool.dtype
        self.sets = max(1, min(MAX_SETS, slots // B))
        self.slots = torch.randperm(slots, device=device)[: self.sets * B].int().view(self.sets, B)
        self.accepted = torch.randint(1, T + 1, (self.sets, B), device=device, dtype=torch.int32)
        self.parents = reports.binary_tree(B, T, device) if self.tree else None
        x = torch.randn(self.sets, B, T, dim, device=device, dtype=dtype)
        self.x, self.out = [t.squeeze(2) if T == 1 else t.transpose(2, 3) for t in (x, torch.empty_like(x))]
        self.weight = torch.randn(dim, self.width, device=device, dtype=dtype) / self.width**0.5
        self.bias = torch.randn(dim, device=device, dtype=dtype)
        share = self.bytes_moved // (2 * dtype.itemsize)
        self.shares = [part for part in self.pool.flatten().split(share) if len(part) == share]

    @property
    def function(self) -> Callable[..., Tensor]:
        return ssmgen.causal_conv1d_update

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def bytes_moved(self) -> int:
        _, dim, entries = self.state.shape
        return self.batch * dim * (2 * self.tokens + self.width - 1 + entries) * self.pool.dtype.itemsize

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        call = {"x": self.x[i], "conv_state": self.state, "weight": self.weight, "bias": self.bias, "activation": "silu"}
        call |= {"conv_state_indices": self.slots[i], "out": self.out[i]}
        call |= {} if self.parents is None else {"parents": self.parents}
        return call | ({"num_accepted_tokens": self.accepted[i]} if self.tokens > 1 else {})

    def ceiling(self, i: int) -> Tensor:
        share: Tensor = self.shares[i % len(self.shares)]
        return share.mul_(1.0)

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64, on a few rows. Raises SsmgenError when it is more than its rounding, or when a
        window is not the exact copy of inputs that it should be."""
        call = self.arguments(0)
        rows = torch.linspace(0, self.batch - 1, min(self.batch, CHECKED), device=self.device).long()
        touched = self.slots[0][rows].long()
        windows = self.state[touched].clone()
        x = call["x"][rows] if self.tokens > 1 else call["x"][rows].unsqueeze(2)
        out = torch.zeros_like(x, dtype=torch.float64)
        accepted = call["num_accepted_tokens"][rows] if self.tokens > 1 else None
        parents = None if self.parents is None else self.parents[rows]
        reference(
            x, windows, self.weight, self.bias, out=out, silu=True, num_accepted_tokens=accepted, parents=parents, dtype=torch.float64
        )
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        what = f"causal_conv1d_update {self.innermost.value} batch {self.batch}, {self.tokens} tokens"
        return checked(what, call["out"][rows].view_as(out), out, torch.equal(self.state[touched], windows))


def dao(case: Case) -> reports.Peer | None:
    """Dao-AILab's kernel."""
    function = reports.imported(PEER, "causal_conv1d_update") if case.tokens == 1 else None
    if function is None:
        return None
    return keeping(function, [{n: t for n, t in case.arguments(i).items() if n != "out"} for i in range(case.sets)])


def chain(case: Case) -> reports.Peer | None:
    """The same call without its draft tree: each token goes on from the one before it."""
    if case.parents is None:
        return None
    calls = [{n: value for n, value in case.arguments(i).items() if n != "parents"} for i in range(case.sets)]
    bound = [ssmgen.bind(case.function, **call) for call in calls]
    return lambda i: bound[i]()


PEER = "causal_conv1d"
PEERS = {"chain": chain, PEER: dao}


@torch.no_grad()
def run(
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    layouts: Sequence[Innermost | str] = (),
    dim: int = 12288,
    width: int = 4,
    dtype: DType = DType.BF16,
    tree: bool = False,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__)
    sizes = list(batches or BATCHES)
    report |= {"op": "causal_conv1d_update", "dim": dim, "width": width, "dtype": dtype.value, "tree": tree}
    pools = list(itertools.product(map(Innermost, layouts or Innermost), tokens or [1]))
    watch.begins(report["op"], len(pools) * len(sizes))
    for layout, T in pools:
        inner = (dim, width + T - 2)
        least = math.ceil(POOL_BYTES / (math.prod(inner) * TORCH_DTYPES[dtype].itemsize))
        inner = inner if layout is Innermost.WINDOW else inner[::-1]
        pool = reports.normal_pool(max(least, MIN_SETS * max(sizes)), inner, TORCH_DTYPES[dtype], device)
        for batch in sizes:
            named = {"layout": layout.value, "tokens": T, "batch": batch, "dim": dim, "width": width, "dtype": dtype.value}
            with reports.case(report, named, watch, _line) as row:
                own = pool[: max(least, MIN_SETS * batch)]
                row |= measure(Case(own, layout, batch, T, width, tree), PEERS if peers else {}, rounds, batch <= HOST_BATCH, watch)
        del pool
    return report


def mistakes(tokens: Sequence[int], tree: bool = False, **others: Any) -> list[str]:
    """What options of the command line do not go together, in words."""
    return [*must(not tree or min(tokens, default=1) > 1, "--tree needs --tokens of more than 1")]


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    several = [f"{row['tokens']} tokens, rolling"] if row["tokens"] > 1 else []
    several += ["a draft tree"] if report.get("tree") else []
    what = [f"{row['dim']} channels, width {row['width']}, {row['dtype']}", f"{row['layout']} contiguous", *several]
    return Point(", ".join(what), "batch", str(row["batch"]), "in_place")


def _line(row: Mapping[str, Any]) -> str:
    what = f"{row['layout']} T {row['tokens']} batch {row['batch']}"
    return f"{what}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's; `chain`: the same tokens, without a draft tree."""
    tree = report.get("tree", False)

    def chain(row: Mapping[str, Any]) -> str:
        return cell(row["us"].get("chain"), 9) + cell(row["peer_ratio"].get("chain"), 7) if tree else ""

    lines = [
        *reports.head(report),
        f"causal_conv1d_update: dim {report['dim']}, width {report['width']}, {report['dtype']}, bias, SiLU; innermost in the state:",
        f"{'innermost':10}{'T':>3}{'batch':>6}" + (f"{'chain':>9}{'ratio':>7}" if tree else "") + heading(PEER),
    ]
    rows = [f"{row['layout']:10}{row['tokens']:3}{row['batch']:6}{chain(row)}{columns(row, PEER)}" for row in report["rows"]]
    return "\n".join(lines + rows)
