"""A call of the replay functions: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, STATES, index_of, loads_of
from ...calls.dispatch import callers
from ...calls.operator import run
from ...calls.planning import Family
from ...calls.scalars import one_of
from .operands import BETWEEN, OPERANDS
from .problem import History, ReplayProblem
from .reference import replay_selective_state_update as reference
from .spec import OPERATOR, ReplaySpec
from .views import Options, room_of, views_of, window_of

PRECISIONS = {"f32": 3, "bf16x2": 2, "bf16": 1}
PRECISION = one_of(f"one of {', '.join(map(repr, PRECISIONS))}", *PRECISIONS)


def call(name: str, tensors: Any, options: Options, pdl: bool | None) -> Tensor:
    """The result of the public function `name`. Makes an output, and the tensors between two kernels, if they are missing."""
    named = tensors._asdict()
    objections = checks.padding_objections(options.zero_padding, named["out"])
    if named["out"] is None and isinstance(named["x"], Tensor):
        named["out"] = torch.empty_like(named["x"], memory_format=torch.contiguous_format)
    if options.two_kernels:
        named |= _between(named, options)
    return run(CALLERS[name], OPERANDS.Tensors(**named), options, pdl, objections=objections)


def _between(given: Mapping[str, Any], options: Options) -> dict[str, Tensor]:
    """The tensors from the first of two kernels to the second: mix [batch, H, tokens, window + tokens] and sums [batch, H, tokens], f32.

    Empty if the operands are wrong; the checks report that.
    """
    named = {n: t for n, t in given.items() if t is not None}
    try:
        batch = named["cu_seqlens"].numel() - 1 if "cu_seqlens" in named else named["x"].shape[0]
        tokens, window = room_of(named, options)
        mix = named["x"].new_empty((batch, named["state"].shape[1], tokens, window + tokens), dtype=torch.float32)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
        return {}
    return {"mix": mix, "sums": mix.new_empty(mix.shape[:3])}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> ReplayProblem:
    """The problem of checked operands and their addresses."""
    state = views["state"]
    _, H, P, N = state.shape
    materialize = options.materialize
    tokens, window = room_of(views, options)
    vectors = [n for n in OPERANDS.gathered if not (materialize and n == "out")]
    states = ["state", *(["out"] if materialize else [])]

    types: dict[str, Any] = {field: STATES[views[name].dtype] for field, name in OPERANDS.fields().items() if name in views}
    types["x"] = DTYPES[views["old_x"].dtype]
    if not materialize or "state_scale" in views:
        types["out"] = DTYPES[views["out"].dtype]
    return ReplayProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["old_B"].shape[-2],
        **types,
        dt_softplus=options.dt_softplus,
        history=history_of(views),
        tokens=tokens,
        window=window,
        materialize=materialize,
        cu_seqlens=index_of(views, "cu_seqlens"),
        index=index_of(views, "state_indices"),
        advance="arrivals" in views,
        two_kernels=options.two_kernels,
        internal_pdl=options.internal_pdl,
        after_conv=options.after_conv,
        philox_rounds=options.philox_rounds if "rand_seed" in views else 0,
        terms=PRECISIONS[options.precision],
        state_loads=loads_of(views, pointers, states, N),
        operand_loads=loads_of(views, pointers, vectors, 8),
        zero_padding=options.zero_padding,
    )


def history_of(views: Mapping[str, Tensor]) -> History:
    return History.STEP if "cache_buf_idx" in views else History.CACHE if "flush" in views else History.RING


def batch_of(views: Mapping[str, Tensor]) -> int:
    return views["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in views else views["out"].shape[0]


def kernel_values(spec: ReplaySpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {
        "slots": views["state"].shape[0],
        "pad_slot_id": options.pad_slot_id,
        "window": window_of(views, options),
    }
    values |= {"ring": views["old_x"].shape[1], "tokens": views["out"].shape[1], "total_tokens": views["out"].shape[1]}
    if "state_indices" in views:
        values["state_indices_batch"] = views["state_indices"].stride(0)
    own = [name for name in spec.operands() if not (options.materialize and name == "out")]
    values |= OPERANDS.stride_values(spec, views, int("cache_buf_idx" not in views), own)
    values["out_slot"] = views["out"].stride(0)
    if "rand_seed" in views:
        values["rand_seed_slot"] = int(views["rand_seed"].numel() > 1)
    return values


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: batch_of(views) if views["out"].numel() else 0,
    grid_of=lambda spec, views: batch_of(views) * spec.blocks,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    rounds = options.philox_rounds if "rand_seed" in views else 0
    how: dict[str, Any] = {"dt_softplus": options.dt_softplus, "pad_slot_id": options.pad_slot_id, "philox_rounds": rounds}
    views = {name: t for name, t in views.items() if name not in BETWEEN}
    how["zero_padding"] = options.zero_padding
    reference(**{**views, **how}, window=window_of(views, options), dtype=dtype)


FUNCTIONS = (OPERATOR, "checkpoint_selective_state_update", "materialize_selective_state")
CALLERS = callers(FAMILY, dict.fromkeys(FUNCTIONS, OPERANDS), Options, views_of, run_reference)
