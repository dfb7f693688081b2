"""Checks and kernel arguments of decode layers, for their convolution, their norm and several tokens, with any recurrence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, INDEX, index_of
from ...select.models import Role, operators_of
from ...spec.arguments import divisor
from ...spec.kernel import Index, KernelSpec, Loads, PoolMode, Update
from ...spec.operands import Table
from ..norm import Activation, LayerNorm, LayerNormSpec
from ..recurrences.slots import check_pool, check_room
from ..short_conv import CHANNELS, MAX_COLUMNS, MAX_TOKENS, ShortConv
from ..window import MAX_WIDTH, Saved, StateLayout


def check_channels(named: Mapping[str, Tensor], inputs: str, groups: int, problems: list[str]) -> bool:
    """Checks the operands around the recurrence. named[inputs] is [batch, channels], or [batch, tokens, channels] (see `check_tokens`).
    groups: the number of groups of heads; the heads of a group share convolved channels."""
    (batch, *tokens, channels), slots = named[inputs].shape, named["state"].shape[0]
    weight, window = named["conv_weight"], named["conv_state"]
    width = weight.shape[1] if weight.dim() == 2 and 2 <= weight.shape[1] <= MAX_WIDTH else 2
    length = window.shape[2] if window.dim() == 3 and window.shape[2] >= width - 1 else width - 1
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        "conv_weight": {f"[channels, width], width 2 … {MAX_WIDTH},": (channels, width)},
        "conv_bias": {"[channels]": (channels,)},
        "conv_state": {"[slots, channels, width - 1 or width]": (slots, channels, length)},
        "arrivals": {"[slots, groups]": (slots, groups)},
        "state_indices": {"[batch]": (batch,)} if not tokens or "num_accepted_tokens" not in named else {},
        "rand_seed": {"[1]": (1,), "[slots]": (slots,)},
    }
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named and shapes]
    return all(fits)


def check_memory(named: Mapping[str, Tensor], batch: int, problems: list[str]) -> None:
    """Checks strides and slots of states, of written operands, and of operands whose strides are 32-bit in kernels."""
    check_pool("state", named["state"], problems)
    checks.check_distinct(named, ("conv_state", "out", "arrivals"), problems)
    if named["arrivals"].shape[1] > 1 and named["arrivals"].stride(1) != 1:
        problems.append(f"arrivals has strides {list(named['arrivals'].stride())}; expected a last stride of 1")
    check_room(named, batch, problems)
    for name, t in named.items():
        if name != "state":
            checks.check_strides_fit(name, t, 0 if name.startswith(("conv_w", "conv_b", "norm", "dt_bias")) else 1, problems)


def conv_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], inputs: str) -> ShortConv:
    """The convolution in a layer's problem; it has several tokens if views[inputs] has an axis of tokens."""
    window, weight, bias, given = views["conv_state"], views["conv_weight"], views.get("conv_bias"), views[inputs]
    length, (channels, width) = window.shape[2], weight.shape
    whole = channels % CHANNELS == 0
    step = 16 // window.element_size()
    runs = window.stride(2) == 1 and window.stride(1) == length and pointers["conv_state"] % 16 == 0
    runs = runs and (window.shape[0] == 1 or window.stride(0) % step == 0)
    if "num_accepted_tokens" in views:  # a run is rewritten as a whole
        runs = runs and length == width - 2 + given.shape[1]
    by_channels = checks.aligned(window, pointers["conv_state"], CHANNELS, 1)
    by_index = views.get("intermediate_state_indices") if "intermediate_conv_window" in views else None
    return ShortConv(
        width=width,
        weight=DTYPES[weight.dtype],
        bias=None if bias is None else DTYPES[bias.dtype],
        len=length,
        layout=StateLayout.RUNS if whole and runs else StateLayout.CHANNELS if whole and by_channels else StateLayout.ANY,
        loads=Loads.VECTOR if whole and checks.aligned(given, pointers[inputs], CHANNELS) else Loads.ELEMENT,
        taps=Loads.VECTOR if whole and _taps_are_runs(views, pointers) else Loads.ELEMENT,
        tokens=given.shape[1] if given.dim() == 3 else 0,
        windows=_saved(views, pointers),
        rows=INDEX[None if by_index is None else by_index.dtype],
    )


def _saved(views: Mapping[str, Tensor], pointers: Mapping[str, int]) -> Saved:
    """The layout of the windows after each token."""
    windows = views.get("intermediate_conv_window")
    if windows is None:
        return Saved.NO
    step, length = 16 // windows.element_size(), windows.shape[3]
    dense = (windows.stride(3) == 1 or length == 1) and windows.stride(2) == length
    apart = all(s % step == 0 for n, s in zip(windows.shape[:2], windows.stride()[:2], strict=True) if n > 1)
    whole = windows.shape[2] % CHANNELS == 0 and pointers["intermediate_conv_window"] % 16 == 0
    return Saved.RUNS if dense and apart and whole else Saved.ANY


def control_fields(views: Mapping[str, Tensor], update_state: bool) -> dict[str, Any]:
    """Fields of a recurrence's problem that say where states come from and go to."""
    each, by_index = "dst_state_indices" in views, "intermediate_states" in views and "intermediate_state_indices" in views

    return {
        "index": index_of(views, "state_indices"),
        "pool": PoolMode.SPLIT if each else PoolMode.SINGLE,
        "update": Update.NONE if not update_state else Update.EACH if each else Update.FINAL,
        "accepted": index_of(views, "num_accepted_tokens"),
        "intermediate_indices": index_of(views, "intermediate_state_indices") if by_index else Index.NONE,
    }


def _taps_are_runs(views: Mapping[str, Tensor], pointers: Mapping[str, int]) -> bool:
    """Whether the taps of neighbouring channels form one run that can be loaded as aligned vectors."""
    weight, bias = views["conv_weight"], views.get("conv_bias")
    dense = weight.stride(1) == 1 and weight.stride(0) == weight.shape[1] and pointers["conv_weight"] % 16 == 0
    return dense and (bias is None or checks.aligned(bias, pointers["conv_bias"], CHANNELS))


def norm_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], size: int, first: bool, activation: str) -> LayerNorm:
    """The norm in a layer's problem, from out and z [batch(, tokens), heads, channels] and norm_weight [groups, size]. No norm if there is
    no norm_weight."""
    if "norm_weight" not in views:
        return LayerNorm()
    grouped = {name: groups_of(views[name], size) for name in ("out", "z")} | {"norm_weight": views["norm_weight"]}
    vector = min(8, size & -size)
    return LayerNorm(
        weight=DTYPES[views["norm_weight"].dtype],
        gate=DTYPES[views["z"].dtype],
        size=size,
        grouped=grouped["out"].shape[-2] > 1,
        first=first,
        activation=Activation(activation),
        loads=checks.loads_of(grouped, pointers, grouped, vector),
    )


def groups_of(t: Tensor, size: int) -> Tensor:
    """[…, groups, size] from […, heads, channels]: the channels are dense, and so are the heads, unless heads are the groups."""
    return t if t.shape[-1] == size else t.flatten(-2).unflatten(-1, (-1, size))


def kernel_values(
    spec: KernelSpec, views: Mapping[str, Tensor], operands: Table, given: Mapping[str, int | float]
) -> dict[str, int | float]:
    """Every argument of one of a layer's kernels that is not a pointer. given: eps, pad_slot_id and other arguments that are not
    strides."""
    values = {"slots": views["state"].shape[0], **_counts(views), **given}
    return values | (_norm_values(spec, views) if isinstance(spec, LayerNormSpec) else operands.stride_values(spec, views))


def _counts(views: Mapping[str, Tensor]) -> dict[str, int]:
    found = {}
    if "num_accepted_tokens" in views:  # a count is in range if both the column and the window's history exist
        length, width = views["conv_state"].shape[2], views["conv_weight"].shape[1]
        found["columns"] = min(views["state_indices"].shape[1], length - width + 2)
    buffers = {"kept_rows": "intermediate_states", "window_rows": "intermediate_conv_window"}
    return found | {count: views[name].shape[0] for count, name in buffers.items() if name in views}


def _norm_values(spec: LayerNormSpec, views: Mapping[str, Tensor]) -> dict[str, int]:
    grouped = {"out": groups_of(views["out"], spec.size), "gate": groups_of(views["z"], spec.size), "weight": views["norm_weight"]}
    *rows, groups, _ = grouped["out"].shape
    axis_of = {"row": 0, "sequence": 0, "token": 1, "group": -2}
    values = {"units": math.prod(rows) * groups} | divisor("groups", groups)
    values |= {f"{role}_{axis}": grouped[role].stride(axis_of[axis]) for role, axis in spec.strides()}
    if "state_indices" in views:
        values |= {"state_indices_row": views["state_indices"].stride(0), "state_indices_column": views["state_indices"].stride(-1)}
    return values | ({"num_accepted_tokens_row": views["num_accepted_tokens"].stride(0)} if "num_accepted_tokens" in views else {})


def grid_of(spec: Any, views: Mapping[str, Tensor]) -> int:
    """Blocks of one of a layer's kernels."""
    *rows, heads, channels = views["out"].shape
    if isinstance(spec, LayerNormSpec):
        return -(-math.prod(rows) * (heads * channels // spec.size) // spec.teams)
    blocks: int = rows[0] * spec.nheads * spec.tiles
    return blocks


def check_dense(named: Mapping[str, Tensor], names: tuple[str, ...], problems: list[str]) -> None:
    """Whether the channels of a row are contiguous. Adds to `problems` the operands whose channels are not."""
    for name in names:
        if name in named and named[name].stride(-1) != 1 and named[name].shape[-1] > 1:
            problems.append(f"{name} has strides {list(named[name].stride())}; expected a last stride of 1")


# Optional operands of such calls only.
OPTIONAL = (
    "dst_state_indices", "num_accepted_tokens", "intermediate_states", "intermediate_conv_window", "intermediate_state_indices",
)  # fmt: skip


def asked_for(named: Mapping[str, Tensor], inputs: str, update_state: bool) -> bool:
    """Whether a call has several tokens: its inputs have a token axis longer than one, or it has an argument of such calls."""
    given = named[inputs]
    return (given.dim() == 3 and given.shape[1] != 1) or not update_state or any(name in named for name in OPTIONAL)


def check_axis(named: Mapping[str, Tensor], inputs: str, update_state: bool, problems: list[str]) -> bool:
    """Whether named[inputs] is [batch, tokens, channels], which a call with arguments for several tokens needs."""
    if named[inputs].dim() == 3:
        return True
    asked = [name for name in OPTIONAL if name in named]
    asked += [] if update_state else ["update_state=False"]
    wanted = "expected [batch, tokens, channels] for a call of several tokens"
    problems.append(f"{inputs} is {list(named[inputs].shape)} with {' and '.join(asked)}; {wanted}")
    return False


def check_tokens(named: Mapping[str, Tensor], inputs: str, separate: str, update_state: bool, problems: list[str]) -> bool:
    """Checks the arguments for several tokens. named[inputs] is [batch, tokens, channels]; `separate`: the recurrence's operator."""
    given = named[inputs]
    batch, T, channels = given.shape
    row = named["state"].shape[1:]
    width = named["conv_weight"].shape[-1]
    per_sequence: dict[str, tuple[int, ...]] = {"[batch]": (batch,)}
    if not 1 <= T <= MAX_TOKENS:
        chain = f"{operators_of(Role.CONVOLUTION)}, {separate} and {operators_of(Role.NORM)}"
        problems.append(
            f"{inputs} is {list(given.shape)}, {T} tokens per sequence; expected 1 … {MAX_TOKENS}. For more tokens, call {chain}."
        )
        return False
    columns = named["state_indices"].shape[-1] if "state_indices" in named and named["state_indices"].dim() else 0
    words = "heads, headdim, d_state" if inputs == "xBC" else "heads, V, K"
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("num_accepted_tokens", "intermediate_state_indices"), per_sequence),
        "dst_state_indices": {"[batch, tokens]": (batch, T)},
        "intermediate_states": _kept(named, "intermediate_states", words, tuple(row)),
        "intermediate_conv_window": _kept(named, "intermediate_conv_window", "channels, width - 1", (channels, width - 1)),
    }
    if "num_accepted_tokens" in named:
        allowed["state_indices"] = {"[batch, columns], of which num_accepted_tokens picks one,": (batch, columns)}
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named]
    if not all(fits):
        return False
    _check_forms(named, update_state, problems)
    _check_memory(named, inputs, problems)
    return True


def _kept(named: Mapping[str, Tensor], name: str, words: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes allowed for a buffer with an entry after each token: it may have more rows and columns than needed."""
    by_index = "intermediate_state_indices" in named
    batch, T = named["out"].shape[:2]
    have = tuple(named[name].shape[:2]) if name in named and named[name].dim() == 2 + len(sizes) else (0, 0)
    rows = have[0] if by_index or have[0] >= batch else batch
    return {f"[{'rows' if by_index else 'batch or more'}, tokens or more, {words}]": (rows, max(have[1], T), *sizes)}


def _check_forms(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> None:
    by_slot = ("num_accepted_tokens", "dst_state_indices", "state_indices")
    if "num_accepted_tokens" in named or "dst_state_indices" in named:
        if absent := [name for name in by_slot if name not in named]:
            problems.append(
                f"{' and '.join(absent)} is missing; expected num_accepted_tokens, dst_state_indices and state_indices together"
            )
        elif named["state_indices"].dtype != named["dst_state_indices"].dtype:
            dtypes = [named[name].dtype for name in ("state_indices", "dst_state_indices")]
            problems.append(f"state_indices is {dtypes[0]} and dst_state_indices is {dtypes[1]}; expected one dtype for both")
        if not update_state:
            problems.append(
                "num_accepted_tokens and dst_state_indices are given with update_state=False, which writes no state. "
                "Leave them out, or update."
            )
    columns = named["state_indices"].shape[1] if "num_accepted_tokens" in named and "state_indices" in named else 1
    if not 1 <= columns <= MAX_COLUMNS:
        problems.append(f"state_indices is {list(named['state_indices'].shape)}; expected 1 … {MAX_COLUMNS} columns")
    if "intermediate_state_indices" in named and not {"intermediate_states", "intermediate_conv_window"} & named.keys():
        problems.append("intermediate_state_indices is given without a buffer. Pass intermediate_states or intermediate_conv_window.")


def _check_memory(named: Mapping[str, Tensor], inputs: str, problems: list[str]) -> None:
    windows, kept = named.get("intermediate_conv_window"), named.get("intermediate_states")
    if windows is not None and windows.dtype != named[inputs].dtype:
        problems.append(f"intermediate_conv_window is {windows.dtype}; expected {named[inputs].dtype}, the dtype of {inputs}")
    checks.check_distinct(named, ("intermediate_conv_window", "intermediate_states"), problems)
    if kept is not None:
        checks.check_dense("intermediate_states", kept, problems)
