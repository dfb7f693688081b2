"""Default variants of causal_conv1d_update: the variant of a Mamba-2, and the other branches."""

from typing import Any

from ...engine.window import Saved, StateLayout
from ...select.models import find_model
from ...spec.kernel import Index, Loads
from ...variants.defaults import Default, words
from .spec import Advance, Tokens, UpdateProblem

ROLL: dict[str, Any] = {"advance": Advance.ROLL, "position": Index.I32, "index": Index.I32}
PACKED: dict[str, Any] = {"count": Tokens.RAGGED, "query_start_loc": Index.I32, "tokens": 4}
ANYWHERE: dict[str, Any] = {"layout": StateLayout.ANY, "loads": Loads.ELEMENT, "taps": Loads.ELEMENT}
SAVED: dict[str, Any] = {"saved": Saved.RUNS, "saved_index": Index.I32}

RESIDUALS: dict[str, Any] = {"residual": True, "outer_residual": True}
VERIFIED: dict[str, Any] = {"index": Index.I32, "count": Tokens.COUNTED, "tokens": 4, **SAVED}

DEFAULTS = {
    **{f"Mamba-2: {words(p)}": Default(p) for p in find_model("nemotron-h-8b").convolutions((Index.I32,)) if isinstance(p, UpdateProblem)},
    "a window that rolls": Default(UpdateProblem(width=4, tokens=4, state_len=6, **ROLL), 1),
    "packed, each token's window": Default(UpdateProblem(width=4, layout=StateLayout.CHANNELS, **SAVED, **ROLL, **PACKED), 1),
    "a draft tree by parents, each token's window": Default(UpdateProblem(width=4, state_len=3, parents=Index.I32, **VERIFIED), 1),
    "a draft tree by children, each token's window": Default(UpdateProblem(width=4, state_len=3, children=Index.I64, **VERIFIED), 1),
    "gates, as LFM2 has them": Default(
        UpdateProblem(width=3, state_len=2, bias=None, silu=False, index=Index.I32, taps=Loads.VECTOR, input_gate=True, output_gate=True),
        1,
    ),
    "gates of packed drafts": Default(
        UpdateProblem(width=3, bias=None, silu=False, layout=StateLayout.CHANNELS, input_gate=True, output_gate=True, **ROLL, **PACKED), 1
    ),
    "taps apart": Default(UpdateProblem(width=4, state_len=9, bias=None, index=Index.I32, dilation=3), 1),
    "taps apart, packed drafts": Default(
        UpdateProblem(width=4, layout=StateLayout.CHANNELS, dilation=3, **ROLL, **(PACKED | {"tokens": 2})), 1
    ),
    "taps apart, residuals, new sequences, as Qwen4-Exp has them": Default(
        UpdateProblem(width=4, state_len=9, bias=None, index=Index.I32, dilation=3, started=True, **RESIDUALS), 1
    ),
    "taps apart, residuals of packed drafts": Default(
        UpdateProblem(width=4, bias=None, layout=StateLayout.CHANNELS, dilation=3, **RESIDUALS, **ROLL, **(PACKED | {"tokens": 2})), 1
    ),
    "a ring, not aligned": Default(UpdateProblem(width=4, advance=Advance.RING, position=Index.I32, **ANYWHERE), 1),
}
