"""Cases and contenders for gated_delta_rule and its relatives.

State: slots drawn at random from a pool of 4 GiB, or of four batches if that is more; every input set has slots and inputs of its own.
Split pool: the new state goes to other random slots. Intermediates: the state after each token goes to a buffer and the pool is only
read, 1 + tokens passes over the state; ring: only the tokens' inputs are kept and the state is read, 1 pass, and the commit of all tokens
is timed by itself; otherwise the state is read and written, 2 passes, as the slot copy does in place. TB/s counts the state.
Draft tree: with intermediates, from which parents' states are read, uncounted; beside it the same tokens as a chain.

Peers: FlashInfer gets the same call, but no ring. flash-linear-attention has no pool: it gets f32 states, contiguous, out of the pool's
memory; it returns new ones, and keeps none per token, so that with intermediates it does less. Host times are eager calls, arguments at
hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import pad

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
from ...calls.checks import STORED_DTYPES
from ...calls.operator import call_of
from ...errors import SsmgenError
from ...models import Model
from ...spec import SM90, DType, Narrow, PoolMode, must
from .bench_peers import chain, fla, flashinfer
from .bench_recurrences import OPS, VALUES, Operand, operands
from .models import LinearAttention
from .operands import OPERANDS
from .reference import linear_attention as reference
from .views import token_views

POOL_BYTES = 4 * 2**30  # of the state; and at most, of the buffers of intermediate states, if that is more than one


OPTIONS = (
    cli.stored,
    cli.batches,
    cli.tokens,
    cli.intermediates,
    click.option("--ring", is_flag=True, help="Keep the tokens' inputs instead, and time the commit of all of them too."),
    cli.tree,
    cli.several("--pool-mode", "pools", cli.Choice(PoolMode), help="May repeat. Default: single."),
    click.option("--heads", type=click.IntRange(1), help="Default: 64 for gated_delta_rule, else 32."),
    click.option("--key-heads", type=click.IntRange(1), help="Default: 16 for gated_delta_rule, else as many as heads."),
    click.option("--dim", type=click.IntRange(4, 1024), help="Key channels per head. Default: 128."),
    click.option("--value-dim", type=click.IntRange(1, 1024), help="Value channels per head. Default: as many."),
)
REPORT = schema.Report(
    {"tokens": COUNT, "intermediates": FLAG, "ring": FLAG, "pool": TEXT, "state": TEXT, "batch": COUNT},
    {"heads": COUNT, "key_heads": COUNT, "dim": COUNT, "value_dim?": COUNT, "tree?": FLAG},
    schema.COPY,
)
QUICK: dict[str, Any] = {"batches": (1, 16, 128)}


def of_model(model: Model, tp: int, quick: bool, op: str) -> dict[str, Any] | None:
    """Options of `run` for a model; tp: already divided by."""
    if not isinstance(model, LinearAttention) or model.function != op:
        return None
    own = {"heads": model.nheads, "dim": model.dim_k, "value_dim": model.dim_v, "states": (model.state,)}
    return own | ({"key_heads": model.key_heads} if OPS[op].groups else {})


@dataclass
class Case:
    """Rotating inputs of one operator at one batch size, on the device of the state."""

    op: str
    state: Tensor  # the pool: [slots, heads, V, K]
    key_heads: int
    batch: int
    tokens: int = 1
    intermediates: bool = False
    pool: PoolMode = PoolMode.SINGLE
    ring: bool = False
    tree: bool = False
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        slots, heads, V, K = self.state.shape
        B, T, device = self.batch, self.tokens, self.state.device
        draws = 2 if self.pool is PoolMode.SPLIT else 1
        self.sets = max(1, min(MAX_SETS, slots // (draws * B)))
        drawn = torch.randperm(slots, device=device)[: draws * self.sets * B].to(torch.int32).view(draws, self.sets, B)
        # Every row starts at a multiple of 32 bytes, as FlashInfer assumes.
        self.slots, *others = pad(drawn, (0, -B % 8))[:, :, :B]
        self.targets = others[0] if others else None

        axes = {"key": (self.key_heads, K), "head": (heads,), "channel": (heads, K), "value": (heads, V)}
        recurrence = OPS[self.op]

        def rand(operand: Operand, *lead: int, dtype: torch.dtype) -> Tensor:
            return VALUES[operand.values](torch.randn(*lead, *axes[operand.axes], device=device, dtype=dtype))

        self.operands = {name: rand(o, self.sets, B, T, dtype=torch.bfloat16) for name, o in operands(recurrence.operands).items()}
        if "p" in self.operands:
            self.operands["p"] = self.operands["k"].clone()  # as in the models; with another one the state grows without bound
        self.weights = {name: rand(o, dtype=torch.float32) for name, o in operands(recurrence.weights).items()}
        self.out = torch.empty_like(self.operands["v"])
        self.scale = reports.scales_of(self.state)
        self.kept = self.raw = None
        if self.ring:
            kept = {n: self.operands[n] for n in ("k", "v", "g", "beta")}
            self.raw = ssmgen.Ring(*(torch.zeros(slots, T, *t.shape[3:], device=device, dtype=t.dtype) for t in kept.values()))
            self.accepted = torch.full((B,), T, device=device, dtype=torch.int32)
        if self.intermediates:
            count = max(1, min(self.sets, POOL_BYTES // (B * T * self.slot_bytes)))
            self.kept = torch.empty(count, B, T, heads, V, K, device=device, dtype=self.state.dtype)
        self.parents = reports.binary_tree(B, T, device) if self.tree else None

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(ssmgen, self.op)

    @property
    def slot_bytes(self) -> int:
        return self.state[0].numel() * self.state.element_size()

    @property
    def passes(self) -> int:
        """Times that one call reads or writes a whole state."""
        return 1 if self.ring else 1 + self.tokens if self.intermediates else 2

    @property
    def state_bytes(self) -> int:
        return self.passes * self.batch * self.slot_bytes

    @property
    def io_bytes(self) -> int:
        """Bytes of all operands but the states and the indices."""
        once = [*self.weights.values(), *(t[0] for t in (*self.operands.values(), self.out))]
        return sum(t.numel() * t.element_size() for t in once)

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        call = {"state": self.state, **{n: t[i] for n, t in self.operands.items()}, **self.weights, **OPS[self.op].options}
        call |= {"state_indices": self.slots[i], "out": self.out[i]} | ({} if self.scale is None else {"state_scale": self.scale})
        if self.targets is not None:
            call["dst_state_indices"] = self.targets[i]
        if self.kept is not None:
            call |= {"intermediate_states": self.kept[i % len(self.kept)], "update_state": False}
        if self.parents is not None:
            call |= {"parents": self.parents}
        if self.raw is not None:
            call |= {"ring": self.raw, "update_state": False}
        return call

    def commit(self) -> timing.Launch:
        """The replay of all tokens in the ring."""
        function, options = getattr(ssmgen, f"{self.op}_commit"), OPS[self.op].options
        shared = (self.state, self.raw, self.accepted)
        calls = [ssmgen.bind(function, *shared, **self.weights, **options, state_indices=self.slots[i]) for i in range(self.sets)]
        return lambda i: calls[i]()

    def bound(self, pdl: bool) -> timing.Launch:
        """Our kernel, with the host's part of every call done beforehand."""
        calls = [ssmgen.bind(self.function, **self.arguments(i), pdl=pdl) for i in range(self.sets)]
        return lambda i: calls[i]()

    def gate(self, pdl: bool | None = None) -> tuple[float, float]:
        """Norm errors of the states that one call leaves and of its output, against float64, on a few rows.

        Raises SsmgenError when one is more than its rounding: once where it is stored, and in f32 once per token.
        """
        rows = torch.linspace(0, self.batch - 1, min(self.batch, 4), device=self.state.device).long()
        call = self.arguments(0)
        touched, expected = self._expected(call, rows)
        for written in [call["out"], *([self.kept[0]] if self.kept is not None else [])]:
            written.fill_(float("nan"))
        self.function(**call, pdl=pdl)
        results = {"state": reports.numbers(self.state, self.scale, touched), "out": call["out"][rows]}
        if self.kept is not None:
            results["intermediate_states"] = self.kept[0][rows]
        errors = {name: norm_error(result, expected[name]) for name, result in results.items()}
        stored = {name: self.state.dtype if name == "state" else result.dtype for name, result in results.items()}
        limits = {name: GATE[dtype] + (self.tokens - 1) * GATE[torch.float32] for name, dtype in stored.items()}
        if not all(errors[name] < limits[name] for name in errors):
            found = ", ".join(f"{name} error {error:.1e}" for name, error in errors.items())
            raise SsmgenError(f"{self.op} batch {self.batch}, {self.tokens} tokens, {self.pool.value} pool: {found}; not timed")
        out_error = errors.pop("out")
        return max(errors.values()), out_error

    def _expected(self, call: Mapping[str, Any], rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(slots that these rows touch, what the reference makes of copies of them and of the rest, in float64)"""
        indices = [name for name in ("state_indices", "dst_state_indices") if name in call]
        touched = torch.cat([call[name][rows] for name in indices]).long()
        own = torch.arange(len(touched), device=rows.device).split(len(rows))
        small = {n: v for n, v in call.items() if n not in ("ring", "state_scale")} | dict(zip(indices, own, strict=True))
        small["state"] = reports.numbers(self.state, self.scale, touched)
        small |= {n: call[n][rows] for n in (*self.operands, "out", "intermediate_states", "parents") if n in call}
        given, options = call_of(self.function, **small)[1:3]
        views = token_views({name: t for name, t in zip(OPERANDS.names, given, strict=True) if t is not None}, options, [])
        views |= {name: views[name].double() for name in ("state", "out", "intermediate_states") if name in views}
        form, scale, lower_bound, *_ = options
        reference(views, form, scale=scale, lower_bound=lower_bound, update_state=options.update_state, dtype=torch.float64)
        return touched, views


PEERS = {"chain": chain, "flashinfer": flashinfer, "fla": fla}


@torch.no_grad()
def run(
    op: str,
    states: Sequence[DType | Narrow] = (),
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    pools: Sequence[PoolMode] = (),
    *,
    intermediates: bool | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
    dim: int | None = None,
    value_dim: int | None = None,
    ring: bool = False,
    tree: bool = False,
    rounds: int = 7,
    peers: bool = True,
    watch: Watch = PRINTING,
) -> dict[str, Any]:
    """The whole report, as JSON would hold it; whatever is empty or None is the operator's default.

    intermediates: of calls with several tokens; None for where the pool is single. value_dim: value channels, if not as many as dim.
    Raises SsmgenError without a GPU.
    """
    report = reports.begin(__doc__)
    recurrence = OPS[op]
    heads, key_heads, dim = shape(op, heads, key_heads, dim)
    values = value_dim or dim
    report |= {"op": op, "heads": heads, "key_heads": key_heads, "dim": dim, "value_dim": values, "tree": tree}
    state_types = states or [recurrence.state]
    points = list(itertools.product(pools or [PoolMode.SINGLE], tokens or [1], batches or recurrence.batches))
    watch.begins(op, len(state_types) * len(points))
    for state_type in state_types:
        dtype = STORED_DTYPES[state_type]
        count = partial(pool_slots, heads * values * dim * dtype.itemsize)
        state = reports.normal_pool(max(count(B, pool) for pool, _, B in points), (heads, values, dim), dtype, "cuda")
        for pool, T, B in points:
            kept = not ring and keeps(intermediates, T, pool)
            named = {"op": op, "state": state_type.value, "pool": pool.value, "tokens": T, "intermediates": kept, "ring": ring, "batch": B}
            with reports.case(report, named, watch, _line) as row:
                own = state[: count(B, pool)]
                row |= _measured(
                    Case(op, own, key_heads, B, T, kept, pool, ring, tree), report["ceilings_tbs"]["in_place"], rounds, peers, watch
                )
        del state
    return report


def shape(op: str, heads: int | None, key_heads: int | None, dim: int | None) -> tuple[int, int, int]:
    """(heads, key heads, K = V) for what was asked for."""
    heads = heads or OPS[op].heads
    return heads, key_heads or OPS[op].key_heads or heads, dim or 128


def mistakes(
    op: str, tokens: Sequence[int], pools: Sequence[PoolMode], intermediates: bool | None,
    heads: int | None, key_heads: int | None, dim: int | None, ring: bool = False, tree: bool = False, **others: Any,
) -> list[str]:  # fmt: skip
    """What options of the command line do not go together, in words."""
    HV, HK, _ = shape(op, heads, key_heads, dim)
    return [
        *must(HV % HK == 0, f"{HV} heads are not a multiple of {HK} key heads"),
        *must(key_heads is None or OPS[op].groups, f"{op} does not take --key-heads: every head has a key of its own"),
        *must(not intermediates or max(tokens, default=1) > 1, "--intermediates needs --tokens of more than 1"),
        *must(not ring or op in ("gated_delta_rule", "kda"), f"{op} has no ring"),
        *must(not tree or min(tokens, default=1) > 1, "--tree needs --tokens of more than 1"),
        *must(
            not tree or not (ring or intermediates is False or PoolMode.SPLIT in pools),
            "--tree keeps every token's state: with --intermediates",
        ),
        *must(not (ring and intermediates), "--ring is instead of --intermediates"),
        *must(not ring or PoolMode.SPLIT not in pools, "--ring leaves the pool as it is: not with --pool-mode split"),
        *must(not intermediates or PoolMode.SPLIT not in pools, "--intermediates leaves the pool as it is: not with --pool-mode split"),
    ]


def pool_slots(slot_bytes: int, batch: int, pool: PoolMode) -> int:
    return max(math.ceil(POOL_BYTES / slot_bytes), MIN_SETS * batch * (2 if pool is PoolMode.SPLIT else 1))


def keeps(intermediates: bool | None, tokens: int, pool: PoolMode) -> bool:
    """Whether a call's intermediate states are kept."""
    return tokens > 1 and (pool is PoolMode.SINGLE if intermediates is None else intermediates)


def _measured(case: Case, ceiling: float, rounds: int, peers: bool, watch: Watch) -> dict[str, Any]:
    """What a row says beside its case."""
    arch = runtime.device_arch(case.state.device.index)
    pdls = (True, False) if arch >= SM90 else (False,)
    state_errors, out_errors = zip(*reports.gates(case.gate, pdls), strict=True)
    others = reports.usable({name: make(case) for name, make in PEERS.items()} if peers else {})
    contenders = {"ssmgen_pdl" if pdl else "ssmgen": case.bound(pdl) for pdl in pdls}
    contenders |= {"commit": case.commit()} if case.ring else {}
    contenders |= reports.slot_copies(case.state, case.slots, pdls) | others
    watch.timing(len(contenders))
    us = timing.device_us(contenders, case.sets, rounds)
    served = us.get("ssmgen_pdl", us["ssmgen"])  # pdl=None is pdl=True where the device can
    copy = min((us[name] for name in ("copy_pdl", "copy") if name in us), default=None)
    tbs = case.state_bytes / served / 1e6
    return {
        "us": us,
        "sm_mhz": timing.sm_mhz(),
        "served_us": served,
        "passes": case.passes,
        "state_bytes": case.state_bytes,
        "io_bytes": case.io_bytes,
        "tbs": tbs,
        "copy_ratio": served / copy if copy and case.tokens == 1 else None,
        "ceiling_fraction": tbs / ceiling,
        "peer_ratio": {name: served / us[name] for name in others},
        "host_us": reports.host_us(case.function, (), case.arguments(0), others) if case.batch <= HOST_BATCH else {},
        "state_error": max(state_errors),
        "out_error": max(out_errors),
        **reports.served(case.function, (), case.arguments(0), arch),
    }


def point(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    dim, values = report["dim"], report.get("value_dim", report["dim"])
    several = [f"{row['tokens']} tokens"] if row["tokens"] > 1 else []
    kept = ["every state kept"] if row["intermediates"] else ["inputs kept in a ring"] if row["ring"] else []
    kept += ["a draft tree"] if report.get("tree") else []
    split = ["split pool"] if row["pool"] == PoolMode.SPLIT.value else []
    what = [f"{report['heads']} heads of {values} x {dim}", f"{report['key_heads']} key heads", f"{row['state']} state"]
    return Point(", ".join([*what, *several, *kept, *split]), "batch", str(row["batch"]), "in_place")


def _line(row: Mapping[str, Any]) -> str:
    kept = " kept" if row["intermediates"] else f" ring, commit {row['us']['commit']:.2f} us," if row["ring"] else ""
    what = f"{row['op']} {row['state']} {row['pool']} T {row['tokens']}{kept} batch {row['batch']}"
    copy = "" if row["copy_ratio"] is None else f", {row['copy_ratio']:.3f} x copy"
    return f"{what}: {row['served_us']:.2f} us, {row['tbs']:.2f} TB/s{copy}"


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal. `kept`: with intermediates; `ceiling`: TB/s over that of torch's multiplication in place."""
    dim, values = report["dim"], report.get("value_dim", report["dim"])
    tree = report.get("tree", False)
    chain = f"{'chain':>9}{'ratio':>7}" if tree else ""
    channels = f"K = V = {dim}" if values == dim else f"K = {dim}, V = {values}"
    lines = [
        *reports.head(report),
        f"{report['op']}: {report['heads']} heads, {report['key_heads']} key heads, {channels}",
        f"{'state':6}{'pool':>6}{'T':>3}{'kept':>5}{'batch':>6}{'us':>9}{'TB/s':>7}{'ceiling':>8}{'no pdl':>9}{'copy':>9}{'x copy':>8}"
        f"{chain}{'flashinfer':>12}{'ratio':>7}{'fla':>9}{'ratio':>7}{'host us':>9}{'bound':>7}{'peers host':>12}{'commit':>9}"
        f"{reports.LAST}",
    ]
    for row in report["rows"]:
        kept = "yes" if row["intermediates"] else "ring" if row["ring"] else "no"
        us, host, ratio = row["us"], row["host_us"], row["peer_ratio"]
        copy = min((us[name] for name in ("copy", "copy_pdl") if name in us), default=None)
        others = "/".join(f"{host[p]:.1f}" for p in PEERS if p in host)
        lines.append(
            f"{row['state']:6}{row['pool']:>6}{row['tokens']:3}{kept:>5}{row['batch']:6}"
            + cell(row["served_us"], 9) + cell(row["tbs"], 7) + cell(row["ceiling_fraction"], 8) + cell(us["ssmgen"], 9) + cell(copy, 9)
            + cell(row["copy_ratio"], 8, 3) + (cell(us.get("chain"), 9) + cell(ratio.get("chain"), 7) if tree else "")
            + cell(us.get("flashinfer"), 12) + cell(ratio.get("flashinfer"), 7)
            + cell(us.get("fla"), 9) + cell(ratio.get("fla"), 7) + cell(host.get("ssmgen"), 9)
            + cell(host.get("ssmgen_bound"), 7) + f"{others:>12}" + cell(us.get("commit"), 9) + reports.last(row)
        )  # fmt: skip
    return "\n".join(lines)
