"""Cases and contenders for decode steps of whole layers between their projections, in bf16; a family's `bench.py` has what is its own:
MODELS, timed by default; CASES, by operator; and PEERS.

Slots are drawn at random from a pool of 640 MB of states, or of four batches if that is more. Every input set has slots, inputs, outputs
and weights of its own: in a model they are another layer's. Windows hold width - 1 inputs per channel, contiguous. TB/s counts states and
windows, read and written; of several tokens whose states and windows are kept one by one, read once and written as often. So are states
that have a slot per token, which begin after a random number of the last call's tokens; their windows roll. The ceiling is
the slot copy in place of as many bytes (up to whole 2 KiB), of one piece per sequence; there is none of states that are kept.

chain: the convolution's step, then the recurrence's, then the norm, as operators of ssmgen; its results must have the same bits. Peers are
such chains too. Host times are eager calls, arguments at hand; of chains, three of them, and where one package's output is the next one's
input, its views too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import ssmgen

from .. import api, nvrtc, runtime
from ..accuracy import norm_error
from ..calls.checks import TORCH_DTYPES
from ..engine.short_conv import MAX_TOKENS
from ..errors import SsmgenError
from ..models import Model, find_model
from ..render import render
from ..spec import SM90, Arch, DType, must
from . import bench_of, schema, timing
from . import options as cli
from . import report as reports
from .layer_case import Case, copied_bytes
from .progress import PRINTING, Watch
from .report import HOST_BATCH, MIN_SETS, cell
from .rows import Point
from .schema import COUNT, FLAG, TEXT

BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
STATES = (DType.BF16, DType.F32)
OPTIONS = (
    cli.several("--model", "names", str, help="May repeat. Default: two of those that have such layers."),
    cli.several("--state", "states", cli.Choice(DType), help="State dtype; may repeat. Default: bf16, f32."),
    cli.several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1 … 64, 256."),
    cli.tokens,
    click.option("--intermediates/--no-intermediates", default=None, help="Keep every token's. Default: if there are several."),
    click.option("--slot-per-token", "by_slot", is_flag=True, help="Several tokens: each one's state in a slot of the pool."),
    cli.tp,
)
REPORT = schema.Report(
    {"model": TEXT, "heads": COUNT, "state": TEXT, "batch": COUNT, "tokens?": COUNT, "intermediates?": FLAG}
    | {"by_slot?": FLAG, "layout?": TEXT},
    row=schema.COPY,
)
QUICK: dict[str, Any] = {"batches": (1, 64), "states": (DType.BF16,)}
POOL_BYTES = 640e6
PEER_GATE = 2e-2  # norm error of a peer's output: what it rounds in between is its own


def of_model(model: Model, tp: int, quick: bool, op: str) -> dict[str, Any] | None:
    """Options of `run` for a model with layers that `op` is for."""
    return {"names": (model.name,), "tp": tp} if model.layer_function == op else None


Launch = Callable[[int], Tensor]  # on the i-th input set; the layer's output


def ours_of(case: Case, step: int) -> timing.Launch:
    """One operator of our chain."""
    calls = [ssmgen.bind(f, **call) for f, call in (case.chain(i)[step] for i in range(case.sets))]
    return lambda i: calls[i]()


def convolution(case: Case, theirs: Callable[..., Tensor] | None) -> Callable[[int], Tensor]:
    """The chain's convolution of the i-th inputs, by another package's function, or by ours where there is none."""
    ours = ours_of(case, 0) if theirs is None else None

    def run(i: int) -> Tensor:
        call = case.chain(i)[0].arguments
        if ours is not None:
            ours(i)
            return call["out"]
        return theirs(**{name: value for name, value in call.items() if name != "out"})

    return run


def between_ours(case: Case, call: Callable[[int], object]) -> Launch:
    """A peer's update of the state, in place of ours between our convolution and our norm."""
    ahead, behind = ours_of(case, 0), ours_of(case, 2) if case.norm_weight is not None else None

    def run(i: int) -> Tensor:
        ahead(i)
        call(i)
        if behind is not None:
            behind(i)
        return case.out[i]

    return run


class Peer(NamedTuple):
    """Another package's chain. make: None where it does not serve a case. checked: makes what is held against float64, if another.

    Both take the `Case` of their family.
    """

    make: Callable[[Any], Launch | None]
    checked: Callable[[Any], Launch | None] | None = None


def peers_of(case: Case) -> dict[str, reports.Peer]:
    """The peers that run and whose output is right; they leave states as they were. Their results are kept until the set's next turn."""
    kept: dict[int, Any] = {}

    def keeping(call: Launch) -> reports.Peer:
        def run(i: int) -> None:
            kept[i] = call(i)

        return run

    peers = bench_of(case.op).PEERS
    made = {name: call for name, peer in peers.items() if (call := peer.make(case)) is not None}
    usable = reports.usable({name: keeping(call) for name, call in made.items()})
    for name in list(usable):
        expected = case.expected(rows := case.rows())["out"]
        checked = peers[name].checked
        call = checked(case) if checked else made[name]
        with case.restored():
            error = norm_error(call(0)[rows], expected.view(len(rows), -1))
        if not error < PEER_GATE:
            reports.left_out(name, "checked,", SsmgenError(f"output error {error:.1e}"))
            del usable[name]
    return usable


@functools.cache
def _compile_seconds(text: str, arch: Arch, spec: Any) -> float:
    return nvrtc.compile_cubin(text, arch, str(spec)).seconds


def served(case: Case, arch: Arch) -> dict[str, Any]:
    """The variant that serves a case, by which rule, and what compiling its kernels takes."""
    chosen = api.explain(case.function, **case.arguments(0), arch=str(arch)).chosen
    parts = chosen.spec.kernels
    seconds = sum(_compile_seconds(render(spec, arch), arch, spec) for spec in parts)
    return {"specs": [str(spec) for spec in parts], "rule": chosen.rule, "compile_seconds": seconds}


def case_of(op: str, *args: Any, **how: Any) -> Case:
    """A case of the kind that the operator's family has."""
    return bench_of(op).CASES[op](op, *args, **how)


def measure(case: Case, peers: bool, ceiling: float, rounds: int, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case. ceiling: TB/s."""
    arch = runtime.device_arch(case.state.device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    state_errors, out_errors = zip(*reports.gates(case.gate, pdls), strict=True)
    others = peers_of(case) if peers and case.tokens == 1 else {}
    contenders = {"ssmgen_pdl" if pdl else "ssmgen": case.bound(pdl) for pdl in pdls} | {"chain": case.bound_chain(pdls[0])}
    contenders |= ({} if case.intermediates or case.by_slot else case.copies(pdls)) | others
    watch.timing(len(contenders))
    us = timing.device_us(contenders, case.sets, rounds)
    time = us.get("ssmgen_pdl", us["ssmgen"])  # pdl=None is pdl=True where the device can
    copy = min((us[name] for name in ("copy_pdl", "copy") if name in us), default=None)
    host = {"chain": case.eager_chain, **others}
    return {
        "us": us,
        "sm_mhz": timing.sm_mhz(),
        "served_us": time,
        "bytes": case.bytes_moved,
        "tbs": case.bytes_moved / time / 1e6,
        "ceiling_fraction": case.bytes_moved / time / 1e6 / ceiling,
        "copy_ratio": time / copy if copy else None,
        "peer_ratio": {name: time / us[name] for name in ("chain", *others)},
        "host_us": reports.host_us(case.function, (), case.arguments(0), host) if case.batch <= HOST_BATCH else {},
        "state_error": max(state_errors),
        "out_error": max(out_errors),
        **served(case, arch),
    }


def mistakes(
    op: str, names: Sequence[str] = (), tokens: Sequence[int] = (), intermediates: bool | None = None, by_slot: bool = False, **others: Any
) -> list[str]:
    """What options of the command line do not go together, in words."""
    wrong, most = [name for name in names if find_model(name).layer_function != op], max(tokens, default=1)
    return [
        *must(not wrong, f"{', '.join(wrong)}: without layers that {op} is for"),
        *must(not intermediates or most > 1, "--intermediates needs --tokens of more than 1"),
        *must(not by_slot or min(tokens, default=1) > 1, "--slot-per-token needs --tokens of more than 1"),
        *must(not (by_slot and intermediates), "--slot-per-token keeps every token's state in the pool, and --intermediates beside it"),
        *must(most <= MAX_TOKENS, f"a layer takes up to {MAX_TOKENS} tokens of a sequence, not {most}"),
    ]


def pool_slots(piece_bytes: int, state_bytes: int, batch: int) -> int:
    """Slots of states that hold POOL_BYTES, or MIN_SETS batches of pieces: a state with its window."""
    return max(math.ceil(POOL_BYTES / state_bytes), math.ceil(MIN_SETS * batch * piece_bytes / state_bytes))


@torch.no_grad()
def run(
    op: str,
    names: Sequence[str] = (),
    states: Sequence[DType] = (),
    batches: Sequence[int] = (),
    tp: int = 1,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
    device: torch.device | str = "cuda",
    *,
    tokens: Sequence[int] = (),
    intermediates: bool | None = None,
    by_slot: bool = False,
    layouts: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole report, as JSON would hold it; whatever is empty or None is the default. intermediates, by_slot: of calls with several
    tokens. layouts: of states, where a layer has several.

    Raises SsmgenError without a GPU, and for models without such layers.
    """
    report = reports.begin(f"{__doc__} {bench_of(op).__doc__}") | {"op": op}
    if wrong := mistakes(op, names, tokens, intermediates, by_slot):
        raise SsmgenError("; ".join(wrong))
    found = [find_model(name).divided(tp) for name in names or bench_of(op).MODELS[op]]
    kinds = list(product(found, states or STATES, layouts or ("vk",)))
    sizes = list(batches or BATCHES)
    counts = list(tokens or (1,))
    watch.begins(op, len(kinds) * len(sizes) * len(counts))
    for model, state_type, layout in kinds:
        rows, elements, _ = model.shape
        inner = (rows, elements) if layout == "vk" else (elements, rows)
        shape, dtype = (model.nheads, *inner), TORCH_DTYPES[state_type]
        state_bytes = math.prod(shape) * dtype.itemsize
        slots = functools.partial(pool_slots, copied_bytes(model, state_bytes), state_bytes)
        most = max(counts) if by_slot else 1
        state = reports.normal_pool(slots(max(sizes) * most), shape, dtype, device)
        for batch, count in product(sizes, counts):
            how = {"intermediates": count > 1 and intermediates is not False and not by_slot, "by_slot": by_slot, "layout": layout}
            named = {"model": model.name, "heads": model.nheads, "state": state_type.value, "batch": batch, "tokens": count}
            with reports.case(report, named | how, watch, _line) as row:
                case = case_of(op, model, state[: slots(batch * (count if by_slot else 1))], batch, count, **how)
                row |= measure(case, peers, report["ceilings_tbs"]["in_place"], rounds, watch)
        del state
    return report


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    tokens = f", {_tokens(row)} tokens" if row.get("tokens", 1) > 1 else ""
    return Point(f"{row['model']}, {row['heads']} heads, {_state(row)} state{tokens}", "batch", str(row["batch"]), "in_place")


def _tokens(row: Mapping[str, Any]) -> str:
    """How many, and whether each one's state and window are kept, or its state has a slot."""
    return f"{row.get('tokens', 1)}{'+' if row.get('intermediates') else 's' if row.get('by_slot') else ''}"


def _state(row: Mapping[str, Any]) -> str:
    """The states' type, and whether keys come first."""
    return row["state"] + (" kv" if row.get("layout") == "kv" else "")


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['model']} {_state(row)} batch {row['batch']} T {_tokens(row)}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. Behind the chain's and each peer's time, the ratio of ours to it; `x copy`: to the slot copy. T with
    a +: each token's state and window are kept; with an s: its state has a slot."""
    peers = list(dict.fromkeys(name for row in report["rows"] for name in row["peer_ratio"]))
    names = "".join(f"{name:>11}{'ratio':>7}" for name in peers)
    heading = f"{'us':>9}{'TB/s':>7}{'ceiling':>8}{'no pdl':>9}{'copy':>9}{'x copy':>8}{names}{'host us':>9}{'bound':>7}{'chain':>7}"
    lines = [
        *reports.head(report),
        f"{report['op']}: whole layers",
        f"{'model':20}{'state':8}{'batch':>6}{'T':>4}{heading}{'compile s':>11}{reports.LAST}",
    ]
    for row in report["rows"]:
        us, host = row["us"], row["host_us"]
        others = "".join(cell(us.get(name), 11) + cell(row["peer_ratio"].get(name), 7) for name in peers)
        copy = min((us[name] for name in ("copy", "copy_pdl") if name in us), default=None)
        lines.append(
            f"{row['model']:20}{_state(row):8}{row['batch']:6}{_tokens(row):>4}" + cell(row["served_us"], 9) + cell(row["tbs"], 7)
            + cell(row["ceiling_fraction"], 8) + cell(us["ssmgen"], 9) + cell(copy, 9) + cell(row["copy_ratio"], 8, 3) + others
            + cell(host.get("ssmgen"), 9) + cell(host.get("ssmgen_bound"), 7) + cell(host.get("chain"), 7)
            + cell(row["compile_seconds"], 11, 3) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
