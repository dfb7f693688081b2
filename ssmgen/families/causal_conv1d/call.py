"""causal_conv1d: the short depthwise convolution of Mamba, gated delta rules and their relatives, over whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import by_name, callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...engine.convolution_calls import (
    ACTIVATION,
    ACTIVATIONS,
    DILATION,
    Options,
    check_convolution,
    check_reach,
    check_strides,
    taps_are_runs,
)
from ...engine.new_tensors import new_like
from ...engine.window import BESIDE, MAX_WIDTH, history_in_words, reach_of
from ...spec.arguments import divisor
from ...spec.kernel import Loads
from .operands import OPERANDS
from .reference import causal_conv1d as reference
from .spec import OPERATOR, ConvLayout, ConvProblem, ConvSpec


@operator(like="x", activation=ACTIVATION, dilation=DILATION)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | bool | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    conv_states: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    residual: Tensor | None = None,
    outer_residual: Tensor | None = None,
    dilation: int = 1,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out[:, d, t] = act(bias[d] + sum_j weight[d, j] x[:, d, t - (width - 1) + j]), over whole sequences.

    x, out: [batch, dim, length]; with query_start_loc [dim, tokens] or [1, dim, tokens]   weight: [dim, width], width 1 … 8; bias: [dim]
    activation: None, "silu" or its other name "swish"
    initial_states: [batch, dim, width - 1], the inputs before the first; zeros if None
    return_final_states: also return the last width - 1 inputs, [batch, dim, width - 1] (with seq_idx, inputs of the last token's
        sequence, zeros before them), in final_states_out if that is given
    dilation: distance between the inputs of neighbouring taps, up to 16, with a window of at most 17 inputs. Wherever this text has
        width - 1, it is (width - 1) dilation. Fastest if channels are contiguous
    out: of x's dtype, any strides, not x itself, but a residual for in place; None for a new one laid out like x
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Gates and residuals, fastest if channels are contiguous in all tensors:
    input_gate, output_gate: like x, of its dtype: the inputs, also of the states, are x input_gate, rounded to x's dtype, and out is the
        rounded output times output_gate (LFM2). Either or both
    residual, outer_residual: like x, of its dtype: are added to the output, after its activation and gate, in this order; each sum is
        rounded to x's dtype, as by a separate addition (Qwen4-Exp). Either none, residual, or both

    Packed sequences:
    query_start_loc: [sequences + 1] int32 or int64, start of each packed sequence; tokens after the last sequence get no output. States are
        then per sequence. A sequence without tokens leaves conv_states unchanged; its final state is its initial one
    seq_idx: [batch, length] int32, the sequence of each token in its row: taps reach only tokens of the same sequence; negative: padding,
        output 0. Inputs before the row belong to its first token's sequence

    States in a pool:
    conv_states: [slots, dim, width - 1], instead of the two states above: receives the last inputs of each sequence, and holds the inputs
        before its first token if has_initial_state, [sequences] bool, is true
    conv_state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals this or is not in conv_states gets a zero output and touches no state

    Types and precision:

    x, states and out have one dtype, f32, f16 or bf16; weight and bias each have their own. Tensors may have any strides, and nothing is
    copied: x is fastest if its length or its channels are contiguous ("channel-first", "channel-last"). Arithmetic is f32 and adds the
    oldest tap first.

    Returns out, or (out, final states). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Gu & Dao 2023 (arXiv 2312.00752); the arguments follow causal-conv1d and vLLM.
    """
    final = None
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        out = new_like(x) if out is None else out
        if return_final_states or final_states_out is not None:
            final = final_states_out
            if final is None and x.dim() in (2, 3) and weight.dim() == 2 and weight.shape[1] > 0:
                count = x.shape[0] if query_start_loc is None else max(query_start_loc.numel() - 1, 0)
                shape = (count, x.shape[-2], reach_of(weight.shape[1], dilation) - 1)
                final = new_like(x, shape) if x.dim() == 3 or query_start_loc is not None else None
    tensors = OPERANDS.Tensors(
        x, weight, bias, seq_idx, query_start_loc, initial_states, final, conv_states, conv_state_indices, has_initial_state,
        input_gate, output_gate, residual, outer_residual, out,
    )  # fmt: skip
    returns = ("out", "final_states") if return_final_states and final is not None else ("out",)
    return run(CALLER, tensors, Options(ACTIVATIONS[activation], pad_slot_id, dilation), pdl, returns=returns)


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with x and out as [batch, dim, length]. Adds errors to `problems`; the result is usable only if there are none."""
    if not check_convolution(OPERANDS, named, problems):
        return {}
    views, x, weight, ragged = dict(named), named["x"], named["weight"], "query_start_loc" in named
    like_x = ["x", "out", *(n for n in BESIDE if n in named)]
    if x.dim() not in ((2, 3) if ragged else (3,)) or (ragged and x.dim() == 3 and x.shape[0] != 1):
        wanted = "[dim, tokens] or [1, dim, tokens], as query_start_loc is given" if ragged else "[batch, dim, length]"
        problems.append(f"x is {list(x.shape)}; expected {wanted}")
        return {}
    if others := [
        f"{n} is {list(named[n].shape)}; expected {list(x.shape)}, the shape of x" for n in like_x[2:] if named[n].shape != x.shape
    ]:
        problems += others
        return {}
    if x.dim() == 2:
        views |= {n: named[n].unsqueeze(0) for n in like_x if named[n].dim() == 2}
        x = views["x"]
    batch, dim, length = x.shape
    width = weight.shape[1]
    sequences = named["query_start_loc"].numel() - 1 if ragged else batch
    if sequences < 0:
        problems.append("query_start_loc is empty; expected [sequences + 1]")
        return {}
    if not 1 <= width <= MAX_WIDTH:
        problems.append(f"weight is {list(weight.shape)}, of width {width}; expected a width of 1 … {MAX_WIDTH}")
        return {}
    if width == 1:
        stateful = [n for n in ("initial_states", "final_states", "conv_states") if n in named]
        problems += [f"{n} is given for width 1, which has no state; expected None. Leave out {n}." for n in stateful]
    if not check_reach(width, options.dilation, problems):
        return {}
    reach = reach_of(width, options.dilation)
    sizes = {"batch": batch, "dim": dim, "token": length, "width": width, "tap": reach - 1}
    sizes |= {"sequences": sequences, "starts": sequences + 1}
    fits = [checks.check_shapes(OPERANDS, {n: t for n, t in views.items() if n not in ("x", "conv_states", *BESIDE)}, sizes, problems)]
    if "conv_states" in named:
        fits.append(_check_pool(named, sequences, dim, reach, history_in_words(options.dilation), problems))
    else:
        problems += [
            f"{name} is given without conv_states; expected both. Pass conv_states, or leave out {name}."
            for name in ("conv_state_indices", "has_initial_state")
            if name in named
        ]
    if "seq_idx" in named and ragged:
        problems.append("seq_idx and query_start_loc are both given; expected one: each divides the length. Leave out one.")
    if not all(fits):
        return {}
    checks.check_distinct(views, ("out", "final_states", "conv_states"), problems)
    for name, t in views.items():
        check_strides(name, t, problems)
    if max(x.shape) >= 2**31:
        problems.append(f"x is {list(x.shape)}; expected axes below 2^31")
    return views


def _check_pool(named: Mapping[str, Tensor], sequences: int, dim: int, reach: int, words: str, problems: list[str]) -> bool:
    states = named["conv_states"]
    if states.dim() != 3 or tuple(states.shape[1:]) != (dim, reach - 1):
        wanted = f"[slots, dim, {words}] = [slots, {dim}, {reach - 1}]"
        problems.append(f"conv_states is {list(states.shape)}; expected {wanted}. Of longer states, pass the slice that holds the history.")
        return False
    if "conv_state_indices" not in named and states.shape[0] < sequences:
        problems.append(
            f"conv_states has {states.shape[0]} slots; expected {sequences}, one per sequence. "
            "Pass larger conv_states, or conv_state_indices."
        )
    for name in ("initial_states", "final_states"):
        if name in named:
            problems.append(f"{name} is given with conv_states; expected one: a pool holds both states. Leave out {name}.")
    return True


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> ConvProblem:
    """The problem of checked operands and their addresses."""
    x, out, weight, bias = views["x"], views["out"], views["weight"], views.get("bias")
    _, dim, length = x.shape
    width, size = weight.shape[1], x.element_size()
    along, across = (x.stride(2) == 1 or length == 1), (x.stride(1) == 1 or dim == 1)
    nearer = length > 1 if along and across else x.stride(2) < x.stride(1)  # if both axes, or neither, are contiguous
    first = nearer if along == across else along
    beside = [name for name in BESIDE if name in views]
    first = first and not beside and options.dilation == 1
    lane = 8 // size  # channels per lane, channel-last
    if first:
        vector = along and (out.stride(2) == 1 or length == 1)
    else:
        vector = dim % lane == 0 and all(checks.aligned(views[n], pointers[n], lane, 1) for n in ("x", "out", *beside))
    ragged = "query_start_loc" in views
    shifted = first and vector and (ragged or not all(checks.aligned(views[n], pointers[n], 16 // size, 2) for n in ("x", "out")))
    unit = not first and not vector and not beside and options.dilation == 1 and across and (out.stride(1) == 1 or dim == 1)
    two = unit and size == 2 and dim % 2 == 0
    run = 1 if first else lane if vector else 2 if two else 0  # channels whose taps a lane loads at once
    return ConvProblem(
        layout=ConvLayout.FIRST if first else ConvLayout.LAST,
        width=width,
        x=DTYPES[x.dtype],
        weight=DTYPES[weight.dtype],
        bias=None if bias is None else DTYPES[bias.dtype],
        silu=options.silu,
        seq_idx="seq_idx" in views,
        query_start_loc=INDEX[views["query_start_loc"].dtype if ragged else None],
        initial="initial_states" in views,
        final="final_states" in views,
        pool="conv_states" in views,
        started="has_initial_state" in views,
        index=INDEX[views["conv_state_indices"].dtype if "conv_state_indices" in views else None],
        loads=Loads.VECTOR if vector else Loads.ELEMENT,
        shifted=shifted,
        unit=unit,
        taps=Loads.VECTOR if run and taps_are_runs(views, pointers, run) else Loads.ELEMENT,
        input_gate="input_gate" in views,
        output_gate="output_gate" in views,
        dilation=options.dilation,
        residual="residual" in views,
        outer_residual="outer_residual" in views,
    )


def _sequences(views: Mapping[str, Tensor]) -> int:
    return views["query_start_loc"].shape[0] - 1 if "query_start_loc" in views else views["x"].shape[0]


def _pieces(spec: ConvSpec, views: Mapping[str, Tensor]) -> int:
    """Number of pieces of a row; channel-last, count of piece numbers for packed sequences (templates/lib/sequences.cuh.j2)."""
    tokens = views["x"].shape[2] + (spec.vec - 1 if spec.shifted else 0)
    if spec.ragged and spec.layout is ConvLayout.LAST:
        return tokens // spec.piece + _sequences(views)
    return max(1, -(-tokens // spec.piece))


def grid_of(spec: ConvSpec, views: Mapping[str, Tensor]) -> int:
    batch, dim, _ = views["x"].shape
    rows = _pieces(spec, views) * (1 if spec.ragged else batch)
    warps = spec.threads // 32
    if spec.layout is ConvLayout.LAST:
        return -(-rows // warps) * _channel_blocks(spec, dim) if rows + warps < 2**31 else 2**31
    blocks = -(-batch * dim // warps) * _pieces(spec, views) if spec.seq_idx else -(-rows * dim // warps)
    return blocks if blocks * warps < 2**31 else 2**31  # the kernel divides a warp's number


def _channel_blocks(spec: ConvSpec, dim: int) -> int:
    return -(-dim // (32 * spec.vec))


def kernel_values(spec: ConvSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    _, dim, length = views["x"].shape
    values: dict[str, int | float] = {"length": length, "sequences": _sequences(views), "pad_slot_id": options.pad_slot_id}
    values |= divisor("dim", dim) | divisor("pieces", _pieces(spec, views)) | divisor("channel_blocks", _channel_blocks(spec, dim))
    values |= {"slots": views["conv_states"].shape[0]} if "conv_states" in views else {}
    return values | OPERANDS.stride_values(spec, views)


def size_of(views: Mapping[str, Tensor]) -> int:
    """KiB of x, and at least 1 if anything is to be written."""
    x = views["x"]
    if not _sequences(views) or not x.shape[1] or not (x.numel() or "final_states" in views):
        return 0
    return max(1, x.numel() * x.element_size() // 1024)


FAMILY = Family(OPERATOR, OPERANDS.written, problem_of, size_of, grid_of, kernel_values, OPERANDS.in_place)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, by_name(reference), words={OPERATOR: WRITTEN_WORDS}).values()
