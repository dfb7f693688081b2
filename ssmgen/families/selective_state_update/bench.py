"""Cases and contenders for selective_state_update.

Intermediates: the state after each token goes to a buffer and the pool is only read, 1 + tokens passes over the state; otherwise it is read
and written, 2 passes, as the slot copy does in place. TB/s counts the state. FlashInfer gets the same call; mamba-ssm has one token only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ssmgen

from ... import runtime
from ...accuracy import norm_error
from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema, timing
from ...bench.progress import PRINTING, Watch
from ...bench.report import GATE, HOST_BATCH, MAX_SETS, MIN_SETS, cell
from ...bench.rows import Point
from ...bench.schema import COUNT, FLAG, TEXT
from ...calls.checks import NARROW, STORED_DTYPES
from ...engine.narrow_reference import widened
from ...errors import SsmgenError
from ...models import Model, find_model
from ...spec import SM90, DType, Narrow, must
from .models import Mamba
from .operands import OPERANDS
from .reference import selective_state_update as reference
from .views import Options, views_of

DEFAULT_CASES = [
    ("nemotron-h-8b", DType.BF16),
    ("nemotron-h-8b", DType.F32),
    ("mamba-130m", DType.F32),
    ("falcon-mamba-7b", DType.F32),
]
DEFAULT_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
POOL_BYTES = 640e6  # slots are drawn at random from a pool of ten times the L2 cache, or of MIN_SETS batches if that is more


OPTIONS = (
    cli.several("--model", "names", str, help="May repeat. Default: those of docs/performance.md."),
    cli.stored,
    cli.batches,
    cli.tokens,
    cli.intermediates,
    cli.tp,
)
REPORT = schema.Report(
    {"model": TEXT, "heads": COUNT, "state": TEXT, "tokens": COUNT, "intermediates": FLAG, "batch": COUNT}, row=schema.COPY, nameless=True
)
QUICK: dict[str, Any] = {"batches": (1, 16, 128), "names": ("nemotron-h-8b", "mamba-130m")}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a model."""
    return {"names": (model.name,), "tp": tp} if isinstance(model, Mamba) else None


@dataclass
class Case:
    """Rotating inputs of one model at one batch size, in the layout in which models call: A, dt, D and dt_bias as stride-0 views."""

    model: Model
    state: Tensor  # [slots, H, P, N]; Mamba-1: [slots, dim, N]
    batch: int
    tokens: int = 1
    intermediates: bool = False
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        slots, device = self.state.shape[0], self.state.device
        mamba1 = self.model.kind == "mamba1"
        B, H, P, N, G = self.batch, self.model.nheads, self.model.headdim, self.model.d_state, self.model.ngroups
        lead = (B,) if self.tokens == 1 else (B, self.tokens)
        self.sets = max(1, min(MAX_SETS, slots // B))
        self.slots = torch.randperm(slots, device=device)[: self.sets * B].to(torch.int32).view(self.sets, B)

        def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        row = (P,) if mamba1 else (H, P)
        group = (N,) if mamba1 else (G, N)
        self.x, self.out = rand(self.sets, *lead, *row), torch.empty(self.sets, *lead, *row, device=device, dtype=torch.bfloat16)
        self.B, self.C = rand(self.sets, *lead, *group), rand(self.sets, *lead, *group)
        self.z = rand(self.sets, *lead, *row) if self.model.gate else None
        if mamba1:
            self.dt = rand(self.sets, B, P)
            self.A = -torch.rand(P, N, device=device) - 0.1
            self.D, self.dt_bias = rand(P), torch.rand(P, device=device) - 4
        else:
            self.dt = rand(self.sets, *lead, H, 1).expand(self.sets, *lead, H, P)
            self.A = (-torch.rand(H, device=device) - 0.1)[:, None, None].expand(H, P, N)
            self.D = rand(H)[:, None].expand(H, P)
            self.dt_bias = (torch.rand(H, device=device) - 4).bfloat16()[:, None].expand(H, P)
        narrow = self.state.dtype in NARROW
        self.scale = reports.scales_of(self.state)
        self.kept = self.kept_scales = None
        if self.intermediates:
            count = max(1, min(self.sets, int(POOL_BYTES) // (B * self.tokens * self.slot_bytes)))
            self.kept = torch.empty(count, B, self.tokens, H, P, N, device=device, dtype=self.state.dtype)
            self.kept_scales = torch.empty(count, B, self.tokens, H, P, device=device) if narrow else None

    def arguments(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        z = None if self.z is None else self.z[i]
        args = (self.state, self.x[i], self.dt[i], self.A, self.B[i], self.C[i], self.D, z, self.dt_bias, True)
        kept: dict[str, Any] = {} if self.scale is None else {"state_scale": self.scale}
        if self.kept is not None:
            kept |= {"intermediate_states": self.kept[i % len(self.kept)], "update_state": False}
        if self.kept_scales is not None:
            kept["intermediate_state_scales"] = self.kept_scales[i % len(self.kept_scales)]
        return args, {"state_indices": self.slots[i], "out": self.out[i]} | kept

    @property
    def slot_bytes(self) -> int:
        scales = 0 if self.scale is None else self.scale[0].nbytes
        return self.state[0].numel() * self.state.element_size() + scales

    @property
    def passes(self) -> int:
        """Times that one call reads or writes a whole state."""
        return 1 + self.tokens if self.intermediates else 2

    @property
    def state_bytes(self) -> int:
        """Read and written by one call."""
        return self.passes * self.batch * self.slot_bytes

    def bound(self, pdl: bool) -> timing.Launch:
        """Our kernel, with the host's part of every call done beforehand."""
        calls = []
        for i in range(self.sets):
            args, kwargs = self.arguments(i)
            calls.append(ssmgen.bind(ssmgen.selective_state_update, *args, **kwargs, pdl=pdl))
        return lambda i: calls[i]()

    def gate(self, pdl: bool | None = None) -> tuple[float, float]:
        """Norm errors of the states that one call leaves and of its output, against float64, on a few rows.

        Raises SsmgenError when one is more than rounding: once where it is stored, and in f32 once per token.
        """
        rows = torch.arange(min(self.batch, 4), device=self.state.device)
        args, kwargs = self.arguments(0)
        names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
        named = {n: t for n, t in zip(names, args, strict=False) if t is not None}
        named |= {n: t for n, t in kwargs.items() if isinstance(t, Tensor)}
        touched = named["state_indices"][rows].long()
        small = named | {n: named[n][rows] for n in ("x", "dt", "B", "C", "z", "out", "intermediate_states") if n in named}
        small |= {"state": self.state[touched], "state_indices": rows}
        options = {"dt_softplus": True, "update_state": self.kept is None}
        small |= {} if self.scale is None else {"state_scale": self.scale[touched]}
        small |= {} if self.kept_scales is None else {"intermediate_state_scales": self.kept_scales[0][rows]}
        views = views_of(small, Options(True, None, -1, 0, self.kept is None), [])
        written = {
            n: widened(views[n], views.pop(OPERANDS.scales.get(n, ""), None), torch.float64)
            for n in (*OPERANDS.scales, "out")
            if n in views
        }
        reference(**views | written, **options, dtype=torch.float64)
        self.out.fill_(float("nan"))
        ssmgen.selective_state_update(*args, **kwargs, pdl=pdl)
        state_scale = None if self.scale is None else self.scale[touched]
        results = {"state": widened(self.state[touched], state_scale, torch.float64), "out": self.out[0][rows]}
        if self.kept is not None:
            kept_scales = None if self.kept_scales is None else self.kept_scales[0][rows]
            results["intermediate_states"] = widened(self.kept[0][rows], kept_scales, torch.float64)
        errors = {n: norm_error(t, written[n].view(t.shape)) for n, t in results.items()}
        out_error, error = errors.pop("out"), max(errors.values())
        if not (error < GATE[self.state.dtype] + (self.tokens - 1) * GATE[torch.float32] and out_error < 1e-2):
            raise SsmgenError(f"{self.model.name} batch {self.batch}: state error {error:.1e}, output error {out_error:.1e}; not timed")
        return error, out_error


def flashinfer(case: Case) -> reports.Peer | None:
    """FlashInfer serves Mamba-2 only."""
    function = None if case.model.kind == "mamba1" else reports.imported("flashinfer.mamba", "selective_state_update")
    if function is None:
        return None
    calls = []
    for i in range(case.sets):
        (state, x, dt, A, B, C, D, z, dt_bias, softplus), given = case.arguments(i)
        options: dict[str, Any] = {} if case.scale is None else {"state_scale": case.scale}
        options |= {"z": z, "dt_bias": dt_bias, "dt_softplus": softplus, "state_batch_indices": given["state_indices"], "out": given["out"]}
        if case.tokens > 1:
            options |= {"cache_steps": case.tokens, "disable_state_update": case.intermediates}
            if case.intermediates:  # without rows, FlashInfer takes the slots for them
                rows = torch.arange(case.batch, device=x.device, dtype=given["state_indices"].dtype)
                options |= {"intermediate_states_buffer": given["intermediate_states"], "intermediate_state_indices": rows}
                if case.kept_scales is not None:
                    options["intermediate_state_scales"] = given["intermediate_state_scales"]
        calls.append(((state, x, dt, A, B, C, D), options))
    return lambda i: function(*calls[i][0], **calls[i][1])


def mamba_ssm(case: Case) -> reports.Peer | None:
    function = reports.imported("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    if function is None or case.tokens > 1 or case.scale is not None:
        return None
    calls = [case.arguments(i) for i in range(case.sets)]
    return lambda i: function(*calls[i][0], state_batch_indices=calls[i][1]["state_indices"])


PEERS = {"flashinfer": flashinfer, "mamba_ssm": mamba_ssm}


def mistakes(
    names: Sequence[str], tokens: Sequence[int] = (), intermediates: bool | None = None, **others: Any
) -> list[str]:  # fmt: skip
    """What options of the command line do not go together, in words."""
    several = max(tokens, default=1) > 1
    mamba1 = [n for n in names if find_model(n).kind == "mamba1"]
    return [
        *must(not intermediates or several, "--intermediates needs --tokens of more than 1"),
        *must(not (several and mamba1), f"several tokens are for Mamba-2, not {', '.join(mamba1)}"),
    ]


def run(
    names: Sequence[str] = (),
    states: Sequence[DType | Narrow] = (),
    batches: Sequence[int] = (),
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    *,
    tokens: Sequence[int] = (),
    intermediates: bool | None = None,
    tp: int = 1,
) -> dict[str, Any]:
    """The whole report, as JSON would hold it; whatever is empty or None is the default. intermediates: of calls with several tokens.

    Raises SsmgenError without a GPU and for models that other functions decode.
    """
    report = reports.begin(__doc__) | {"op": "selective_state_update"}
    if others := [n for n in names if find_model(n).function != "selective_state_update"]:
        raise SsmgenError(f"not decoded by selective_state_update: {', '.join(others)}")
    cases = [(n, s) for n in names for s in (states or [find_model(n).state])] or [c for c in DEFAULT_CASES if not states or c[1] in states]
    models = [(find_model(name).divided(tp), state_type) for name, state_type in cases]
    sizes = list(batches or DEFAULT_BATCHES)
    steps = {model.name: [T for T in tokens or [1] if T == 1 or model.kind != "mamba1"] for model, _ in models}
    watch.begins(report["op"], sum(len(steps[model.name]) for model, _ in models) * len(sizes))
    for model, state_type in models:
        dtype = STORED_DTYPES[state_type]
        shape = (model.headdim, model.d_state) if model.kind == "mamba1" else (model.nheads, model.headdim, model.d_state)
        least = math.ceil(POOL_BYTES / (torch.Size(shape).numel() * dtype.itemsize))
        state = reports.normal_pool(max(least, MIN_SETS * max(sizes)), shape, dtype, "cuda")
        for T, batch in itertools.product(steps[model.name], sizes):
            kept = T > 1 and intermediates is not False
            named = {"model": model.name, "state": state_type.value, "heads": model.nheads, "tokens": T, "intermediates": kept}
            with reports.case(report, named | {"batch": batch}, watch, _line) as row:
                pool = state[: max(least, MIN_SETS * batch)]
                row |= _measured(Case(model, pool, batch, T, kept), report["ceilings_tbs"]["in_place"], rounds, peers, watch)
        del state
    return report


def _measured(case: Case, ceiling: float, rounds: int, peers: bool, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case."""
    (args, kwargs), arch = case.arguments(0), runtime.device_arch(case.state.device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    state_errors, out_errors = zip(*reports.gates(case.gate, pdls), strict=True)
    contenders = {"ssmgen_pdl" if pdl else "ssmgen": case.bound(pdl) for pdl in pdls}
    contenders |= reports.slot_copies(case.state, case.slots, pdls)
    others = reports.usable({name: make(case) for name, make in PEERS.items()} if peers else {})
    watch.timing(len(contenders | others))
    us = timing.device_us(contenders | others, case.sets, rounds)
    served = us.get("ssmgen_pdl", us["ssmgen"])  # pdl=None is pdl=True where the device can
    copy = min((us[name] for name in ("copy_pdl", "copy") if name in us), default=None)
    return {
        "us": us,
        "sm_mhz": timing.sm_mhz(),
        "served_us": served,
        "passes": case.passes,
        "tbs": case.state_bytes / served / 1e6,
        "ceiling_fraction": case.state_bytes / served / 1e6 / ceiling,
        "copy_ratio": served / copy if copy and not case.intermediates else None,
        "peer_ratio": {name: served / us[name] for name in others},
        "host_us": reports.host_us(ssmgen.selective_state_update, args, kwargs, others) if case.batch <= HOST_BATCH else {},
        "state_error": max(state_errors),
        "out_error": max(out_errors),
        **reports.served(ssmgen.selective_state_update, args, kwargs, arch),
    }


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    heads = [f"{row['heads']} heads"] if row["heads"] > 1 else []  # Mamba-1 has one
    several = [f"{row['tokens']} tokens"] if row["tokens"] > 1 else []
    kept = ["every state kept"] if row["intermediates"] else []
    return Point(", ".join([row["model"], *heads, f"{row['state']} state", *several, *kept]), "batch", str(row["batch"]), "in_place")


def _line(row: Mapping[str, Any]) -> str:
    several = f" T {row['tokens']}{' kept' if row['intermediates'] else ''}" if row["tokens"] > 1 else ""
    against = f"{row['tbs']:.2f} TB/s" if row["copy_ratio"] is None else f"{row['copy_ratio']:.3f} x copy"
    return f"{row['model']} {row['state']}{several} batch {row['batch']}: {row['served_us']:.2f} us, {against}"


def table(report: dict[str, Any]) -> str:
    """The report for a terminal. `kept`: with intermediates; `ceiling`: TB/s over that of torch's multiplication in place."""
    lines = [
        *reports.head(report),
        f"{'model':18}{'heads':>6} {'state':6}{'T':>3}{'kept':>5}{'batch':>6}{'us':>9}{'TB/s':>7}{'ceiling':>8}{'no pdl':>9}{'copy':>9}"
        f"{'x copy':>8}{'flashinfer':>12}{'ratio':>7}{'mamba_ssm':>11}{'ratio':>7}{'host us':>9}{'bound':>7}{'peers host':>14}"
        f"{reports.LAST}",
    ]
    for row in report["rows"]:
        us, host, kept = row["us"], row["host_us"], "yes" if row["intermediates"] else "no"
        others = "/".join(f"{host[p]:.1f}" for p in PEERS if p in host)
        lines.append(
            f"{row['model']:18}{row['heads']:6} {row['state']:6}{row['tokens']:3}{kept:>5}{row['batch']:6}"
            + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(row["ceiling_fraction"], 8) + cell(us["ssmgen"], 9)
            + cell(min((us[name] for name in ("copy", "copy_pdl") if name in us), default=None), 9) + cell(row["copy_ratio"], 8, 3)
            + cell(us.get("flashinfer"), 12) + cell(row["peer_ratio"].get("flashinfer"), 7)
            + cell(us.get("mamba_ssm"), 11) + cell(row["peer_ratio"].get("mamba_ssm"), 7) + cell(host.get("ssmgen"), 9)
            + cell(host.get("ssmgen_bound"), 7) + f"{others:>14}" + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
