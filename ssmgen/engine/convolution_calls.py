"""Options and checks of short convolutions, for prompts and for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..calls import checks
from ..calls.scalars import integer, one_of
from ..spec.operands import Table
from .window import BESIDE, MAX_REACH, reach_of

ACTIVATIONS = {None: False, False: False, True: True, "silu": True, "swish": True}
DILATION = integer(f"1 … {MAX_REACH - 1}", 1, MAX_REACH - 1)
ACTIVATION = one_of("None, 'silu' or 'swish'", *ACTIVATIONS)

_LIKE_X = (
    "initial_states", "final_states", "conv_states", "conv_state", "intermediate_conv_window", *BESIDE, "out",
)  # fmt: skip


class Options(NamedTuple):
    """Arguments of a call that are not tensors."""

    silu: bool = False
    pad_slot_id: int = -1
    dilation: int = 1


def check_convolution(table: Table, named: Mapping[str, Any], problems: list[str]) -> bool:
    """Checks x, weight and bias for both convolutions. False: other checks cannot run."""
    if not checks.check_tensors(named, problems):
        return False
    checks.check_types(table, named, "x", problems, "the convolution")
    weight = named["weight"]
    if weight.dim() != 2:
        problems.append(f"weight is {list(weight.shape)}; expected [dim, width]")
        return False
    for name in _LIKE_X:
        if name in named and named[name].dtype != named["x"].dtype:
            problems.append(f"{name} is {named[name].dtype}; expected {named['x'].dtype}, the dtype of x".replace("torch.", ""))
    if "outer_residual" in named and "residual" not in named:
        problems.append("outer_residual is given without residual; expected both, or residual alone. Pass it as residual.")
    return True


def check_reach(width: int, dilation: int, problems: list[str]) -> bool:
    """Whether kernels can hold the window of taps that are `dilation` inputs apart. Adds to `problems` if not."""
    reach = reach_of(width, dilation)
    if reach > MAX_REACH:
        problems.append(f"weight has width {width} and dilation is {dilation}, a window of {reach} inputs; expected at most {MAX_REACH}")
    return reach <= MAX_REACH


def check_strides(name: str, t: Tensor, problems: list[str]) -> None:
    """Kernels take strides below 2^32. Only the stride between slots, the first axis of states, is 64-bit; so are offsets."""
    strides = t.stride()[1:] if "states" in name or name in ("conv_state", "intermediate_conv_window") else t.stride()
    if any(s >= 2**32 for s in strides):
        problems.append(f"{name} has strides {list(t.stride())}; expected strides below 2^32 elements")


def taps_are_runs(views: Mapping[str, Tensor], pointers: Mapping[str, int], channels: int) -> bool:
    """Whether the taps and biases of `channels` channels can be loaded as aligned vectors."""
    weight, bias = views["weight"], views.get("bias")
    run = channels * weight.shape[1] * weight.element_size()
    dense = weight.is_contiguous() and pointers["weight"] % 16 == 0
    even = run in (4, 8, 16, 32) if channels == 1 else run % 4 == 0
    beside = bias is None or (bias.is_contiguous() and pointers["bias"] % 16 == 0)
    return dense and even and beside
