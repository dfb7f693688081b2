"""Cases and contenders for gated_rms_norm: x, gate, weight and output of one dtype.

Forms are those of layers. mamba2: the gate's SiLU multiplies x, then each group is normalised; every group has a weight of its own. gdn and
kda: heads are normalised with one weight for all, then multiplied by the gate's SiLU or sigmoid. A shape is groups in a row x their size.

x, gate and output rotate over as many sets as exceed 640 MB; the weight does not rotate. Hot: one set, if 30 MB hold it, so that what is
read is in the L2 cache, as right behind the kernel that wrote it. TB/s counts x and gate, read once, and the output, written once. The
ceiling is torch.mul(x, gate, out=out), which moves the same bytes.

Peers: flash-linear-attention's rms_norm_gated (gdn, kda), mamba-ssm's rmsnorm_fn (mamba2, gdn), both Triton, and torch, the chain of
elementwise kernels that transformers' modules run. They return new tensors; these are kept until the set's next turn. Host times are eager
calls, arguments at hand.
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

from ... import runtime
from ...accuracy import norm_error
from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema, timing
from ...bench.progress import PRINTING, Watch
from ...bench.report import GATE, cell
from ...bench.rows import Point
from ...bench.schema import COUNT
from ...calls.checks import TORCH_DTYPES
from ...errors import SsmgenError
from ...models import Model
from ...spec import SM90, DType
from .reference import gated_rms_norm as reference

ROWS = (1, 8, 32, 128, 512, 4096)
SET_BYTES, HOT_BYTES = 640e6, 30e6
HOST_ROWS = 8  # host times are of cases up to this
CHECKED = 64  # rows that the gate looks at
EPS = 1e-5


class Form(Enum):
    MAMBA2 = "mamba2"
    GDN = "gdn"
    KDA = "kda"


FORMS = {"mamba2": Form.MAMBA2, "gated_delta_rule": Form.GDN, "kda": Form.KDA}  # of models, by kind
SHAPES = {Form.MAMBA2: [(1, 5120), (8, 1024)], Form.GDN: [(32, 128)], Form.KDA: [(32, 128)]}


OPTIONS = (
    cli.several("--form", "forms", click.Choice(["mamba2", "gdn", "kda"]), help="Of which layer; may repeat. Default: all."),
    cli.several(
        "--shape",
        "shapes",
        cli.Shape("G,N", "32,128"),
        help="Groups in a row, their size; may repeat. Default: one or two of a form.",
    ),
    cli.several("--rows", "rows", click.IntRange(1), help="May repeat. Default: 1 … 4096."),
    cli.several("--dtype", "dtypes", cli.Choice(DType), help="May repeat. Default: bf16."),
    cli.hot,
)
REPORT = schema.Report(schema.SIZED | {"rows": COUNT}, row=schema.MUL, **schema.MULTIPLIED)
QUICK: dict[str, Any] = {"rows": (1, 128), "hot": False}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a model with such a norm; tp: already divided by."""
    return {"forms": (FORMS[model.kind],), "shapes": (model.norm_shape,)} if model.norm_shape else None


@dataclass
class Case:
    """Rotating inputs of one shape, (groups, size)."""

    rows: int
    shape: tuple[int, int] = (32, 128)
    form: Form = Form.GDN
    dtype: torch.dtype = torch.bfloat16
    hot: bool = False
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        groups, size = self.shape
        self.sets = 1 if self.hot else min(reports.MAX_SETS, max(reports.MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))
        shape = (self.sets, self.rows, groups, size)
        self.x, self.z = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        self.out = torch.empty(shape, device=self.device, dtype=self.dtype)
        self.weight = torch.randn(groups * size if self.form is Form.MAMBA2 else size, device=self.device, dtype=self.dtype)

    @property
    def function(self) -> Callable[..., Any]:
        return ssmgen.gated_rms_norm

    @property
    def bytes_moved(self) -> int:
        return 3 * self.rows * math.prod(self.shape) * self.dtype.itemsize

    @property
    def how(self) -> dict[str, Any]:
        return {"norm_before_gate": self.form is not Form.MAMBA2, "activation": "sigmoid" if self.form is Form.KDA else "silu", "eps": EPS}

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        return {"x": self.x[i], "gate": self.z[i], "weight": self.weight, "out": self.out[i], **self.how}

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.x[i], self.z[i], out=self.out[i])

    def error(self, out: Tensor) -> float:
        """Norm error of a result of the first set against float64, as far as the gate looks."""
        some = slice(min(CHECKED, self.rows))
        right = torch.empty(self.x[0][some].shape, dtype=torch.float64, device=self.device)
        weight = self.weight.view(-1, self.shape[1])
        reference(self.x[0][some], gate=self.z[0][some], weight=weight, out=right, dtype=torch.float64, **self.how)
        return norm_error(out.view(self.x[0].shape)[some], right)

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call. Raises SsmgenError when it is more than its rounding."""
        call = self.arguments(0)
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        error = self.error(call["out"])
        if not error < GATE[self.dtype]:
            raise SsmgenError(f"gated_rms_norm {self.form.value} {self.rows} x {self.shape}: output error {error:.1e}; not timed")
        return error

    def chain(self, i: int) -> Tensor:
        """What transformers' modules compute, kernel by kernel."""
        x, factor = self.x[i].float(), self.z[i].float()
        factor = torch.sigmoid(factor) if self.form is Form.KDA else torch.nn.functional.silu(factor)
        x = x * factor if self.form is Form.MAMBA2 else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        x = self.weight.view(-1, self.shape[1]) * x.to(self.dtype)
        return x if self.form is Form.MAMBA2 else (x * factor).to(self.dtype)


def _fla(case: Case) -> reports.Peer | None:
    function = reports.imported("fla.modules.fused_norm_gate", "rms_norm_gated")
    if function is None or case.form is Form.MAMBA2:
        return None
    activation = "sigmoid" if case.form is Form.KDA else "swish"
    return lambda i: function(case.x[i], case.z[i], case.weight, None, activation=activation, eps=EPS)


def _mamba_ssm(case: Case) -> reports.Peer | None:
    function = reports.imported("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    if function is None or case.form is Form.KDA:
        return None
    inner = case.form is Form.MAMBA2  # groups in one axis
    x, z = (t.flatten(-2) if inner else t for t in (case.x, case.z))
    group_size = case.shape[1] if inner else None
    return lambda i: function(x[i], case.weight, None, z=z[i], eps=EPS, group_size=group_size, norm_before_gate=not inner)


def peers_of(case: Case) -> dict[str, reports.Peer]:
    """The peers that run, and pass the gate."""
    kept: dict[int, Any] = {}

    def keeping(call: reports.Peer) -> reports.Peer:
        def run(i: int) -> None:
            kept[i] = call(i)

        return run

    made = {"fla.rms_norm_gated": _fla(case), "mamba_ssm.rmsnorm_fn": _mamba_ssm(case), "torch.chain": case.chain}
    calls = {name: call for name, call in made.items() if call is not None}
    usable = reports.usable({name: keeping(call) for name, call in calls.items()})
    for name in list(usable):
        error = case.error(calls[name](0))
        if not error < 2 * GATE[case.dtype]:
            reports.left_out(name, "checked,", SsmgenError(f"output error {error:.1e}"))
            del usable[name]
    return usable


def measure(case: Case, peers: bool, rounds: int, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case."""
    arch = runtime.device_arch(case.out.device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    error = max(reports.gates(case.gate, pdls))
    others = peers_of(case) if peers else {}
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
        "host_us": reports.host_us(case.function, (), case.arguments(0), others) if case.rows <= HOST_ROWS else {},
        "out_error": error,
        **reports.served(case.function, (), case.arguments(0), arch),
    }


@torch.no_grad()
def run(
    forms: Sequence[Form | str] = (),
    shapes: Sequence[tuple[int, int]] = (),
    rows: Sequence[int] = (),
    dtypes: Sequence[DType] = (),
    hot: bool | None = None,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. shapes: (groups, size), of every form; hot: None for both, where the cache holds a set.

    Raises SsmgenError without a GPU.
    """
    report = reports.begin(__doc__) | {"op": "gated_rms_norm"}
    wheres = (True, False) if hot is None else (hot,)
    kinds = [(form, shape) for form in map(Form, forms or Form) for shape in shapes or SHAPES[form]]
    points = [
        (form, shape, dtype, warm, n)
        for (form, shape), dtype, warm, n in itertools.product(kinds, dtypes or (DType.BF16,), wheres, rows or ROWS)
        if not (warm and 3 * n * math.prod(shape) * dtype.size > HOT_BYTES)
    ]
    watch.begins(report["op"], len(points))
    for form, shape, dtype, warm, n in points:
        named = {"form": form.value, "shape": list(shape), "dtype": dtype.value, "hot": warm, "rows": n}
        with reports.case(report, named, watch, _line) as row:
            row |= measure(Case(n, shape, form, TORCH_DTYPES[dtype], warm, device), peers, rounds, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    what = f"{row['form']}, {' x '.join(map(str, row['shape']))}, {row['dtype']}, {'hot: in the L2 cache' if row['hot'] else 'cold'}"
    return Point(what, "rows", str(row["rows"]), None if row["hot"] else "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    groups, size = row["shape"]
    return f"{row['form']} {row['rows']} x {groups} x {size} {row['dtype']} {'hot' if row['hot'] else 'cold'}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. Behind each peer's time, the ratio of ours to it."""
    peers = list(dict.fromkeys(name for row in report["rows"] for name in row["peer_ratio"]))
    names = "".join(f"{name.partition('.')[0]:>11}{'ratio':>7}" for name in peers)
    heading = f"{'us':>9}{'TB/s':>7}{'no pdl':>9}{'mul':>9}{'x mul':>8}{names}{'host us':>9}{'bound':>7}{'compile s':>11}{reports.LAST}"
    lines = [*reports.head(report), "gated_rms_norm: rows x groups x size", f"{'case':36}{heading}"]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        others = "".join(cell(us.get(name), 11) + cell(row["peer_ratio"].get(name), 7) for name in peers)
        lines.append(
            f"{_what(row):36}" + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["ssmgen"], 9) + cell(us["mul"], 9)
            + cell(row["mul_ratio"], 8, 3) + others + cell(host.get("ssmgen"), 9) + cell(host.get("ssmgen_bound"), 7)
            + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
