"""The benchmark of gated_delta_rule and its relatives.

State: slots are drawn at random from a pool of 4 GiB, or of four batches if that is more. Every input set has its own slots and inputs.
Split pool: the new state goes to other random slots. Intermediates: the state after each token is stored in a buffer and the pool is only
read, 1 + tokens passes over the state. Ring: only the tokens' inputs are stored and the state is read, 1 pass; the commit of all tokens is
timed separately. Otherwise the state is read and written, 2 passes, like the slot copy in place. TB/s counts the state.
Draft tree: it needs intermediates, from which parents' states are read; TB/s does not count these reads. The same tokens are also timed as
a chain.

Peers: FlashInfer gets the same call, but no ring. flash-linear-attention has no state pool: it gets contiguous f32 states from the pool's
memory and returns new states. It keeps no state per token, so it does less work with intermediates. Host times are eager calls with
prepared arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At, users
from ...bench.case import (
    GATE,
    HOST_BATCH,
    MAX_SETS,
    Case,
    Launch,
    binary_tree,
    drawn,
    normal_pool,
    scales_of,
    slots_of,
    some_of,
    some_rows,
    without_tree,
)  # fmt: skip
from ...bench.engine import Bench, Values
from ...bench.schema import TEXT
from ...calls.checks import STORED_DTYPES
from ...select.models import Model
from ...spec.kernel import DType, Narrow, PoolMode, must
from .models import LinearAttention

# Values of an operand: as in models, so that the state stays bounded.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "unit": lambda x: normalize(x, dim=-1),
    "sigmoid": torch.sigmoid,
    "decay": lambda x: logsigmoid(x) / 16,
    "uniform": torch.rand_like,
    "bias": lambda x: torch.rand_like(x) - 4,
    "slope": lambda x: torch.arange(x.numel(), device=x.device) * (8 / x.numel()),
}


class Operand(NamedTuple):
    """`axes` after batch and tokens: of the key heads (key); or of the heads, one number, one per key channel or one per value channel."""

    axes: str
    values: str = "normal"


def operands(text: str) -> dict[str, Operand]:
    """Parses items written "name=axes" or "name=axes/values"."""
    return {name: Operand(*how.split("/")) for name, how in (item.split("=") for item in text.split())}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """An operator as its models call it. Operands are bf16, weights f32; both have the same names in flash-linear-attention."""

    operands: str
    fla: str  # module and function
    weights: str = ""
    options: Mapping[str, bool] = field(default_factory=dict)
    fla_options: Mapping[str, Any] = field(default_factory=dict)
    fla_groups: bool = False  # it takes fewer key heads than heads
    heads: int = 32
    key_heads: int | None = None  # None: one per head
    state: DType = DType.F32
    batches: tuple[int, ...] = (1, 8, 32, 128)
    groups: bool = True  # it can have fewer key heads than heads


HEAD_GATE, CHANNEL_GATE = "A_log=head/uniform dt_bias=head/bias", "A_log=head/uniform dt_bias=channel/bias"
NORM, NORM_BETA = {"use_qk_l2norm": True}, {"use_qk_l2norm": True, "beta_sigmoid": True}
FLA_NORM = {"use_qk_l2norm_in_kernel": True}
FLA_GATE = FLA_NORM | {"use_gate_in_kernel": True}
FLA_BETA = FLA_GATE | {"use_beta_sigmoid_in_kernel": True}

OPS = {
    "gated_delta_rule": Recurrence(
        "q=key k=key v=value g=head beta=head", "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
        HEAD_GATE, NORM_BETA, FLA_BETA, True, 64, 16, DType.BF16, (1, 2, 4, 8, 16, 32, 64, 128, 256),
    ),
    "kda": Recurrence(
        "q=key k=key v=value g=channel beta=head", "fla.ops.kda.fused_recurrent_kda",
        CHANNEL_GATE, NORM_BETA, FLA_BETA, True,
    ),
    "gdn2": Recurrence(
        "q=key k=key v=value g=channel b=channel/sigmoid w=value/sigmoid", "fla.ops.gdn2.fused_recurrent_gdn2",
        CHANNEL_GATE, NORM, FLA_GATE, True,
    ),
    "comba": Recurrence(
        "q=key k=key v=value p=key g=head/decay beta=head/sigmoid", "fla.ops.comba.fused_recurrent_comba",
        "", NORM, FLA_NORM, True,
    ),
    "delta_rule": Recurrence("q=key k=key/unit v=value beta=head/sigmoid", "fla.ops.delta_rule.fused_recurrent_delta_rule"),
    "gla": Recurrence("q=key k=key/unit v=value gk=channel/decay", "fla.ops.gla.fused_recurrent_gla"),
    "simple_gla": Recurrence("q=key k=key/unit v=value g=head/decay", "fla.ops.simple_gla.fused_recurrent_simple_gla"),
    "lightning_attn": Recurrence(
        "q=key k=key/unit v=value", "fla.ops.lightning_attn.fused_recurrent_lightning_attn",
        "slope=head/slope", fla_options={"slope": None, "layer_idx": 0, "num_layers": 1},  # it computes the same slopes from these
    ),
    "rwkv6": Recurrence(
        "r=key k=key/unit v=value w=channel/decay", "fla.ops.rwkv6.fused_recurrent_rwkv6", "u=channel", groups=False,
    ),
    "rwkv7": Recurrence(
        "r=key w=channel/decay k=key/unit v=value kk=key/unit a=key/sigmoid", "fla.ops.rwkv7.fused_mul_recurrent_rwkv7",
        groups=False,
    ),
}  # fmt: skip


def flashinfer(case: Case) -> Launch | None:
    """FlashInfer's kernels for a bf16 state of 128 x 128."""
    state, plain = case.shared["state"], case.at.tokens == 1 and not case.at.intermediates
    if case.at.tree or case.at.op != "gated_delta_rule" or state.dtype != torch.bfloat16 or state.shape[2:] != (128, 128):
        return None
    name = "gated_delta_rule" if plain else "gated_delta_rule_mtp"
    function = reports.imported("flashinfer.gdn_kernels.gdn_decode_bf16_state", name)
    if function is None:
        return None
    theirs = {
        "g": "a", "beta": "b", "out": "output", "state": "initial_state_source", "state_indices": "initial_state_indices",
        "dst_state_indices": "output_state_indices", "intermediate_states": "intermediate_states_buffer",
    }  # fmt: skip
    options = {"use_qk_l2norm_in_kernel": True} | ({"disable_state_update": True} if case.at.intermediates or case.at.ring else {})
    calls = [{theirs.get(n, n): t for n, t in call.items() if isinstance(t, Tensor)} | options for call in case.calls]
    return lambda i: function(**calls[i])


def fla(case: Case) -> Launch | None:
    """flash-linear-attention's fused_recurrent functions."""
    recurrence, state = OPS[case.at.op], case.shared["state"]
    _, heads, V, K = state.shape
    if case.at.tree or (heads != case.at.key_heads and not recurrence.fla_groups):
        return None
    module, _, name = recurrence.fla.rpartition(".")
    function = reports.imported(module, name)
    if function is None:
        return None
    parts = state.flatten().view(torch.float32).split(case.at.batch * heads * K * V)
    states = [part.view(case.at.batch, heads, K, V) for part in parts if len(part) == len(parts[0])]
    calls = []
    for i in range(case.sets):
        call = {n: t[i] for n, t in case.more["operands"].items()} | case.more["weights"] | dict(recurrence.fla_options)
        call = {n: value for n, value in call.items() if value is not None}
        calls.append(call | {"initial_state": states[i % len(states)], "output_final_state": True})
    return lambda i: function(**calls[i])


POOL_BYTES = 4 * 2**30  # of the state; also the limit of all buffers of intermediate states, if there are several
SCALES = {"state": "state_scale"}


def settle(at: At, op: str) -> Iterator[At]:
    """Fills in key heads, value channels, and whether intermediate states are kept."""
    several = at.tokens > 1 and not at.ring
    kept = several and (at.pool is PoolMode.SINGLE if at.intermediates is None else at.intermediates)
    key_heads, values = at.key_heads or OPS[op].key_heads or at.heads, at.value_dim or at.dim
    yield At(**{**vars(at), "intermediates": kept, "key_heads": key_heads, "value_dim": values, "op": op})


def inputs(at: At, device: torch.device) -> Case:
    recurrence, function = OPS[at.op], getattr(ssmgen, at.op)
    B, T, heads, V, K, dtype = at.batch, at.tokens, at.heads, at.value_dim, at.dim, STORED_DTYPES[at.state]
    draws = 2 if at.pool is PoolMode.SPLIT else 1
    slot_bytes = heads * V * K * dtype.itemsize
    slots = slots_of(slot_bytes, draws * B, POOL_BYTES)
    state = normal_pool(slots, (heads, V, K), dtype, device)
    sets = max(1, min(MAX_SETS, slots // (draws * B)))
    found = drawn(slots, draws * sets, B, device)
    shapes = {"key": (at.key_heads, K), "head": (heads,), "channel": (heads, K), "value": (heads, V)}

    def rand(operand: Operand, *lead: int, dtype: torch.dtype) -> Tensor:
        return VALUES[operand.values](torch.randn(*lead, *shapes[operand.axes], device=device, dtype=dtype))

    tokenwise = {name: rand(o, sets, B, T, dtype=torch.bfloat16) for name, o in operands(recurrence.operands).items()}
    if "p" in tokenwise:
        tokenwise["p"] = tokenwise["k"].clone()  # as in the models; with a different p the state grows without bound
    weights = {name: rand(o, dtype=torch.float32) for name, o in operands(recurrence.weights).items()}
    rotating: dict[str, Tensor] = {**tokenwise, "out": torch.empty_like(tokenwise["v"]), "state_indices": found[:sets]}
    rotating |= {"dst_state_indices": found[sets:]} if draws == 2 else {}
    shared: dict[str, Any] = {"state": state, **weights, **recurrence.options}
    scale, beside = scales_of(state), {}
    shared |= ({} if scale is None else {"state_scale": scale}) | ({"parents": binary_tree(B, T, device)} if at.tree else {})
    if at.ring:
        kept = [tokenwise[name] for name in ("k", "v", "g", "beta")]
        raw = ssmgen.Ring(*(torch.zeros(slots, T, *t.shape[3:], device=device, dtype=t.dtype) for t in kept))
        shared |= {"ring": raw, "update_state": False}
        beside["commit"] = commit(at.op, state, raw, found[:sets], T, weights)
    if at.intermediates:
        count = max(1, min(sets, POOL_BYTES // (B * T * slot_bytes)))
        rotating["intermediate_states"] = torch.empty(count, B, T, heads, V, K, device=device, dtype=dtype)
        shared["update_state"] = False
    passes = 1 if at.ring else 1 + T if at.intermediates else 2
    once = [*weights.values(), *(t[0] for t in tokenwise.values()), rotating["out"][0]]
    rows, by_row = some_of(B, 4, device), (*tokenwise, "out", "intermediate_states", "parents")
    indices = ("state_indices", "dst_state_indices")

    def part(call: Mapping[str, Any]) -> dict[str, Any]:
        return some_rows({n: t for n, t in call.items() if n != "ring"}, rows, by_row, indices=indices, scales=SCALES)

    return Case(
        function=function,
        sets=sets,
        bytes=passes * B * slot_bytes,
        rotating=rotating,
        shared=shared,
        part=part,
        slack=(T - 1) * GATE[torch.float32],
        outputs=("out", "intermediate_states"),
        beside=beside,
        copied=(state, found[:sets]),
        comparable=T == 1,
        host=B <= HOST_BATCH,
        row={"passes": passes, "state_bytes": passes * B * slot_bytes, "io_bytes": sum(t.nbytes for t in once)},
        more={"operands": tokenwise, "weights": weights},
    )


def commit(op: str, state: Tensor, raw: Any, slots: Tensor, tokens: int, weights: Mapping[str, Tensor]) -> Launch:
    """The replay of all tokens in the ring."""
    function, accepted = getattr(ssmgen, f"{op}_commit"), torch.full(slots.shape[1:], tokens, device=state.device, dtype=torch.int32)
    calls = [ssmgen.bind(function, state, raw, accepted, **weights, **OPS[op].options, state_indices=row) for row in slots]
    return lambda i: calls[i]()


def of_model(model: Model, tp: int, quick: bool, op: str) -> Mapping[str, Any] | None:
    if not isinstance(model, LinearAttention) or model.function != op:
        return None
    own = {"heads": model.nheads, "dim": model.dim_k, "value_dim": model.dim_v, "states": (model.state,)}
    return own | ({"key_heads": model.key_heads} if OPS[op].groups else {})


def mistakes(
    op: str, tokens: Sequence[int], pools: Sequence[PoolMode], intermediates: bool | None,
    heads: int | None, key_heads: int | None, ring: bool = False, tree: bool = False, **others: Any,
) -> list[str]:  # fmt: skip
    HV = heads or OPS[op].heads
    HK = key_heads or OPS[op].key_heads or HV
    split = PoolMode.SPLIT in pools
    keeps = "--tree is given without --intermediates; expected both: a tree keeps every token's state"
    return [
        *must(HV % HK == 0, f"--heads is {HV}; expected a multiple of {HK} key heads"),
        *must(key_heads is None or OPS[op].groups, f"--key-heads does not apply to {op}, in which every head has its own key"),
        *must(not intermediates or max(tokens, default=1) > 1, "--intermediates is given for one token; expected --tokens of 2 or more"),
        *must(not ring or op in ("gated_delta_rule", "kda"), f"--ring does not apply to {op}, which has no ring"),
        *must(not tree or min(tokens, default=1) > 1, "--tree is given for one token; expected --tokens of 2 or more"),
        *must(not tree or not (ring or intermediates is False or split), keeps),
        *must(not (ring and intermediates), "--ring and --intermediates are both given; expected one"),
        *must(not ring or not split, "--ring is given with --pool-mode split; expected single, since the pool is not written"),
        *must(
            not intermediates or not split,
            "--intermediates is given with --pool-mode split; expected single, since the pool is not written",
        ),
    ]


def words(row: Mapping[str, Any]) -> str:
    dim, values = row["dim"], row.get("value_dim", row["dim"])
    several = [f"{row['tokens']} tokens"] if row["tokens"] > 1 else []
    kept = ["every state kept"] if row["intermediates"] else ["inputs kept in a ring"] if row["ring"] else []
    kept += ["a draft tree"] if row.get("tree") else []
    split = ["split pool"] if row["pool"] == PoolMode.SPLIT.value else []
    what = [f"{row['heads']} heads of {values} x {dim}", f"{row['key_heads']} key heads", f"{row['state']} state"]
    return ", ".join([*what, *several, *kept, *split])


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], op: str) -> Values:
    """Decode steps of models, or of the defaults."""
    models = [model for model in given or users(op) if isinstance(model, LinearAttention)]
    for model, T, batch in product(models, tokens, batches):
        sizes = {"heads": model.nheads, "key_heads": model.key_heads, "dim": model.dim_k, "value_dim": model.dim_v}
        for state in axes.states_of(model):
            yield {"state": state, "tokens": T, "batch": batch, "model": model.name, **sizes}
    for T, batch in () if models else product(tokens, batches):
        yield {"tokens": T, "batch": batch, "model": ""}


def label(at: At) -> str:
    return f"{at.op} {at.model or f'{at.heads} x {at.dim} x {at.dim}'} {at.state.value} T {at.tokens} batch {at.batch}"


def declared(op: str) -> Bench:
    recurrence = OPS[op]
    return Bench(
        op=op,
        method=str(__doc__),
        axes=(
            axes.states((recurrence.state,), "the model's or operator's", Narrow),
            axes.several(
                "--pool-mode",
                "pools",
                axes.Choice(PoolMode),
                (PoolMode.SINGLE,),
                "Pool of states: in place (single) or to other slots (split); may repeat. Default: single.",
                "pool",
            ),
            axes.tokens(),
            axes.batches(*recurrence.batches),
            axes.intermediates((None,)),
            axes.switch("--ring", "ring", (False,), "Keep the tokens' inputs in a ring, and also time the commit of all tokens."),
            axes.TREE,
            axes.one("--heads", click.IntRange(1), of=(recurrence.heads,), help=f"Heads. Default: {recurrence.heads}.", head=True),
            axes.one(
                "--key-heads", click.IntRange(1), help=f"Key heads. Default: {recurrence.key_heads or 'as many as heads'}.", head=True
            ),
            axes.one("--dim", click.IntRange(4, 1024), of=(128,), help="Key channels per head. Default: 128.", head=True),
            axes.one("--value-dim", click.IntRange(1, 1024), help="Value channels per head. Default: as --dim.", head=True, later=True),
        ),
        inputs=inputs,
        words=words,
        peers={"chain": without_tree, "flashinfer": flashinfer, "fla": fla},
        quick={"batches": (1, 16, 128)},
        of_model=partial(of_model, op=op),
        mistakes=partial(mistakes, op),
        settle=partial(settle, op=op),
        ceiling="in_place",
        copied=True,
        fields={"op?": TEXT},
        tuned=partial(tuned, op=op),
        label=label,
    )


BENCHES = {op: declared(op) for op in OPS}
