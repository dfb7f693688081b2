"""The benchmark of replay_selective_state_update and, with a ring, checkpoint_selective_state_update.

Slots of enough sets for 200 MB of states, at most 200 sets, in random order; every set has its own slots and inputs. The bookkeeping is
off, so that every call of a set does the same work. window 0: a history of one step, with `accepted` of its tokens accepted. A ring:
`accepted` entries count and no state is written, except in the share of sequences that write, where enough entries count to force a write.
With conv1d, a call is two or three launches: the update of the convolution of x, B and C comes first, and these are views of its output.

Contenders: one kernel, and two. External PDL is PDL of the first kernel, which after the convolution reads all its other inputs before the
convolution ends; internal PDL is PDL of the second. TB/s counts states, read and written. The copy reads and writes all of them, even
where we only read.
Peers: FlashInfer's checkpointing_ssu, with PDL, on a ring of the same window (window 0: the shortest on which every step writes), and
TensorRT-LLM's replay_selective_state_update; not after our convolution. Both round factors of products to bf16; `precision` is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import EXACT, GATE, HOST_BATCH, Call, Case, Launch, Variants, normal_pool, scales_of, sets_of, some_of, some_rows
from ...bench.engine import Bench, Values
from ...bench.schema import PART, TIME, maybe
from ...calls.checks import STORED_DTYPES
from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import Model
from ...spec.kernel import SM90, Arch, DType, Narrow
from .problem import MAX_TOKENS

WINDOWS = (0, 16)
TOKENS, ACCEPTED = 6, 3
SHAPE = (16, 64, 128, 1)  # heads, headdim, d_state, groups
STATE_BYTES, MAX_SETS = 200e6, 200
WIDTH = 4  # taps of the convolution
CHECKED = 4  # rows that the correctness gate compares
STATE_GATE = GATE | {torch.float32: 4e-6}  # an exponential and a sum of a step's tokens, in f32
PRECISION_GATE = {"f32": 0.0, "bf16x2": 2.0**-15, "bf16": 2.0**-7}
HISTORY_LIMITS = {"old_x": EXACT, "old_B": EXACT, "old_dt": 1e-5, "old_dA_cumsum": 1e-5}


def forms(two_kernels: bool | None, external: bool | None, internal: bool | None, arch: Arch) -> Variants:
    """The launches of a call; None stands for both values. A plain call's launch comes first, if it is included."""

    def flags(chosen: bool | None) -> list[bool]:
        return [f for f in ((True, False) if chosen is None else (chosen,)) if arch >= SM90 or not f] or [False]

    found: dict[str, dict[str, Any]] = {}
    for two in (False, True) if two_kernels is None else (two_kernels,):
        for ahead, between in product(flags(external), flags(internal) if two else [False]):
            parts = ["two_kernels" if two else "ssmgen", "pdl" if ahead else "", "internal" if between else ""]
            own = {"two_kernels": True, "internal_pdl": between} if two else {}
            found["_".join(filter(None, parts))] = {"pdl": ahead, **own}
    return found


def fits(tokens: int, accepted: int, window: int, writing: float) -> str:
    """The reason why a case is impossible; empty if it is possible."""
    if not window:
        return "" if accepted <= tokens else f"{accepted} accepted of a step of {tokens} tokens"
    if accepted > window:
        return f"{accepted} accepted tokens in a window of {window}"
    if tokens > window and writing < 1:
        return f"--tokens is {tokens} with a window of {window}; expected at most {window}"
    return (
        ""
        if writing == 1 or accepted + tokens <= window
        else f"--accepted {accepted} and --tokens {tokens} exceed a window of {window}; expected at most {window} together"
    )


def settle(at: At) -> Iterator[At]:
    """The case, if it is possible. Without a ring, no share of steps writes."""
    writing = at.writing if at.window else 0.0
    if not fits(at.tokens, at.accepted, at.window, writing):
        yield At(**{**vars(at), "writing": writing})


def counts_of(at: At, slots: Tensor) -> Tensor:
    """Entries of each slot's history that count, for slots [sets, batch]."""
    full = max(at.accepted, at.window - at.tokens + 1) if at.window else at.accepted
    writes = (torch.arange(at.batch + 1, device=slots.device).double() * at.writing).floor().diff() > 0  # spread evenly over the batch
    counts = torch.full((slots.numel(),), at.accepted, device=slots.device)
    counts[slots.long()] = torch.where(writes, full, at.accepted).expand_as(slots)
    return counts.int()


def inputs(at: At, device: torch.device) -> Case:
    """A, dt, D and dt_bias are stride-0 views, as in models."""
    (H, P, N, G), B, T, dtype = at.shape, at.batch, at.tokens, STORED_DTYPES[at.state]
    one = H * P * N * dtype.itemsize
    sets = sets_of(B * one, most=MAX_SETS, cold=STATE_BYTES)
    count = sets * B
    R, both = (at.window + T, ()) if at.window else (T, (2,))

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).bfloat16()

    state = normal_pool(count, (H, P, N), dtype, device)
    scale, slots = scales_of(state), torch.randperm(count, device=device).view(sets, B).int()
    history = {"old_x": randn(count, R, H, P), "old_B": randn(count, *both, R, G, N)}
    history["old_dt"] = torch.rand(count, *both, H, R, device=device) / 8
    history["prev_num_accepted_tokens"] = counts_of(at, slots)
    if at.window:
        history["ring_start"] = torch.randint(R, (count,), device=device, dtype=torch.int32)
    else:
        history["old_dA_cumsum"] = -history["old_dt"].cumsum(-1)
        history["cache_buf_idx"] = torch.randint(2, (count,), device=device, dtype=torch.int32)
    sizes = (H * P, G * N, G * N)
    joined = randn(sets, B, T, sum(sizes))  # input and output of the convolution
    conv = convolution(at, joined, slots) if at.with_conv1d else None
    parts = (joined if conv is None else conv.more["out"]).split(sizes, -1)
    operands = {n: t.unflatten(-1, s) for n, t, s in zip(("x", "B", "C"), parts, ((H, P), (G, N), (G, N)), strict=True)}
    if conv is None:  # separate tensors, as projections without a convolution would produce them
        operands = {n: t.contiguous() for n, t in operands.items()}
    dt, D, bias = randn(sets, B, T, H), randn(H), (torch.rand(H, device=device) - 4).bfloat16()
    rotating = {**operands, "dt": dt[..., None].expand(*dt.shape, P), "state_indices": slots}
    rotating["out"] = torch.empty(sets, B, T, H, P, device=device, dtype=torch.bfloat16)
    shared: dict[str, Any] = {"state": state, **history, "dt_softplus": True, "precision": at.precision, "after_conv": conv is not None}
    shared |= {"A": (-torch.rand(H, device=device) - 0.1)[:, None, None].expand(H, P, N), "two_kernels": False}
    shared |= {"D": D[:, None].expand(H, P), "dt_bias": bias[:, None].expand(H, P)}
    shared |= {} if scale is None else {"state_scale": scale}
    rows, slack = some_of(B, CHECKED, device), PRECISION_GATE[at.precision]
    counted = history["prev_num_accepted_tokens"][slots[0].long()]
    written = float(((counted + T > at.window) if at.window else (counted > 0)).double().mean())

    def part(call: Call) -> Call:
        given = {n: t for n, t in call.items() if n != "rand_seed"}
        return some_rows(given, rows, ("x", "B", "C", "dt", "out"), ("state", *history), scales={"state": "state_scale"})

    return Case(
        function=ssmgen.checkpoint_selective_state_update if at.window else ssmgen.replay_selective_state_update,
        sets=sets,
        bytes=B * one * (1 + written),
        rotating=rotating,
        shared=shared | ({"rand_seed": torch.tensor([1], device=device)} if at.rounding else {}),
        part=part,
        limits=HISTORY_LIMITS | {"state": STATE_GATE[dtype] + slack},
        slack=slack,
        variants=lambda arch: forms(at.two_kernels, at.external_pdl, at.internal_pdl, arch),
        ahead=conv,
        copied=(state, slots),
        host=B <= HOST_BATCH,
        row={"written": written},
    )


def convolution(at: At, x: Tensor, slots: Tensor) -> Case:
    """The update of the convolution of x, B and C, which runs first. x: [sets, batch, tokens, channels]"""
    device, channels, out = x.device, x.shape[-1], torch.zeros_like(x)
    state, bias = (
        torch.randn(*sizes, device=device).bfloat16() for sizes in ((slots.numel(), channels, WIDTH - 2 + at.tokens), (channels,))
    )
    weight = torch.randn(channels, WIDTH, device=device).bfloat16() / 2
    accepted = torch.full((at.batch,), max(1, at.accepted), device=device, dtype=torch.int32)
    return Case(
        function=ssmgen.causal_conv1d_update,
        name="conv1d",
        sets=len(x),
        bytes=0,
        rotating={"x": x.transpose(2, 3), "out": out.transpose(2, 3), "conv_state_indices": slots},
        shared={"conv_state": state, "weight": weight, "bias": bias, "activation": "silu", "num_accepted_tokens": accepted},
        more={"out": out},
    )


def flashinfer(case: Case) -> Launch | None:
    function = reports.imported("flashinfer.mamba", "checkpointing_ssu")
    H, P, N, G = case.at.shape
    T, window = case.at.tokens, case.at.window or case.at.tokens
    if function is None or case.ahead is not None or not T <= window <= 16:
        return None
    slots, device = len(case.shared["state"]), case.device
    x_cache, B_cache = (torch.randn(slots, *s, device=device).bfloat16() for s in ((H, window + T, P), (G, window + T, N)))
    dt_cache = torch.rand(slots, H, window + T, device=device) / 8
    start = torch.randint(window + T, (slots,), device=device, dtype=torch.int32)
    names = ("state", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C", "out", "D", "dt_bias", "dt_softplus", "state_scale")
    own = {"x_cache": x_cache, "B_cache": B_cache, "dt_cache": dt_cache, "ring_start": start, "enable_pdl": True}
    calls = []
    for ours in case.calls:
        call = {n: ours[n] for n in names if n in ours} | own
        calls.append(call | {"state_batch_indices": ours["state_indices"], "rand_seed": ours.get("rand_seed")})
    return lambda i: function(**calls[i])


def tensorrt_llm(case: Case) -> Launch | None:
    function = reports.imported("tensorrt_llm._torch.modules.mamba.replay_selective_state_update", "replay_selective_state_update")
    if function is None or case.ahead is not None or case.at.window:
        return None
    ours = ("two_kernels", "internal_pdl", "after_conv", "precision")
    calls = [{n: t for n, t in call.items() if n not in ours} for call in case.calls]
    for call in calls:
        call["state_batch_indices"] = call.pop("state_indices")
    return lambda i: function(**calls[i])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if not isinstance(model, MambaModel) or model.kind != "mamba2":
        return None
    return {"shape": (model.nheads, model.headdim, model.d_state, model.ngroups), "states": (model.state,)}


def mistakes(
    tokens: Sequence[int], accepted: Sequence[int], windows: Sequence[int], writing: Sequence[float], shape: tuple[int, ...],
    states: Sequence[Any], rounding: bool, two_kernels: bool | None, internal_pdl: bool | None, **others: Any,
) -> list[str]:  # fmt: skip
    found = [fits(*case) for case in product(tokens or [TOKENS], accepted or [ACCEPTED], windows or (0,), writing or (0.0,))]
    H, *_, G = shape
    found += [f"--shape has {H} heads; expected a multiple of its {G} groups"] if H % G else []
    found += (
        ["--writing is given for a history of one step; expected a ring. Pass --window."] if writing and not any(windows or WINDOWS) else []
    )
    found += ["--internal-pdl is given for one kernel; expected --two-kernels"] if internal_pdl and two_kernels is False else []
    found += ["--rounding is given with --state f32; expected a shorter state"] if rounding and DType.F32 in states else []
    return list(dict.fromkeys(filter(None, found)))


def words(row: Mapping[str, Any]) -> str:
    H, P, N, G = row["shape"]
    share = row.get("writing", row.get("written"))  # the requested share; early reports hold only the share at the batch size
    history = f"ring of {row['window']}, {f'{share:.0%} write' if share else 'none write'}" if row["window"] else "history of one step"
    what = [f"{H} heads of {P} x {N}", f"{G} group{'s' if G > 1 else ''}", f"{row['state']} state", history]
    what += [f"{row['tokens']} token{'s' if row['tokens'] > 1 else ''}, {row['accepted']} accepted"]
    what += [f"products in {row['precision']}"] if row["precision"] != "f32" else []
    what += ["stochastic rounding"] if row["rounding"] else []
    return ", ".join(what + (["behind conv1d"] if row["with_conv1d"] else []))


UP_TO_MAX = click.IntRange(0, MAX_TOKENS)


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Steps of models' shapes, or of the default's."""
    shapes = [(m.nheads, m.headdim, m.d_state, m.ngroups) for m in given if isinstance(m, MambaModel)] or [SHAPE]
    found = product(shapes, (DType.BF16, DType.F32), WINDOWS, batches)
    return [{"state": state, "window": window, "batch": batch, "shape": shape} for shape, state, window, batch in found]


BENCH = Bench(
    op="replay_selective_state_update",
    method=__doc__,
    axes=(
        axes.states((DType.BF16,), "bf16", Narrow),
        axes.several(
            "--window", "windows", UP_TO_MAX, WINDOWS, "Tokens of the ring; 0: the history of one step; may repeat. Default: 0, 16."
        ),
        axes.several(
            "--writing",
            "writing",
            click.FloatRange(0, 1),
            (0.0,),
            "Share of steps on a ring that write; may repeat. Default: 0.",
            later=True,
        ),
        axes.several("--tokens", "tokens", click.IntRange(1, MAX_TOKENS), (TOKENS,), "Tokens per sequence; may repeat. Default: 6."),
        axes.several("--accepted", "accepted", UP_TO_MAX, (ACCEPTED,), "Accepted tokens of the history; may repeat. Default: 3."),
        axes.batches(1, 8, 64, 256),
        axes.one("--shape", axes.Shape("H,P,N,G", "16,64,128,1"), SHAPE, head=True),
        axes.switch("--rounding", "rounding", (False,), "Round the state stochastically.", head=True),
        axes.one("--precision", click.Choice([*PRECISION_GATE]), "f32", "Precision of ssmgen's products.", head=True),
        axes.switch(
            "--with-conv1d", "with_conv1d", (False,), "Time it after the convolution's update of x, B and C, in one graph.", head=True
        ),
        axes.switch("--two-kernels/--one-kernel", "two_kernels", (None,), "Number of kernels. Default: both.", hidden=True),
        axes.switch(
            "--external-pdl/--no-external-pdl",
            "external_pdl",
            (None,),
            "PDL of the first kernel and of the convolution. Default: both.",
            hidden=True,
        ),
        axes.switch(
            "--internal-pdl/--no-internal-pdl", "internal_pdl", (None,), "PDL of the second of two kernels. Default: both.", hidden=True
        ),
    ),
    inputs=inputs,
    words=words,
    peers={"flashinfer": flashinfer, "tensorrt_llm": tensorrt_llm},
    quick={"batches": (1, 64)},
    of_model=of_model,
    mistakes=mistakes,
    settle=settle,
    ceiling="in_place",
    copied=True,
    measured_fields={"written": PART, "copy_us": maybe(TIME)},
    parts=True,
    tuned=tuned,
    label=lambda at: f"replay {' x '.join(map(str, at.shape))} {at.state.value} window {at.window} batch {at.batch}",
)
