"""Cases and contenders for replay_selective_state_update and, with a ring, checkpoint_selective_state_update.

Slots are those of enough sets for 200 MB of states, and of 200 sets at most, in random order; every set has slots and inputs of its own.
Nobody does the bookkeeping, so that every call of a set does the same. window 0: the history of one step, of which so many tokens were
accepted. A ring: so many count, and no state is written, but in the share of sequences that writes, where as many count as it takes. With
conv1d, a call is two or three launches: the update of the convolution of x, B and C, whose output they are views of, comes first.

Contenders: one kernel, and two; external PDL is of the first kernel (behind the convolution, it reads all else before that ends), internal
PDL of the second. TB/s counts states, read and written. The copy reads and writes all of them, even where we only read.
Peers: FlashInfer's checkpointing_ssu, with PDL, on a ring of the same window (window 0: the shortest on which every step writes), and
TensorRT-LLM's replay_selective_state_update; not behind our convolution. Both round factors of products to bf16; `precision` is ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import click
import torch

from ... import api, nvrtc, runtime
from ...bench import options as cli
from ...bench import report as reports
from ...bench import schema, timing
from ...bench.progress import PRINTING, Watch
from ...bench.report import HOST_BATCH, cell
from ...bench.rows import Point
from ...bench.schema import COUNT, FLAG, PART, TEXT
from ...calls.checks import STORED_DTYPES
from ...engine.recurrences.mamba.model import MambaModel
from ...models import Model
from ...render import render
from ...spec import Arch, DType, KernelSpec, Narrow
from .bench_case import ACCEPTED, SHAPE, TOKENS, Case, Form, forms
from .problem import MAX_TOKENS

BATCHES = (1, 8, 64, 256)
WINDOWS = (0, 16)


OPTIONS = (
    cli.several("--state", "states", cli.Choice(DType, Narrow), help="State dtype; may repeat. Default: bf16."),
    cli.several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1, 8, 64, 256."),
    cli.several("--tokens", "tokens", click.IntRange(1, MAX_TOKENS), help="Per sequence; may repeat. Default: 6."),
    cli.several("--accepted", "accepted", click.IntRange(0, MAX_TOKENS), help="Tokens of the history that count; may repeat. Default: 3."),
    cli.several("--window", "windows", click.IntRange(0, MAX_TOKENS), help="Of a ring; 0: one step's history. May repeat. Default: 0, 16."),
    cli.several("--writing", "writing", click.FloatRange(0, 1), help="Share of steps on a ring that write; may repeat. Default: 0."),
    click.option("--shape", type=cli.Shape("H,P,N,G", "16,64,128,1"), default="16,64,128,1", show_default=True),
    click.option("--rounding", is_flag=True, help="Round the state stochastically."),
    click.option("--precision", type=click.Choice(["f32", "bf16x2", "bf16"]), default="f32", show_default=True, help="Of our products."),
    click.option("--with-conv1d", is_flag=True, help="Behind the update of the convolution of x, B and C, in one graph."),
    click.option("--two-kernels/--one-kernel", default=None, help="Default: both."),
    click.option("--external-pdl/--no-external-pdl", default=None, help="Of the first kernel, and the convolution. Default: both."),
    click.option("--internal-pdl/--no-internal-pdl", default=None, help="Of the second of two kernels. Default: both."),
)
REPORT = schema.Report(
    {"state": TEXT, "window": COUNT, "writing?": PART, "written?": PART, "tokens": COUNT, "accepted": COUNT, "batch": COUNT},
    {"shape": schema.list_of(COUNT, 4), "precision": TEXT, "rounding": FLAG, "with_conv1d": FLAG},
    {"written": PART, "copy_ratio": schema.maybe(schema.RATIO), "copy_us": schema.maybe(schema.TIME)},
    times=(),
)
QUICK: dict[str, Any] = {"batches": (1, 64)}


def of_model(model: Model, tp: int, quick: bool) -> dict[str, Any] | None:
    """Options of `run` for a Mamba-2 model; tp: already divided by."""
    if not isinstance(model, MambaModel) or model.kind != "mamba2":
        return None
    return {"shape": (model.nheads, model.headdim, model.d_state, model.ngroups), "states": (model.state,)}


def flashinfer(case: Case) -> reports.Peer | None:
    function = reports.imported("flashinfer.mamba", "checkpointing_ssu")
    H, P, N, G = case.shape
    T, window = case.tokens, case.window or case.tokens
    if function is None or case.conv or not T <= window <= 16:
        return None
    slots, device = len(case.state), case.state.device
    x_cache, B_cache = (torch.randn(slots, *s, device=device).bfloat16() for s in ((H, window + T, P), (G, window + T, N)))
    dt_cache = torch.rand(slots, H, window + T, device=device) / 8
    start = torch.randint(window + T, (slots,), device=device, dtype=torch.int32)
    names = ("state", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C", "out", "D", "dt_bias", "dt_softplus")
    calls = []
    for i in range(case.sets):
        ours = case.arguments(i)
        call = {n: ours[n] for n in names} | {"x_cache": x_cache, "B_cache": B_cache, "dt_cache": dt_cache, "ring_start": start}
        calls.append(call | {"state_batch_indices": ours["state_indices"], "rand_seed": ours.get("rand_seed"), "enable_pdl": True})
        calls[-1] |= {} if case.scale is None else {"state_scale": case.scale}
    return lambda i: function(**calls[i])


def tensorrt_llm(case: Case) -> reports.Peer | None:
    function = reports.imported("tensorrt_llm._torch.modules.mamba.replay_selective_state_update", "replay_selective_state_update")
    if function is None or case.conv or case.window:
        return None
    ours = ("two_kernels", "internal_pdl", "after_conv", "precision")
    calls = [{n: t for n, t in case.arguments(i).items() if n not in ours} for i in range(case.sets)]
    for call in calls:
        call["state_batch_indices"] = call.pop("state_indices")
    return lambda i: function(**calls[i])


PEERS = {"flashinfer": flashinfer, "tensorrt_llm": tensorrt_llm}


def served(case: Case, form: Form, arch: Arch) -> dict[str, Any]:
    """The variant of a form, by which rule, and what compiling it takes; of two kernels, both."""
    chosen = api.explain(case.function, **case.arguments(0, form), pdl=form.external, arch=str(arch)).chosen
    parts = chosen.spec.kernels
    return {"specs": [str(spec) for spec in parts], "rule": chosen.rule, "compile_seconds": sum(_compile_seconds(s, arch) for s in parts)}


@cache
def _compile_seconds(spec: KernelSpec, arch: Arch) -> float:
    return nvrtc.compile_cubin(render(spec, arch), arch, str(spec)).seconds


def measure(case: Case, kernels: Sequence[bool | None], peers: bool, rounds: int, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case. kernels: what `forms` takes."""
    arch = runtime.device_arch(case.state.device.index)
    wanted = forms(*kernels, arch)
    errors = reports.gates(case.gate, wanted)
    others = reports.usable({name: make(case) for name, make in PEERS.items()} if peers else {})
    contenders = {form.name: case.bound(form) for form in wanted}
    pdls = sorted({form.external for form in wanted}, reverse=True)
    if case.conv:
        contenders |= {"conv1d_pdl" if pdl else "conv1d": case.bound_conv(pdl) for pdl in pdls}
    contenders |= reports.slot_copies(case.state, case.slots, pdls) | others
    watch.timing(len(contenders))
    us = timing.device_us(contenders, case.sets, rounds)
    first = wanted[0]
    time, copies = us[first.name], [t for name, t in us.items() if name.startswith("copy")]
    best = min(us[form.name] for form in wanted)
    return {
        "written": case.written,
        "sets": case.sets,
        "us": us,
        "sm_mhz": timing.sm_mhz(),
        "served": first.name,
        "served_us": time,
        "best": next(form.name for form in wanted if us[form.name] == best),
        "bytes": case.bytes_moved,
        "tbs": case.bytes_moved / time / 1e6,
        "copy_us": min(copies, default=None),
        "copy_ratio": time / min(copies) if copies else None,
        "peer_ratio": {name: time / us[name] for name in others},
        "host_us": reports.host_us(case.function, (), case.arguments(0, first), others) if case.batch <= HOST_BATCH else {},
        "state_error": max(state for state, _ in errors),
        "out_error": max(out for _, out in errors),
        **served(case, first, arch),
        "variants": {form.name: served(case, form, arch) for form in wanted[1:]},
    }


def fits(tokens: int, accepted: int, window: int, writing: float) -> str:
    """Why a case cannot be; empty if it can."""
    if not window:
        return "" if accepted <= tokens else f"{accepted} accepted of a step of {tokens} tokens"
    if accepted > window:
        return f"{accepted} accepted tokens in a window of {window}"
    if tokens > window and writing < 1:
        return f"{tokens} tokens do not fit into a window of {window}"
    return "" if writing == 1 or accepted + tokens <= window else f"{accepted} + {tokens} tokens always outgrow a window of {window}"


def mistakes(**chosen: Any) -> list[str]:
    """What is wrong with options that are right each by itself."""
    tokens, accepted = chosen["tokens"] or [TOKENS], chosen["accepted"] or [ACCEPTED]
    found = [fits(*case) for case in itertools.product(tokens, accepted, chosen["windows"] or (0,), chosen["writing"] or (0.0,))]
    H, *_, G = chosen["shape"]
    found += [f"{H} heads are not a multiple of {G} groups"] if H % G else []
    if chosen["writing"] and not any(chosen["windows"] or WINDOWS):
        found.append("--writing is of a ring: give --window")
    if chosen["internal_pdl"] and chosen["two_kernels"] is False:
        found.append("--internal-pdl is of two kernels")
    if chosen["rounding"] and DType.F32 in chosen["states"]:
        found.append("an f32 state is not rounded")
    return list(dict.fromkeys(filter(None, found)))


@torch.no_grad()
def run(
    states: Sequence[DType | Narrow] = (),
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    accepted: Sequence[int] = (),
    windows: Sequence[int] = (),
    writing: Sequence[float] = (),
    shape: tuple[int, int, int, int] = SHAPE,
    rounding: bool = False,
    precision: str = "f32",
    with_conv1d: bool = False,
    two_kernels: bool | None = None,
    external_pdl: bool | None = None,
    internal_pdl: bool | None = None,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The whole report, as JSON would hold it. Raises SsmgenError without a GPU."""
    report = reports.begin(__doc__)
    same = {"shape": list(shape), "rounding": rounding, "precision": precision, "with_conv1d": with_conv1d}
    report |= {"op": "replay_selective_state_update", **same}
    choices = itertools.product(
        states or [DType.BF16], windows or WINDOWS, writing or [0.0], tokens or [TOKENS], accepted or [ACCEPTED], batches or BATCHES
    )
    points = [(state, w, share if w else 0.0, T, K, batch) for state, w, share, T, K, batch in choices]
    points = [p for p in dict.fromkeys(points) if not fits(p[3], p[4], p[1], p[2])]
    watch.begins(report["op"], len(points))
    for state, window, share, T, K, batch in points:
        named = {"state": state.value, "window": window, "writing": share, "tokens": T, "accepted": K, "batch": batch}
        with reports.case(report, named, watch, _line) as row:
            case = partial(Case, batch, T, K, window, share, shape, STORED_DTYPES[state], rounding, precision, with_conv1d, device)
            row |= measure(case(), (two_kernels, external_pdl, internal_pdl), peers, rounds, watch)
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    H, P, N, G = report["shape"]
    share = row.get("writing", row.get("written"))  # what was asked for; at first, reports only had what that is at a batch size
    history = f"ring of {row['window']}, {f'{share:.0%} write' if share else 'none write'}" if row["window"] else "history of one step"
    what = [f"{H} heads of {P} x {N}", f"{G} group{'s' if G > 1 else ''}", f"{row['state']} state", history]
    what += [f"{row['tokens']} token{'s' if row['tokens'] > 1 else ''}, {row['accepted']} accepted"]
    what += [f"products in {report['precision']}"] if report["precision"] != "f32" else []
    what += ["stochastic rounding"] if report["rounding"] else []
    what += ["behind conv1d"] if report["with_conv1d"] else []
    return Point(", ".join(what), "batch", str(row["batch"]), "in_place")


def _line(row: Mapping[str, Any]) -> str:
    what = f"{row['state']} {'step' if not row['window'] else 'ring'} T {row['tokens']} K {row['accepted']} batch {row['batch']}"
    return f"{what}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s"


COLUMNS = (
    ("no pdl", "ssmgen"), ("two", "two_kernels"), ("ext.", "two_kernels_pdl"), ("int.", "two_kernels_internal"),
    ("both", "two_kernels_pdl_internal"), ("conv1d", "conv1d_pdl"),
)  # fmt: skip


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `ratio`: of our time to the peer's; two, ext., int. and both: two kernels, with which PDL."""
    H, P, N, G = report["shape"]
    what = [f"{H} heads of {P} x {N}, {G} groups, precision {report['precision']}"]
    what += ["states rounded stochastically"] if report["rounding"] else []
    what += ["behind conv1d"] if report["with_conv1d"] else []
    lines = [
        *reports.head(report),
        f"replay_selective_state_update: {', '.join(what)}; window 0: the history of one step",
        f"{'state':6}{'window':>7}{'T':>3}{'K':>3}{'written':>8}{'batch':>6}{'us':>8}{'TB/s':>6}"
        + "".join(f"{head:>8}" for head, _ in COLUMNS)
        + f"{'copy':>8}{'x copy':>7}{'flashinfer':>11}{'ratio':>7}{'tensorrt':>9}{'ratio':>7}{'host us':>8}{'bound':>7}{'peer':>7}"
        + f"{'compile s':>10}{reports.LAST}",
    ]
    for row in report["rows"]:
        us, host, ratio = row["us"], row["host_us"], row["peer_ratio"]
        lines.append(
            f"{row['state']:6}{row['window']:7}{row['tokens']:3}{row['accepted']:3}{row['written']:8.2f}{row['batch']:6}"
            + cell(row["served_us"], 8) + cell(row["tbs"], 6) + "".join(cell(us.get(name), 8) for _, name in COLUMNS)
            + cell(row["copy_us"], 8) + cell(row["copy_ratio"], 7) + cell(us.get("flashinfer"), 11) + cell(ratio.get("flashinfer"), 7)
            + cell(us.get("tensorrt_llm"), 9) + cell(ratio.get("tensorrt_llm"), 7) + cell(host.get("ssmgen"), 8)
            + cell(host.get("ssmgen_bound"), 7) + cell(host.get("flashinfer"), 7, 1) + cell(row["compile_seconds"], 10, 3)
            + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
