"""Cases and contenders for chunk_scan: bf16 but for A, D and states, which are f32; a bias of dt, softplus, D, no gate.

Inputs and outputs rotate over as many sets as exceed 640 MB; A, D and dt_bias do not rotate. Bytes: x, B, C, dt and the output once, and
the states that are read and written. The ceiling is torch's multiplication of dense tensors, out of place, that moves as many bytes.

Forms. batch: sequences of equal lengths, [batch, T], from zeros, which leave their final states. pool: the same tokens packed as sequences
of different lengths, which go on from slots of a pool, and leave their states there. simple_gla, lightning: as batch, of chunk_simple_gla
with a log decay per token, bf16, and of chunk_lightning_attn with a slope per head; heads, groups, headdim and d_state are those of v, of q
and k, V and K.

Peers: mamba-ssm's mamba_chunk_scan_combined with chunks of 256, of batches; of simple_gla and lightning flash-linear-attention's
chunk_simple_gla, with g or g_gamma. They return new tensors; those are kept until the set's next turn, so that their outputs rotate too.
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
from .attention import by_role
from .reference import chunk_scan as reference

SHAPES = [(128, 8, 1, 2048), (128, 8, 1, 8192), (128, 8, 16, 2048), (16, 1, 1, 8192), (24, 1, 1, 8192)]
SET_BYTES, MIN_SETS = 640e6, 2
HOST_TOKENS = 2048  # host times are of cases up to this
PEER_CHUNK = 256


class Form(Enum):
    BATCH = "batch"
    POOL = "pool"
    SIMPLE_GLA = "simple_gla"
    LIGHTNING = "lightning"


FUNCTIONS: dict[Form, Callable[..., Any]] = {
    **dict.fromkeys((Form.BATCH, Form.POOL), ssmgen.chunk_scan),
    Form.SIMPLE_GLA: ssmgen.chunk_simple_gla,
    Form.LIGHTNING: ssmgen.chunk_lightning_attn,
}

OPTIONS = (
    cli.several(
        "--shape", "shapes", cli.Shape("H,G,B,T", "128,8,1,8192"), help="Heads, groups, sequences, tokens; may repeat. Default: five."
    ),
    cli.several("--form", "forms", click.Choice([form.value for form in Form]), help="May repeat. Default: batch."),
    click.option("--headdim", type=click.IntRange(16, 256), default=64, show_default=True),
    click.option("--d-state", type=click.IntRange(16, 256), default=128, show_default=True),
)
REPORT = schema.Report(
    {"form": TEXT, "headdim": COUNT, "d_state": COUNT, "shape": schema.list_of(COUNT, 4)}, {}, schema.MUL, **schema.MULTIPLIED
)
QUICK: dict[str, Any] = {"shapes": ((128, 8, 1, 2048), (16, 1, 1, 8192))}


FORMS = {"mamba2": Form.BATCH, "lightning_attn": Form.LIGHTNING}  # by the kind of a model


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a Mamba-2 or Lightning attention; tp: already divided by."""
    if model.kind not in FORMS:
        return None
    headdim, d_state, groups = model.shape
    sizes = (1,) if quick else (1, 4, 16)
    shapes = tuple((model.nheads, groups, n, PROMPT) for n in sizes)
    return {"shapes": shapes, "forms": (FORMS[model.kind].value,), "headdim": headdim, "d_state": d_state}


@dataclass
class Case:
    """Rotating inputs of one shape, (heads, groups, sequences, tokens of each)."""

    shape: tuple[int, int, int, int]
    form: Form = Form.BATCH
    headdim: int = 64
    d_state: int = 128
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        H, G, count, length = self.shape
        P, N = self.headdim, self.d_state
        lead = (count * length,) if self.form is Form.POOL else (count, length)
        self.sets = min(reports.MAX_SETS, max(MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))

        def made(*inner: int) -> Tensor:
            return torch.randn(self.sets, *lead, *inner, device=self.device, dtype=torch.bfloat16)

        self.x, self.B, self.C, self.dt = made(H, P), made(G, N), made(G, N), made(H)
        self.out = torch.empty_like(self.x)
        self.A, self.D, self.bias = (f(torch.rand(H, device=self.device)) for f in (torch.neg, torch.exp, lambda v: v - 2))
        self.logs, self.slope = -self.dt.abs(), -self.A
        self.states = torch.zeros(self.sets, count, H, P, N, device=self.device)
        words = self.bytes_moved // 8
        self.copied = [torch.empty(self.sets, words, device=self.device) for _ in range(2)]
        cuts = torch.randperm(count * length - 1)[: count - 1].sort().values + 1
        self.starts = torch.tensor([0, *cuts.tolist(), count * length], dtype=torch.int32, device=self.device)
        self.slots = torch.randperm(count, device=self.device).int()
        self.started = torch.ones(count, dtype=torch.bool, device=self.device)

    @property
    def function(self) -> Callable[..., Any]:
        return FUNCTIONS[self.form]

    @property
    def bytes_moved(self) -> int:
        H, G, count, length = self.shape
        state = 4 * H * self.headdim * self.d_state * (2 if self.form is Form.POOL else 1)
        steps = 0 if self.form is Form.LIGHTNING else 2 * H
        return count * (length * (4 * H * self.headdim + 4 * G * self.d_state + steps) + state)

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        if self.form in (Form.BATCH, Form.POOL):
            call = {"x": self.x[i], "dt": self.dt[i], "A": self.A, "B": self.B[i], "C": self.C[i], "D": self.D, "dt_bias": self.bias}
            call |= {"dt_softplus": True, "out": self.out[i]}
        else:
            decay = {"g": self.logs[i]} if self.form is Form.SIMPLE_GLA else {"slope": self.slope}
            call = {"q": self.C[i], "k": self.B[i], "v": self.x[i], "out": self.out[i]} | decay
        if self.form is not Form.POOL:
            return call | {"return_final_states": True, "final_states_out": self.states[i]}
        slots = {"state": self.states[i], "state_indices": self.slots, "has_initial_state": self.started}
        return call | {"cu_seqlens": self.starts, **slots}

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.copied[0][i], 1.0, out=self.copied[1][i])

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64, in the first group's heads, up to four. Raises SsmgenError when it, or that of
        states, is more than that of bf16 products."""
        arguments = self.arguments(0)
        call = by_role(arguments)
        H, G, *_ = self.shape
        some, state = slice(min(4, H // G)), "state" if self.form is Form.POOL else "final_states_out"
        call[state].normal_()
        lead = 1 if self.form is Form.POOL else 2
        per_token = [n for n in ("x", "dt", "g", "B", "C") if n in call and call[n].dim() > 1]
        views: dict[str, Any] = {n: call[n].narrow(lead, 0, call[n].shape[lead] if n in "BC" else some.stop) for n in per_token}
        views |= {n: t[:, :1] if lead == 1 else t[:, :, :1] for n, t in views.items() if n in ("B", "C")}
        views = {n: t if lead == 2 else t[None] for n, t in views.items()}
        views |= {n: call[n][some] for n in ("A", "dt_bias", "g") if n in call and n not in views}
        views |= {"D": self.D[some, None]} if "D" in call else {}
        how: dict[str, Any] = {"dt_softplus": "dt" in call, "slope": self.form is Form.LIGHTNING}
        how |= {} if "dt" in call else {"dt": None, "A": None, "scale": self.d_state**-0.5}
        views |= {n: call[n] for n in ("cu_seqlens", "state_indices", "has_initial_state") if n in call}
        expected = {"out": torch.empty_like(views["x"], dtype=torch.float64), state.removesuffix("_out"): call[state][:, some].double()}
        reference(**views, **expected, **how, dtype=torch.float64)
        call["out"].fill_(float("nan"))
        self.function(**arguments, pdl=pdl)
        found = call["out"].narrow(lead, 0, some.stop), call[state][:, some]
        errors = [norm_error(a.reshape(1, -1), b.reshape(1, -1)) for a, b in zip(found, expected.values(), strict=True)]
        if not max(errors) < GATE[torch.bfloat16]:
            raise SsmgenError(f"chunk_scan {self.shape} {self.form.value}: errors {errors[0]:.1e} and {errors[1]:.1e} of states; not timed")
        return errors[0]


def mamba_ssm(case: Case) -> reports.Peer | None:
    function = reports.imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    if function is None or case.form is not Form.BATCH:
        return None
    names = ("x", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "return_final_states")
    calls = [{n: call[n] for n in names} | {"chunk_size": PEER_CHUNK} for call in map(case.arguments, range(case.sets))]
    return keeping(function, calls)


def fla(case: Case) -> reports.Peer | None:
    """chunk_simple_gla, which takes a decay per head too, where there are as many heads of q and k as of v."""
    function = reports.imported("fla.ops.simple_gla", "chunk_simple_gla")
    if function is None or case.form not in (Form.SIMPLE_GLA, Form.LIGHTNING) or case.shape[0] != case.shape[1]:
        return None
    calls = []
    for i in range(case.sets):
        decay = {"g": case.logs[i]} if case.form is Form.SIMPLE_GLA else {"g_gamma": case.A}
        calls.append({"q": case.C[i], "k": case.B[i], "v": case.x[i], "output_final_state": True} | decay)
    return keeping(function, calls)


PEERS = {"mamba_ssm.mamba_chunk_scan_combined": mamba_ssm, "fla": fla}


@torch.no_grad()
def run(
    shapes: Sequence[tuple[int, int, int, int]] = (),
    forms: Sequence[Form | str] = (),
    headdim: int = 64,
    d_state: int = 128,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__) | {"op": "chunk_scan"}
    points = list(itertools.product(map(Form, forms or [Form.BATCH]), shapes or SHAPES))
    watch.begins(report["op"], len(points))
    for form, shape in points:
        named = {"form": form.value, "headdim": headdim, "d_state": d_state, "shape": list(shape)}
        with reports.case(report, named, watch, _line) as row:
            host = shape[2] * shape[3] <= HOST_TOKENS
            row |= measure(Case(shape, form, headdim, d_state, device), PEERS if peers else {}, rounds, host, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    heads, groups, count, length = row["shape"]
    what = f"{row['form']}, {heads} x {row['headdim']} x {row['d_state']}, groups {groups}"
    return Point(what, "sequences x tokens", f"{count} x {length}", "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['form']} {' x '.join(map(str, row['shape']))}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's."""
    ours, host = f"{'us':>9}{'TB/s':>7}{'no pdl':>9}{'mul':>9}{'x mul':>8}", f"{'host us':>9}{'bound':>7}{'compile s':>11}"
    heading = f"{ours}{'peer':>11}{'ratio':>7}{host}"
    lines = [*reports.head(report), "chunk_scan: heads x groups x sequences x tokens", f"{'case':32}{heading}{reports.LAST}"]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        peer = next((name for name in PEERS if name in us), "")
        lines.append(
            f"{_what(row):32}" + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["ssmgen"], 9) + cell(us["mul"], 9)
            + cell(row["mul_ratio"], 8, 3) + cell(us.get(peer), 11) + cell(row["peer_ratio"].get(peer), 7) + cell(host.get("ssmgen"), 9)
            + cell(host.get("ssmgen_bound"), 7) + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
