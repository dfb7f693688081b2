"""Cases and contenders for combine_splits: LSEs of base 2, bf16 output, its LSE written too.

Forms. dense: every row has all splits, [n, splits, heads, d_v], which is passed as a view whose splits lead. prefix: partial results in
one list, [entries x splits, heads, d_v], with num_splits on the device. pair: two tensors. Heads are 128, or all rows if there are fewer.

Cold: inputs and outputs rotate over as many sets as exceed 640 MB. Hot: one set, if 30 MB hold it, so that what is read is in the L2
cache, as right behind the attention kernel. TB/s counts partial results and LSEs, read once, outputs and their LSEs, written once.
Ceilings: torch's multiplication out of place, that moves as many bytes, half of them written; and torch.sum, that reads as many.

Peers: FlashInfer's merge_states, variable_length_merge_states (Triton) and merge_state, for 16-bit values; what misses the gate is left
out. They return new tensors; these are kept until the set's next turn. Host times are eager calls, arguments at hand.
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
from ...calls.operator import call_of
from ...errors import SsmgenError
from ...models import Model
from ...spec import SM90, DType
from . import call as op

SHAPES = [(16, 2), (16, 64), (128, 2), (128, 16), (128, 64), (1024, 8), (1024, 32), (16384, 2), (16384, 8), (16384, 32)]
HEADS = 128
SET_BYTES, MIN_SETS, HOT_BYTES = 640e6, 2, 30e6
HOST_ROWS = 1024  # host times are of cases up to this
CHECKED = 64  # of out's first axis, what the gate looks at


OPTIONS = (
    cli.several("--shape", "shapes", cli.Shape("R,S", "128,16"), help="Rows, splits; may repeat. Default: ten, from 16,2 to 16384,32."),
    cli.several("--d-v", "widths", click.IntRange(4, 1024), help="May repeat. Default: 128, 512."),
    cli.several("--form", "forms", click.Choice(["dense", "prefix", "pair"]), help="May repeat. Default: dense, prefix."),
    cli.several(
        "--dtype", "dtypes", cli.Choice(DType), help="Of partial results; may repeat. Default: f32, bf16, of which peers have the second."
    ),
    cli.hot,
)
REPORT = schema.Report(
    schema.SIZED | {"d_v": COUNT}, row=schema.MUL | {"sum_ratio": schema.RATIO}, times=("ssmgen", "mul", "sum"), copied=False
)
QUICK: dict[str, Any] = {"shapes": ((128, 16), (1024, 8)), "widths": (512,), "dtypes": (DType.BF16,)}


def of_model(model: Model, tp: int, quick: bool) -> None:
    """Nothing: models.toml does not say which kernels a model's attention has."""
    return None


class Form(Enum):
    DENSE = "dense"
    PREFIX = "prefix"
    PAIR = "pair"


@dataclass
class Case:
    """Rotating inputs of one shape, (rows, splits)."""

    shape: tuple[int, int]
    d_v: int = 512
    form: Form = Form.DENSE
    dtype: torch.dtype = torch.float32  # of partial results
    hot: bool = False
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        rows, splits = self.shape
        heads = math.gcd(rows, HEADS)
        self.entries = n = rows // heads
        self.sets = 1 if self.hot else min(reports.MAX_SETS, max(MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))
        inner = {Form.DENSE: (n, splits, heads), Form.PREFIX: (n * splits, heads), Form.PAIR: (2, n, heads)}[self.form]
        numel = math.prod(inner) * self.d_v
        room = -(-self.bytes_moved // self.dtype.itemsize)  # the ceilings move as much
        self.memory = [torch.randn(room, device=self.device, dtype=self.dtype) for _ in range(self.sets)]
        self.v = [m[:numel].view(*inner, self.d_v) for m in self.memory]
        self.s = [2 * torch.randn(inner, device=self.device) for _ in range(self.sets)]
        self.starts = torch.arange(0, n * splits + 1, splits, dtype=torch.int32, device=self.device)
        self.out = [torch.empty(n, heads, self.d_v, device=self.device, dtype=torch.bfloat16) for _ in range(self.sets)]
        self.lse_out = [torch.empty(n, heads, device=self.device) for _ in range(self.sets)]
        self.total = torch.empty((), device=self.device, dtype=self.dtype)

    @property
    def function(self) -> Callable[..., Any]:
        return ssmgen.combine_splits

    @property
    def bytes_moved(self) -> int:
        rows, splits = self.shape
        return rows * (splits * (self.d_v * self.dtype.itemsize + 4) + self.d_v * 2 + 4)

    def partial(self, i: int) -> dict[str, Any]:
        v, s = self.v[i], self.s[i]
        if self.form is Form.PAIR:
            return {"o": tuple(v), "lse": tuple(s)}
        if self.form is Form.PREFIX:
            return {"o": v, "lse": s, "num_splits": self.starts}
        return {"o": v.transpose(0, 1), "lse": s.transpose(0, 1)}

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        return self.partial(i) | {"lse_base": 2, "out": self.out[i], "lse_out": self.lse_out[i]}

    def multiplication(self, i: int) -> Tensor:
        half = len(self.memory[i]) // 2
        return torch.mul(self.memory[i][:half], 1.0, out=self.memory[i][half : 2 * half])

    def reading(self, i: int) -> Tensor:
        return torch.sum(self.memory[i], dim=0, out=self.total)

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, lse_out) of the first set in float64, as far as the gate looks."""
        call = self.partial(0)
        some = slice(min(CHECKED, self.entries))
        if self.form is Form.PREFIX:
            call["num_splits"] = self.starts[: some.stop + 1]
        else:
            call |= {n: tuple(t[some] for t in call[n]) if self.form is Form.PAIR else call[n][:, some] for n in ("o", "lse")}
        shape = self.out[0][some].shape
        call |= {"out": torch.empty(shape, device=self.device), "lse_out": torch.empty(shape[:-1], device=self.device)}
        built = call_of(op.combine_splits, **call, lse_base=2)
        views = op.views_of(built.operands, options := built.options, problems := [])
        assert not problems, problems
        results = {n: torch.empty(views[n].shape, dtype=torch.float64, device=self.device) for n in ("out", "lse_out")}
        op.run_reference(views | results, options, torch.float64)
        return results["out"].view(shape), results["lse_out"].view(shape[:-1])

    def errors(self, out: Tensor, lse_out: Tensor) -> tuple[float, float]:
        """Norm errors of results of the first set."""
        return tuple(norm_error(t[: len(right)], right) for t, right in zip((out, lse_out), self.expected(), strict=True))

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64. Raises SsmgenError when it, or the LSEs', is more than its rounding."""
        call = self.arguments(0)
        call["out"].fill_(float("nan"))
        call["lse_out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        out, lse = self.errors(call["out"], call["lse_out"])
        if not (out < GATE[torch.bfloat16] and lse < GATE[torch.float32]):
            raise SsmgenError(f"combine_splits {self.form.value} {self.shape}: output error {out:.1e}, LSE error {lse:.1e}; not timed")
        return out


def _peer(case: Case) -> tuple[str, Callable[[int], Any] | None]:
    """FlashInfer's function of the form, and what calls it on the i-th set."""
    v, s = case.v, case.s
    name, module, arguments = {
        Form.DENSE: ("merge_states", "flashinfer", lambda i: (v[i], s[i])),
        Form.PREFIX: ("variable_length_merge_states", "flashinfer.triton.cascade", lambda i: (v[i], s[i], case.starts)),
        Form.PAIR: ("merge_state", "flashinfer", lambda i: (v[i][0], s[i][0], v[i][1], s[i][1])),
    }[case.form]
    function = reports.imported(module, name)
    if function is None or case.dtype not in (torch.float16, torch.bfloat16):
        return name, None
    calls = [arguments(i) for i in range(case.sets)]
    return name, lambda i: function(*calls[i])


def peers_of(case: Case) -> dict[str, reports.Peer]:
    """The peers that run, and pass the gate."""
    name, call = _peer(case)
    if call is None:
        return {}
    kept: dict[int, Any] = {}

    def keeping(i: int) -> None:
        kept[i] = call(i)

    usable = reports.usable({f"flashinfer.{name}": keeping})
    for peer in list(usable):
        out, lse = case.errors(*call(0))
        if not (out < 2 * GATE[torch.bfloat16] and lse < 1e-3):
            reports.left_out(peer, "checked,", SsmgenError(f"output error {out:.1e}, LSE error {lse:.1e}"))
            del usable[peer]
    return usable


def measure(case: Case, peers: bool, rounds: int, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case."""
    arch = runtime.device_arch(case.out[0].device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    error = max(reports.gates(case.gate, pdls))
    others = peers_of(case) if peers else {}
    contenders = {"ssmgen_pdl" if pdl else "ssmgen": reports.bound(case, pdl) for pdl in pdls}
    contenders |= {"mul": case.multiplication, "sum": case.reading} | others
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
        "sum_ratio": served / us["sum"],
        "peer_ratio": {name: served / us[name] for name in others},
        "host_us": reports.host_us(case.function, (), case.arguments(0), others) if case.shape[0] <= HOST_ROWS else {},
        "out_error": error,
        **reports.served(case.function, (), case.arguments(0), arch),
    }


@torch.no_grad()
def run(
    shapes: Sequence[tuple[int, int]] = (),
    widths: Sequence[int] = (),
    forms: Sequence[Form | str] = (),
    dtypes: Sequence[DType] = (),
    hot: bool | None = None,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. hot: None for both, where the cache holds a set.

    Raises SsmgenError without a GPU.
    """
    report = reports.begin(__doc__) | {"op": "combine_splits"}
    forms = [Form(f) for f in forms or (Form.DENSE, Form.PREFIX)]
    wheres = (True, False) if hot is None else (hot,)
    dtypes, widths, shapes = dtypes or (DType.F32, DType.BF16), widths or (128, 512), shapes or SHAPES
    points = [p for p in itertools.product(forms, dtypes, widths, shapes, wheres) if _fits(*p)]
    watch.begins(report["op"], len(points))
    for form, dtype, d_v, shape, warm in points:
        named = {"shape": list(shape), "d_v": d_v, "form": form.value, "dtype": dtype.value, "hot": warm}
        with reports.case(report, named, watch, _line) as row:
            row |= measure(Case(shape, d_v, form, TORCH_DTYPES[dtype], warm, device), peers, rounds, watch)
    return report


def _fits(form: Form, dtype: DType, d_v: int, shape: tuple[int, int], hot: bool) -> bool:
    """Whether there is such a case: a pair is two splits, and what is hot has room in the cache."""
    rows, splits = shape
    return (form is not Form.PAIR or splits == 2) and not (hot and rows * splits * d_v * dtype.size > HOT_BYTES)


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    what = f"{row['form']}, d_v {row['d_v']}, {row['dtype']}, {'hot: in the L2 cache' if row['hot'] else 'cold'}"
    return Point(what, "rows x splits", " x ".join(map(str, row["shape"])), None if row["hot"] else "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['form']} {tuple(row['shape'])} d_v {row['d_v']} {row['dtype']} {'hot' if row['hot'] else 'cold'}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's."""
    heading = (
        f"{'us':>9}{'TB/s':>7}{'no pdl':>9}{'mul':>9}{'x mul':>8}{'sum':>9}{'x sum':>8}{'flashinfer':>12}{'ratio':>7}"
        f"{'host us':>9}{'bound':>7}{'peer':>7}{'compile s':>11}{reports.LAST}"
    )
    lines = [*reports.head(report), "combine_splits: (rows, splits), bf16 output", f"{'case':44}{heading}"]
    for row in report["rows"]:
        us, host, peer = row["us"], row["host_us"], next(iter(row["peer_ratio"]), "")
        lines.append(
            f"{_what(row):44}" + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["ssmgen"], 9) + cell(us["mul"], 9)
            + cell(row["mul_ratio"], 8, 3) + cell(us["sum"], 9) + cell(row["sum_ratio"], 8, 3) + cell(us.get(peer), 12)
            + cell(row["peer_ratio"].get(peer), 7) + cell(host.get("ssmgen"), 9) + cell(host.get("ssmgen_bound"), 7)
            + cell(host.get(peer), 7, 1) + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
