"""Cases and contenders for chunk_delta_rule: bf16 but for log decays and states, which are f32; q and k are divided by their norms inside.

Inputs and outputs rotate over as many sets as exceed 640 MB; all of them share one workspace. Bytes: q, k, v, g, beta and the output once,
and the states that are read and written, but not the workspace. The ceiling is torch's multiplication of dense tensors, out of place, that
moves as many bytes.

Forms. batch: sequences of equal lengths, [batch, T], from zeros, which leave their final states. pool: the same tokens packed as sequences
of different lengths, which go on from slots of a pool, and leave their states there. delta_rule: as batch, without decays.

Peers, of batches: flash-linear-attention's chunk_gated_delta_rule, or chunk_delta_rule; q and k are repeated for its heads of v outside of
the timing. FlashInfer's chunk_gated_delta_rule; linear decays and f32 betas are made outside of the timing. FlashQLA's. What they return is
kept until the set's next turn, so that their outputs rotate too. Host times are eager calls, arguments at hand.
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
from ...bench.report import cell
from ...bench.rows import Point
from ...bench.schema import COUNT, TEXT
from ...errors import SsmgenError
from ...models import Model
from .reference import chunk_delta_rule as reference
from .segments import workspace_for

SHAPES = [
    *((16, 64, 1, tokens) for tokens in (2048, 8192, 32768)),
    (16, 64, 4, 8192), (16, 64, 16, 2048), (16, 32, 1, 8192), (4, 16, 1, 8192), (4, 16, 1, 32768), (2, 8, 1, 32768),
]  # fmt: skip
SET_BYTES, MIN_SETS = 640e6, 2
HOST_TOKENS = 2048  # host times are of cases up to this
GATE = 1e-2  # norm error of the output and of states: of bf16 operands of three products, one behind the other


class Form(Enum):
    BATCH = "batch"
    POOL = "pool"
    DELTA_RULE = "delta_rule"


OPTIONS = (
    cli.several(
        "--shape", "shapes", cli.Shape("HK,HV,B,T", "16,64,1,8192"), help="Heads of k and v, sequences, tokens; may repeat. Default: nine."
    ),
    cli.several("--form", "forms", click.Choice([form.value for form in Form]), help="May repeat. Default: batch."),
    click.option("--head-k", type=click.IntRange(16, 256), default=128, show_default=True),
    click.option("--head-v", type=click.IntRange(16, 256), default=128, show_default=True),
)
REPORT = schema.Report(
    {"form": TEXT, "head_k": COUNT, "head_v": COUNT, "shape": schema.list_of(COUNT, 4)}, {}, schema.MUL, **schema.MULTIPLIED
)
QUICK: dict[str, Any] = {"shapes": ((16, 32, 1, 2048), (4, 16, 1, 8192))}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a gated delta rule; tp: already divided by."""
    if model.kind != "gated_delta_rule":
        return None
    head_v, head_k, key_heads = model.shape
    shapes = tuple((key_heads, model.nheads, n, PROMPT) for n in ((1,) if quick else (1, 4, 16)))
    return {"shapes": shapes, "head_k": head_k, "head_v": head_v}


@dataclass
class Case:
    """Rotating inputs of one shape, (heads of k, heads of v, sequences, tokens of each)."""

    shape: tuple[int, int, int, int]
    form: Form = Form.BATCH
    head_k: int = 128
    head_v: int = 128
    device: torch.device | str = "cuda"
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        HK, HV, count, length = self.shape
        lead = (count * length,) if self.form is Form.POOL else (count, length)
        self.sets = min(reports.MAX_SETS, max(MIN_SETS, math.ceil(SET_BYTES / self.bytes_moved)))

        def made(*inner: int) -> Tensor:
            return torch.randn(self.sets, *lead, *inner, device=self.device, dtype=torch.bfloat16)

        self.q, self.k, self.v = made(HK, self.head_k), made(HK, self.head_k), made(HV, self.head_v)
        self.g, self.beta = -0.1 * torch.rand(self.sets, *lead, HV, device=self.device), made(HV).sigmoid()
        self.out = torch.empty_like(self.v)
        self.states = torch.zeros(self.sets, count, HV, self.head_v, self.head_k, device=self.device)
        longest = count * length if self.form is Form.POOL else length
        size = workspace_for(count * length, count, HV, self.head_k, self.head_v, None, longest)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.copied = [torch.empty(self.sets, self.bytes_moved // 8, device=self.device) for _ in range(2)]
        cuts = torch.randperm(count * length - 1)[: count - 1].sort().values + 1
        self.starts = torch.tensor([0, *cuts.tolist(), count * length], dtype=torch.int32, device=self.device)
        self.slots = torch.randperm(count, device=self.device).int()
        self.started = torch.ones(count, dtype=torch.bool, device=self.device)

    @property
    def function(self) -> Callable[..., Any]:
        return ssmgen.chunk_delta_rule if self.form is Form.DELTA_RULE else ssmgen.chunk_gated_delta_rule

    @property
    def bytes_moved(self) -> int:
        HK, HV, count, length = self.shape
        state = 4 * HV * self.head_v * self.head_k * (2 if self.form is Form.POOL else 1)
        gates = HV * (2 if self.form is Form.DELTA_RULE else 6)
        return count * (length * (4 * HK * self.head_k + 4 * HV * self.head_v + gates) + state)

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        call: dict[str, Any] = {
            "q": self.q[i],
            "k": self.k[i],
            "v": self.v[i],
            "beta": self.beta[i],
            "out": self.out[i],
            "workspace": self.workspace,
            "use_qk_l2norm": True,
        }
        if self.form is not Form.DELTA_RULE:
            call["g"] = self.g[i]
        if self.form is not Form.POOL:
            return call | {"return_final_states": True, "final_states_out": self.states[i]}
        slots = {"state": self.states[i], "state_indices": self.slots, "has_initial_state": self.started}
        return call | {"cu_seqlens": self.starts, **slots}

    def ceiling(self, i: int) -> Tensor:
        return torch.mul(self.copied[0][i], 1.0, out=self.copied[1][i])

    def gate(self, pdl: bool | None = None) -> float:
        """Norm error of one call's output, against float64, in the first key head's heads, up to four. Raises SsmgenError when it, or that
        of states, is more than that of bf16 products."""
        call = self.arguments(0)
        HK, HV, *_ = self.shape
        some, state = slice(min(4, HV // HK)), "state" if self.form is Form.POOL else "final_states_out"
        lead = 1 if self.form is Form.POOL else 2
        call[state].normal_()
        views: dict[str, Any] = {
            n: call[n].narrow(lead, 0, 1 if n in "qk" else some.stop) for n in ("q", "k", "v", "g", "beta") if n in call
        }
        views = {n: t if lead == 2 else t[None] for n, t in views.items()}
        views |= {n: call[n] for n in ("cu_seqlens", "state_indices", "has_initial_state") if n in call}
        expected = {"out": torch.empty_like(views["v"], dtype=torch.float64), state.removesuffix("_out"): call[state][:, some].double()}
        how: dict[str, Any] = {"gate": "log" if "g" in call else "none", "l2norm": True, "scale": self.head_k**-0.5}
        reference(**views, **expected, **how, dtype=torch.float64)
        call["out"].fill_(float("nan"))
        self.function(**call, pdl=pdl)
        found = call["out"].narrow(lead, 0, some.stop), call[state][:, some]
        errors = [norm_error(a.reshape(1, -1), b.reshape(1, -1)) for a, b in zip(found, expected.values(), strict=True)]
        if not max(errors) < GATE:
            what = f"{self.function.__name__} {self.shape} {self.form.value}"
            raise SsmgenError(f"{what}: errors {errors[0]:.1e} and {errors[1]:.1e} of states; not timed")
        return errors[0]


def fla(case: Case) -> reports.Peer | None:
    gated = case.form is Form.BATCH
    module, name = ("gated_delta_rule", "chunk_gated_delta_rule") if gated else ("delta_rule", "chunk_delta_rule")
    function = reports.imported(f"fla.ops.{module}", name)
    if function is None or case.form is Form.POOL:
        return None
    each = case.shape[1] // case.shape[0]
    names = ("v", "beta", "g") if gated else ("v", "beta")
    calls = []
    for arguments in map(case.arguments, range(case.sets)):
        keys = {n: arguments[n].repeat_interleave(each, 2) for n in ("q", "k")}
        calls.append(keys | {n: arguments[n] for n in names} | {"output_final_state": True, "use_qk_l2norm_in_kernel": True})
    return keeping(function, calls)


def flashinfer(case: Case) -> reports.Peer | None:
    function = reports.imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    if function is None or case.form is not Form.BATCH:
        return None
    count, length = case.shape[2:]
    shared = {"cu_seqlens": torch.arange(count + 1, device=case.device) * length, "max_seqlen": length, "output_final_state": True}
    calls = []
    for i in range(case.sets):
        flat = {n: t[i].flatten(0, 1) for n, t in {"q": case.q, "k": case.k, "v": case.v}.items()}
        gates = {"g": case.g[i].exp().flatten(0, 1), "beta": case.beta[i].float().flatten(0, 1)}
        left = {"output": torch.empty_like(flat["v"]), "output_state": torch.empty_like(case.states[i])}
        calls.append(flat | gates | left | shared | {"use_qk_l2norm_in_kernel": True})
    return keeping(function, calls)


def flash_qla(case: Case) -> reports.Peer | None:
    function = reports.imported("flash_qla", "chunk_gated_delta_rule")
    if function is None or case.form is not Form.BATCH:
        return None
    names, how = ("q", "k", "v", "g", "beta"), {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True}
    return keeping(function, [{n: t for n, t in case.arguments(i).items() if n in names} | how for i in range(case.sets)])


PEERS = {"fla": fla, "flashinfer": flashinfer, "flash_qla": flash_qla}


@torch.no_grad()
def run(
    shapes: Sequence[tuple[int, int, int, int]] = (),
    forms: Sequence[Form | str] = (),
    head_k: int = 128,
    head_v: int = 128,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__) | {"op": "chunk_delta_rule"}
    points = list(itertools.product(map(Form, forms or [Form.BATCH]), shapes or SHAPES))
    watch.begins(report["op"], len(points))
    for form, shape in points:
        named = {"form": form.value, "head_k": head_k, "head_v": head_v, "shape": list(shape)}
        with reports.case(report, named, watch, _line) as row:
            host = shape[2] * shape[3] <= HOST_TOKENS
            row |= measure(Case(shape, form, head_k, head_v, device), PEERS if peers else {}, rounds, host, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    key_heads, heads, count, length = row["shape"]
    what = f"{row['form']}, {key_heads} and {heads} heads, {row['head_k']} x {row['head_v']}"
    return Point(what, "sequences x tokens", f"{count} x {length}", "out_of_place")


def _line(row: Mapping[str, Any]) -> str:
    return f"{_what(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s, {row['mul_ratio']:.3f} x mul"


def _what(row: Mapping[str, Any]) -> str:
    return f"{row['form']} {' x '.join(map(str, row['shape']))}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's, named left of it."""
    ours, host = f"{'us':>9}{'TB/s':>7}{'no pdl':>9}{'mul':>9}{'x mul':>8}", f"{'host us':>9}{'bound':>7}{'compile s':>11}"
    heading = f"{ours}{''.join(f'{peer:>11}  ratio' for peer in PEERS)}{host}"
    first = "chunk_delta_rule: heads of k x heads of v x sequences x tokens"
    lines = [*reports.head(report), first, f"{'case':32}{heading}{reports.LAST}"]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        lines.append(
            f"{_what(row):32}" + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(us["ssmgen"], 9) + cell(us["mul"], 9)
            + cell(row["mul_ratio"], 8, 3)
            + "".join(cell(us.get(peer), 11) + cell(row["peer_ratio"].get(peer), 7) for peer in PEERS)
            + cell(host.get("ssmgen"), 9) + cell(host.get("ssmgen_bound"), 7) + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
