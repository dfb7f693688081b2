"""A call of mamba3_chunk_scan: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.recurrences.mamba3.problem import Rate, Rotary
from ...errors import ArgumentError
from ...spec.arguments import Value
from ...spec.kernel import Index, Loads
from .operands import OPERANDS
from .prepare import Mamba3PrepareSpec
from .problem import Mamba3PromptProblem, asked
from .reference import reference
from .spec import OPERATOR, Mamba3ScanSpec
from .views import Options, views_of

# {field of the problem: the operands that may give its type}
_TYPED = {field: (name,) for field, name in OPERANDS.fields().items()} | {
    "row_norm": ("B_norm",),
    "row_bias": ("B_bias",),
    "mimo": ("mimo_x",),
    "state": ("state", "initial_states"),
    "k_state": ("k_state", "initial_k"),
    "v_state": ("v_state", "initial_v"),
}


def _sequences(views: Mapping[str, Tensor]) -> int:
    return prompts.sequences_of(views, "x")


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba3PromptProblem:
    """The problem of checked operands and their addresses."""
    x = views["x"]
    if "workspace" in views and (odd := pointers["workspace"] % 16):
        wrong = f"workspace begins at {odd} bytes past a multiple of 16; expected a multiple. Pass a whole torch.empty(...)."
        raise ArgumentError(OPERATOR, [wrong])
    first = {field: next((n for n in names if n in views), None) for field, names in _TYPED.items()}
    typed: dict[str, Any] = {field: DTYPES[views[name].dtype] for field, name in first.items() if name is not None}
    typed |= {field: DTYPES[x.dtype] for field in ("k_state", "v_state") if field not in typed}  # of the pair between two chunks
    angles = views["angle"].shape[-1] if "angle" in views else 0
    states = [n for n in ("initial_states", "state") if n in views]

    def index(name: str) -> Index:
        return INDEX[views[name].dtype if name in views else None]

    vector = all(checks.aligned(views[n], pointers[n], 2) for n in states)
    return Mamba3PromptProblem(
        headdim=x.shape[3],
        d_state=views["B"].shape[4],
        rank=views["B"].shape[2],
        angles=angles,
        rotary=Rotary(options.rotary) if angles else Rotary.PAIRS,
        rate=Rate(options.A_form),
        dt_softplus=options.dt_softplus,
        trap_sigmoid=options.trap_sigmoid,
        z="z" in views,
        by_rank="mimo_x" in views and "mimo_o" not in views,
        cu_seqlens=index("cu_seqlens"),
        initial="initial_states" in views,
        pool="state" in views,
        final=options.final,
        started="has_initial_state" in views,
        index=index("state_indices"),
        copy=prompts.together(views, pointers, OPERANDS.alike("x")),
        state_loads=Loads.VECTOR if vector else Loads.ELEMENT,
        **typed,
        **asked(options.segments),
    )


def kernel_values(spec: Mamba3ScanSpec | Mamba3PrepareSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    """Every kernel argument that is not a pointer."""
    _, length, heads, _ = views["x"].shape
    values: dict[str, Value] = {"tokens": length, "all_tokens": views["x"].shape[0] * length, "heads": heads}
    values |= {"group_heads": heads // views["B"].shape[3], "sequences": _sequences(views)}
    values |= {"pad_slot_id": options.pad_slot_id, "slots": views["state"].shape[0] if "state" in views else 0}
    values |= {"eps": options.eps, "A_floor": options.A_floor, **OPERANDS.stride_values(spec, views, names=spec.operands())}
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads of all sequences; 0 if nothing is to be written."""
    return _sequences(views) * views["x"].shape[2] if views["x"].numel() or "state" in views else 0


def _grid(spec: Mamba3ScanSpec | Mamba3PrepareSpec, views: Mapping[str, Tensor]) -> int:
    sequences, (batch, length, heads, _), B = _sequences(views), views["x"].shape, views["B"]
    if isinstance(spec, Mamba3PrepareSpec):
        return spec.grid(batch * length * B.shape[3], batch * length, sequences, heads)
    return sequences * heads * spec.tiles * spec.parts * spec.spans


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=size_of,
    grid_of=_grid,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    reference(views, options, dtype)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference).values()
