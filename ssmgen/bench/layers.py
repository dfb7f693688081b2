"""Declares the benchmarks of decode steps of whole layers between their projections, in bf16; `layer_case.py` has their inputs, and a
family's `bench.py` what is its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import click

from ..engine.short_conv import MAX_TOKENS
from ..errors import SsmgenError
from ..select.models import Model, find_model
from ..spec.kernel import DType, must
from . import axes
from .axes import At, Axis, share_of, users
from .engine import Bench, Peer, Values
from .layer_case import Layer
from .schema import COUNT, TEXT

METHOD = """Slots are drawn at random from a pool of 640 MB of states, or of four batches if that is more. Every input set has its own
slots, inputs, outputs and weights: in a model they are another layer's. Windows hold width - 1 inputs per channel, contiguous. TB/s counts
states and windows, read and written. With several tokens whose states and windows are kept, they are read once and written once per token.
So are states that have a slot per token, which begin after a random number of the last call's tokens; their windows roll. The ceiling is
the slot copy in place of as many bytes (up to whole 2 KiB), of one piece per sequence; states that are kept have none.

chain: the convolution's step, then the recurrence's, then the norm, as operators of ssmgen; its results must have the same bits. Peers are
such chains too. Host times are eager calls, arguments at hand; of chains, three of them, and where one package's output is the next one's
input, its views too.
"""
LAYOUT = axes.several(
    "--state-layout", "layouts", click.Choice(["vk", "kv"]), ("vk",), "kv: keys first; may repeat. Default: vk.", "layout", later=True
)  # fmt: skip


def of_model(model: Model, tp: int, quick: bool, op: str) -> Mapping[str, Any] | None:
    return {"names": (model.name,), "tp": tp} if model.layer_function == op else None


def mistakes(
    op: str, names: Sequence[str] = (), tokens: Sequence[int] = (), intermediates: bool | None = None, by_slot: bool = False, **others: Any
) -> list[str]:
    wrong, most = [name for name in names if find_model(name).layer_function != op], max(tokens, default=1)
    return [
        *must(not wrong, f"--model is {', '.join(wrong)}; expected models with layers that {op} computes"),
        *must(not intermediates or most > 1, "--intermediates is given for one token; expected --tokens of 2 or more"),
        *must(not by_slot or min(tokens, default=1) > 1, "--slot-per-token is given for one token; expected --tokens of 2 or more"),
        *must(
            not (by_slot and intermediates),
            "--slot-per-token and --intermediates are both given; expected one: each keeps every token's state",
        ),
        *must(most <= MAX_TOKENS, f"--tokens is {most}; expected at most {MAX_TOKENS} for a layer"),
    ]


def settle(at: At, op: str) -> Iterator[At]:
    """The case with its model's share. Raises SsmgenError where a layer takes no such call."""
    model = share_of(at)
    if model.layer_function != op:
        raise SsmgenError(f"{model.name} has no layer that {op} computes")
    if wrong := mistakes(op, (), (at.tokens,), at.intermediates and at.tokens > 1, at.by_slot):
        raise SsmgenError("; ".join(wrong))
    kept = at.tokens > 1 and at.intermediates is not False and not at.by_slot
    own = {"layout": "vk", **vars(at), "model": model.name, "heads": model.nheads, "intermediates": kept}
    yield At(**own, share=model)


def words(row: Mapping[str, Any]) -> str:
    """Tokens with a +: each one's state and window are kept; with an s: each one's state has a slot."""
    count = f"{row.get('tokens', 1)}{'+' if row.get('intermediates') else 's' if row.get('by_slot') else ''}"
    tokens = f", {count} tokens" if row.get("tokens", 1) > 1 else ""
    state = row["state"] + (" kv" if row.get("layout") == "kv" else "")
    return f"{row['model']}, {row['heads']} heads, {state} state{tokens}"


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], op: str) -> Values:
    """Decode steps of models' layers; with several tokens, calls that verify drafts: with kept states, and with a slot per token."""
    for model in given or users(op):
        for state, batch, count in product(axes.states_of(model), batches, tokens):
            for how in ({"intermediates": True}, {"by_slot": True}) if count > 1 else ({},):
                yield {"model": model, "state": state, "batch": batch, "tokens": count, **how}


def label(at: At, op: str) -> str:
    several = f" T {at.tokens} {'by slot' if at.by_slot else 'kept'}" if at.tokens > 1 else ""
    return f"{op} {at.model} {at.state.value}{several} batch {at.batch}"


def layer_bench(op: str, method: str, models: Sequence[str], kind: type[Layer], peers: Mapping[str, Peer], *more: Axis) -> Bench:
    """The benchmark of a layer's public function. models: timed by default. kind: makes the inputs of a case."""
    return Bench(
        op=op,
        method=f"{METHOD} {method}",
        axes=(
            axes.several("--model", "names", str, models, "Model with such layers; may repeat. Default: two of them."),
            axes.states((DType.BF16, DType.F32), "bf16, f32"),
            *more,
            axes.batches(1, 2, 4, 8, 16, 32, 64, 256),
            axes.several("--tokens", "tokens", click.IntRange(1), (1,), "Tokens per sequence; may repeat. Default: 1.", later=True),
            axes.switch(
                "--intermediates/--no-intermediates", "intermediates", (None,), "Keep the state after each token. "
                    "Default: with several tokens.",
                later=True,
            ),
            axes.switch("--slot-per-token", "by_slot", (False,), "With several tokens: keep each token's state in a "
                "slot of the pool.", later=True),
            axes.TP,
        ),
        inputs=partial(kind, op=op),
        words=words,
        peers=peers,
        quick={"batches": (1, 64), "states": (DType.BF16,)},
        of_model=partial(of_model, op=op),
        mistakes=partial(mistakes, op),
        settle=partial(settle, op=op),
        ceiling="in_place",
        copied=True,
        fields={"heads": COUNT, "layout?": TEXT},
        parts=True,
        tuned=partial(tuned, op=op),
        label=partial(label, op=op),
    )  # fmt: skip
