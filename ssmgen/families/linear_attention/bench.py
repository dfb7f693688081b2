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

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ...bench import axes
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
from ...spec.kernel import Narrow, PoolMode, must
from .bench_peers import fla, flashinfer
from .bench_recurrences import OPS, VALUES, Operand, operands
from .models import LinearAttention

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
