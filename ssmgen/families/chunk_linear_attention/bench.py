"""Cases and contenders for chunk_linear_attention: bf16, but for KDA's and GLA's log decays, and states, which are f32; q and k of KDA are
divided by their norms inside.

Inputs and outputs rotate over as many sets as exceed 640 MB; all of them share one workspace. Bytes: operands and the output once, and the
states that are written, but not the workspace. The ceiling is torch's multiplication of dense tensors, out of place, that moves as many
bytes.

Forms, all of batches of sequences of equal lengths, from zeros, which leave their final states. kda, gla: log decays between 0 and -0.2.
kda_slow: between 0 and -0.0002, so that what is old is there at the end. rwkv7: log decays between 0 and -0.6.

Peer: flash-linear-attention's chunk_kda, chunk_gla or chunk_rwkv7. It returns new tensors; those are kept until the set's next turn, so
that its outputs rotate too. Host times are eager calls, arguments at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import normalize

import ssmgen

from ...accuracy import norm_error
from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema
from ...bench.multiplied import PROMPT, keeping, measure
from ...bench.progress import PRINTING, Watch
from ...bench.report import cell
from ...bench.rows import Point
from ...bench.schema import COUNT, TEXT
from ...errors import SsmgenError
from ...models import Model
from .planning import run_reference
from .problem import Rule
from .segments import workspace_for

SET_BYTES, MIN_SETS = 640e6, 2
HOST_TOKENS = 2048  # host times are of cases up to this
GATE = 1e-2  # norm error of the output and of states: of bf16 operands of several products, one behind the other
GATED_HEADS = 4  # that are compared


class Form(Enum):
    KDA = "kda"
    KDA_SLOW = "kda_slow"
    GLA = "gla"
    RWKV7 = "rwkv7"

    @property
    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(ssmgen, f"chunk_{self.peer}")
        return found

    @property
    def peer(self) -> str:
        return self.value.removesuffix("_slow")

    @property
    def rule(self) -> Rule:
        return {Form.GLA: Rule.PLAIN, Form.RWKV7: Rule.LOW_RANK}.get(self, Rule.DELTA)

    @property
    def channels(self) -> int:
        """Key and value channels of a head, where nobody says."""
        return 64 if self is Form.RWKV7 else 128


Shape = tuple[int, int, int, int]  # heads of k, heads of v, sequences, tokens of each
ROWS: list[tuple[Form, Shape, int, int]] = [
    (Form.KDA, (32, 32, 1, 8192), 128, 128), (Form.KDA, (32, 32, 1, 32768), 128, 128), (Form.KDA, (32, 32, 16, 2048), 128, 128),
    (Form.KDA_SLOW, (16, 16, 1, 8192), 128, 128), (Form.GLA, (32, 32, 1, 8192), 128, 128), (Form.RWKV7, (32, 32, 1, 8192), 64, 64),
]  # fmt: skip

OPTIONS = (
    cli.several("--shape", "shapes", cli.Shape("HK,HV,B,T", "32,32,1,8192"), help="Heads of k and v, sequences, tokens; may repeat."),
    cli.several("--form", "forms", click.Choice([form.value for form in Form]), help="May repeat. Without shapes and forms: six rows."),
    click.option("--head-k", type=click.IntRange(16, 256), help="Default: 128; 64 of rwkv7."),
    click.option("--head-v", type=click.IntRange(16, 256), help="Default: as --head-k."),
)
REPORT = schema.Report(
    {"form": TEXT, "head_k": COUNT, "head_v": COUNT, "shape": schema.list_of(COUNT, 4)}, {}, schema.MUL, **schema.MULTIPLIED
)
QUICK: dict[str, Any] = {"shapes": ((16, 16, 1, 2048),), "forms": ("kda", "gla", "rwkv7")}


def form_of(model: Model) -> Form:
    return Form(model.kind)


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for KDA and RWKV-7; tp: already divided by."""
    if model.kind not in (form.value for form in Form):
        return None
    head_v, head_k, key_heads = model.shape
    shapes = tuple((key_heads, model.nheads, n, PROMPT) for n in ((1,) if quick else (1, 4, 16)))
    return {"shapes": shapes, "forms": (model.kind,), "head_k": head_k, "head_v": head_v}


@dataclass
class Case:
    """Rotating inputs of one shape."""

    shape: Shape
    form: Form = Form.KDA
    head_k: int = 128
    head_v: int = 128
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        HK, HV, count, length = self.shape
        self.sets = min(reports.MAX_SETS, max(MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))

        def made(*inner: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(self.sets, count, length, *inner, device=self.device, dtype=dtype)

        def logs(least: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.rand(self.sets, count, length, HV, self.head_k, device=self.device, dtype=dtype).mul_(least)

        keys, self.out = (HK, self.head_k), made(HV, self.head_v)
        operands = {"v": made(HV, self.head_v), "k": made(*keys)}
        if self.form is Form.RWKV7:
            unit = normalize(made(*keys), dim=-1)
            operands |= {"r": made(*keys), "w": logs(-0.6, torch.bfloat16), "kk": unit, "a": made(*keys).sigmoid_()}
        elif self.form is Form.GLA:
            operands |= {"q": made(*keys), "gk": logs(-0.2)}
        else:
            operands |= {"q": made(*keys), "g": logs(-2e-4 if self.form is Form.KDA_SLOW else -0.2), "beta": made(HV).sigmoid_()}
        if not self.normalised:
            operands["k"] /= self.head_k**0.5
        self.operands = operands
        self.states = torch.zeros(self.sets, count, HV, self.head_v, self.head_k, device=self.device)
        size = workspace_for(count * length, count, HV, self.head_k, self.head_v, self.form.rule, None, length)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.copied = [torch.empty(self.sets, self.bytes_moved // 8, device=self.device) for _ in range(2)]
        self.expected: dict[str, Tensor] = {}

    @property
    def normalised(self) -> bool:
        """Whether the function divides q and k by their norms."""
        return self.form in (Form.KDA, Form.KDA_SLOW)

    @property
    def function(self) -> Callable[..., Any]:
        return self.form.function

    @property
    def bytes_moved(self) -> int:
        HK, HV, count, length = self.shape
        keys, log, beta = {Form.RWKV7: (4, 2, 0), Form.GLA: (2, 4, 0)}.get(self.form, (2, 4, 2))
        per_token = 2 * keys * HK * self.head_k + HV * (4 * self.head_v + log * self.head_k + beta)
        return count * (length * per_token + 4 * HV * self.head_v * self.head_k)

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        call: dict[str, Any] = {name: t[i] for name, t in self.operands.items()}
        call |= {"out": self.out[i], "workspace": self.workspace, "return_final_states": True, "final_states_out": self.states[i]}
        return call | ({"use_qk_l2norm": True} if self.normalised else {})

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.copied[0][i], 1.0, out=self.copied[1][i])

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64, in the first heads, up to four. Raises SsmgenError when it, or that of states,
        is more than that of bf16 products."""
        call = self.arguments(0)
        HK, HV, *_ = self.shape
        groups = max(1, GATED_HEADS * HK // HV)
        heads = groups * HV // HK
        self.expected = self.expected or self._exact(groups, heads)
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        found = {"out": call["out"][:, :, :heads], "final_states": call["final_states_out"][:, :heads]}
        errors = [norm_error(found[name].reshape(1, -1), wanted.reshape(1, -1)) for name, wanted in self.expected.items()]
        if not max(errors) < GATE:
            what = f"{self.form.value} {self.shape}"
            raise SsmgenError(f"{what}: errors {errors[0]:.1e} and {errors[1]:.1e} of states; not timed")
        return errors[0]

    def _exact(self, groups: int, heads: int) -> dict[str, Tensor]:
        """What a call of these heads writes, in float64."""
        call = self.arguments(0)
        some = {n: call[n][:, :, : groups if call[n].shape[2] == self.shape[0] != self.shape[1] else heads] for n in self.operands}
        more = {"return_final_states": True} | ({"use_qk_l2norm": True} if self.normalised else {})
        built = self.form.function.build(**some, **more)  # type: ignore[attr-defined]  # of Operator
        views = built.caller.checked(built.operands, built.options, None)
        wanted = {name: views[name].double() for name in ("out", "final_states")}
        run_reference(views | wanted, built.options, torch.float64)
        return wanted


def fla(case: Case) -> reports.Peer | None:
    name = case.form.peer
    function = reports.imported(f"fla.ops.{name}", f"chunk_{name}")
    if function is None or case.shape[0] != case.shape[1]:
        return None
    calls: list[dict[str, Any]] = []
    for i in range(case.sets):
        given = {n: t[i] for n, t in case.operands.items()}
        if case.form is Form.RWKV7:
            given |= {"a": -given["kk"], "b": given.pop("kk") * given["a"]}
        elif case.form is Form.GLA:
            given["g"] = given.pop("gk")
        calls.append(given | {"output_final_state": True} | ({"use_qk_l2norm_in_kernel": True} if case.normalised else {}))
    return keeping(function, calls)


PEERS = {"fla": fla}


@torch.no_grad()
def run(
    shapes: Sequence[Shape] = (),
    forms: Sequence[Form | str] = (),
    head_k: int | None = None,
    head_v: int | None = None,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__) | {"op": "chunk_linear_attention"}
    points = _points(shapes, forms, head_k, head_v)
    watch.begins(report["op"], len(points))
    for form, shape, channels, values in points:
        named = {"form": form.value, "head_k": channels, "head_v": values, "shape": list(shape)}
        with reports.case(report, named, watch, _line) as row:
            host = shape[2] * shape[3] <= HOST_TOKENS
            row |= measure(Case(shape, form, channels, values, device), PEERS if peers else {}, rounds, host, watch)
    return report


def _points(
    shapes: Sequence[Shape], forms: Sequence[Form | str], head_k: int | None, head_v: int | None
) -> list[tuple[Form, Shape, int, int]]:
    if not (shapes or forms or head_k or head_v):
        return ROWS
    kinds = [*map(Form, forms or [Form.KDA])]
    return [(f, s, head_k or f.channels, head_v or head_k or f.channels) for f in kinds for s in shapes or [(32, 32, 1, 8192)]]


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    key_heads, heads, count, length = row["shape"]
    what = f"{row['form']}, {key_heads} and {heads} heads, {row['head_k']} x {row['head_v']}"
    return Point(what, "sequences x tokens", f"{count} x {length}", "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['form']} {' x '.join(map(str, row['shape']))}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's."""
    peer = next(iter(PEERS))
    ours, host = f"{'us':>9}{'TB/s':>7}{'no pdl':>9}{'mul':>9}{'x mul':>8}", f"{'host us':>9}{'bound':>7}{'compile s':>11}"
    heading = f"{ours}{'fla':>11}{'ratio':>7}{host}"
    first = "chunk_linear_attention: heads of k x heads of v x sequences x tokens"
    lines = [*reports.head(report), first, f"{'case':32}{heading}{reports.LAST}"]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        lines.append(
            f"{_what(row):32}" + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["ssmgen"], 9) + cell(us["mul"], 9)
            + cell(row["mul_ratio"], 8, 3) + cell(us.get(peer), 11) + cell(row["peer_ratio"].get(peer), 7) + cell(host.get("ssmgen"), 9)
            + cell(host.get("ssmgen_bound"), 7) + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
