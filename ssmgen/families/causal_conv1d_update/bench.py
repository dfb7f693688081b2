"""The benchmark of causal_conv1d_update, with a bias and SiLU.

Slots are drawn at random from a pool of 640 MB, or of four batches if that is more. Every set has its own slots and inputs; weight and bias
do not rotate. Several tokens: the window rolls, and a random number of each sequence's last tokens was accepted. TB/s counts x, out, the
width - 1 inputs of each channel's window that are read, and the whole window, which is written: 16 bytes per channel for one token, width 4
and 16-bit types. The ceiling is torch's multiplication in place, on the same number of dense bytes of the pool. The tokens of a draft tree
are also timed as a chain.

Peer: Dao-AILab's causal_conv1d_update, for one token; it does not roll. It returns a new tensor, which is kept until the set's next turn.
Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import (
    EXACT,
    HOST_BATCH,
    Case,
    Launch,
    binary_tree,
    drawn,
    keeping,
    normal_pool,
    slots_of,
    some_of,
    some_rows,
    without_tree,
)
from ...bench.convolutions import DTYPE, WIDTH
from ...bench.engine import Bench, Values
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import must

MAX_SETS = 2048  # slots are small: fewer sets would stay in the cache
CHECKED = 8  # rows that the correctness gate compares


class Innermost(Enum):
    """The contiguous axis of the pool: a channel's window, or the channels."""

    WINDOW = "window"
    CHANNELS = "channels"


def inputs(at: At, device: torch.device) -> Case:
    B, T, dim, dtype, entries = at.batch, at.tokens, at.dim, TORCH_DTYPES[at.dtype], at.width + at.tokens - 2
    channels = at.layout is Innermost.CHANNELS
    slots = slots_of(dim * entries * dtype.itemsize, B)
    pool = normal_pool(slots, (entries, dim) if channels else (dim, entries), dtype, device)
    sets = max(1, min(MAX_SETS, slots // B))
    moved = B * dim * (2 * T + at.width - 1 + entries) * dtype.itemsize
    x = torch.randn(sets, B, T, dim, device=device, dtype=dtype)
    rotating = {n: t.squeeze(2) if T == 1 else t.transpose(2, 3) for n, t in (("x", x), ("out", torch.empty_like(x)))}
    rotating |= {"conv_state_indices": drawn(slots, sets, B, device)}
    rotating |= {"num_accepted_tokens": torch.randint(1, T + 1, (sets, B), device=device, dtype=torch.int32)} if T > 1 else {}
    weight, bias = torch.randn(dim, at.width, device=device, dtype=dtype) / at.width**0.5, torch.randn(dim, device=device, dtype=dtype)
    shared = {"conv_state": pool.transpose(1, 2) if channels else pool, "weight": weight, "bias": bias, "activation": "silu"}
    size = moved // (2 * dtype.itemsize)
    shares = [share for share in pool.flatten().split(size) if len(share) == size]
    rows, by_row = some_of(B, CHECKED, device), ("x", "out", "num_accepted_tokens", "parents")
    return Case(
        function=ssmgen.causal_conv1d_update,
        sets=sets,
        bytes=moved,
        rotating=rotating,
        shared=shared | ({"parents": binary_tree(B, T, device)} if at.tree else {}),
        part=lambda call: some_rows(call, rows, by_row, ("conv_state",), ("conv_state_indices",)),
        limits={"conv_state": EXACT},
        beside={"mul": lambda i: shares[i % len(shares)].mul_(1.0)},
        ratios=("mul",),
        host=B <= HOST_BATCH,
    )


def dao_step() -> Callable[..., Any] | None:
    """Dao-AILab's function; None if it is not installed."""
    return reports.imported("causal_conv1d", "causal_conv1d_update")


def dao(case: Case) -> Launch | None:
    """Dao-AILab's kernel."""
    function = dao_step() if case.at.tokens == 1 else None
    if function is None:
        return None
    return keeping(function, [{n: t for n, t in call.items() if n != "out"} for call in case.calls])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    return {"dim": model.conv_channels, "width": model.conv_width} if model.conv_channels else None


def mistakes(tokens: Sequence[int], tree: bool = False, **others: Any) -> list[str]:
    return [*must(not tree or min(tokens, default=1) > 1, "--tree is given for one token; expected --tokens of 2 or more")]


def words(row: Mapping[str, Any]) -> str:
    several = [f"{row['tokens']} tokens, rolling"] if row["tokens"] > 1 else []
    several += ["a draft tree"] if row.get("tree") else []
    return ", ".join([f"{row['dim']} channels, width {row['width']}, {row['dtype']}", f"{row['layout']} contiguous", *several])


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Models' channels, or the default's."""
    dims = dict.fromkeys(m.conv_channels for m in given) or {12288: None}
    return [{"dim": dim, "layout": at, "tokens": T, "batch": batch} for dim, at, T, batch in product(dims, Innermost, tokens, batches)]


BENCH = Bench(
    op="causal_conv1d_update",
    method=__doc__,
    axes=(
        axes.several(
            "--state-layout", "layouts", axes.Choice(Innermost), Innermost, "Layout of the windows; may repeat. Default: both.", "layout"
        ),
        axes.tokens("Tokens per sequence; with several the window rolls; may repeat. Default: 1."),
        axes.batches(1, 4, 8, 16, 32, 64, 128, 256),
        axes.one("--dim", click.IntRange(1), 12288, head=True),
        WIDTH,
        DTYPE,
        axes.TREE,
    ),
    inputs=inputs,
    words=words,
    peers={"chain": without_tree, "causal_conv1d": dao},
    quick={"batches": (1, 16, 128)},
    of_model=of_model,
    mistakes=mistakes,
    ceiling="in_place",
    tuned=tuned,
    label=lambda at: f"convolution of {at.dim} channels, {at.layout.value} T {at.tokens} batch {at.batch}",
)
