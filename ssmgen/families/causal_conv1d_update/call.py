"""causal_conv1d_update: the decode step of the short depthwise convolution, on a pool of windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, index_of
from ...calls.dispatch import by_name, callers
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
from ...engine.short_conv_reference import step as reference
from ...engine.window import BESIDE, MAX_WIDTH, history_in_words, reach_of
from ...spec.arguments import divisor
from ...spec.kernel import Index, Loads
from .operands import CHILDREN, OPERANDS
from .spec import MAX_TREE, OPERATOR, Advance, Saved, StateLayout, Tokens, UpdateProblem, UpdateSpec, tokens_of


@operator(like="x", activation=ACTIVATION, dilation=DILATION)
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    *,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    parents: Tensor | None = None,
    first_children: Tensor | None = None,
    next_siblings: Tensor | None = None,
    parents_out: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    residual: Tensor | None = None,
    outer_residual: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    dilation: int = 1,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of causal_conv1d, per token: out = act(bias + sum_j weight[:, j] window[:, j]).

    The window of a token is the last width - 1 inputs, which a slot of conv_state holds, and the token itself.

    x, out: [batch, dim] or [batch, dim, T]; with query_start_loc [tokens, dim], packed
    weight: [dim, width], width 2 … 8; bias: [dim]
    conv_state: [slots, dim, state_len] of x's dtype, any strides (the window or the channels may be contiguous), updated in place;
        state_len >= width - 1, and the last width - 1 entries are the history: new inputs push the oldest out. (If the history
        comes first, as in vLLM without accepted tokens, pass conv_state[..., :width - 1].)
    activation: None, "silu" or its other name "swish"
    conv_state_indices: [batch] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct, else rows race
    pad_slot_id: a sequence whose slot is negative, equals this or is not in the pool gets a zero output and touches no state
    has_initial_state: [batch] bool: a sequence with False begins here, and the old entries of its slot count as zeros. Not with
        cache_seqlens or num_accepted_tokens
    dilation: distance between the inputs of neighbouring taps, up to 16, with a window of at most 17 inputs. Wherever this text has
        width - 1, it is (width - 1) dilation. Not with a draft tree
    out: x itself or a residual for in place, but not with a draft tree; None for a new one laid out like x
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Gates and residuals, not with a draft tree:
    input_gate, output_gate: like x, of its dtype: the inputs are x input_gate, rounded to x's dtype, and out is the rounded output times
        output_gate (LFM2). Either or both
    residual, outer_residual: like x, of its dtype: are added to the output, after its activation and gate, in this order; each sum is
        rounded to x's dtype, as by a separate addition (Qwen4-Exp). Either none, residual, or both

    Packed sequences and rings:
    query_start_loc: [batch + 1] int32 or int64, start of each packed sequence; a sequence without tokens is unchanged, and tokens after the
        last sequence get no output
    cache_seqlens: [batch] int32 or int64: the entries of conv_state are a ring: input i is entry i modulo state_len, and cache_seqlens is
        the number of inputs so far

    Speculative decoding and draft trees:
    num_accepted_tokens: [batch] int32 or int64: the number of the last call's tokens that were accepted. The history begins at entry
        num_accepted_tokens - 1; state_len >= width - 2 + T. The step moves the history to the front and stores the new inputs after it. A
        count out of 1 … state_len - width + 2 is padding
    intermediate_conv_window: [batch, T or more, dim, width - 1] of x's dtype: receives the history after each token, in the row of the
        sequence or of intermediate_state_indices, [batch] int32 or int64; a row out of range is not written
    parents: [batch, T] int32 or int64, a draft tree: token t continues from token parents[t], an earlier token of the sequence. Its window
        is the history, then its ancestors' inputs. Any other number means the token before it. Packed sequences may have any number of
        columns. conv_state receives the inputs in the order of the tokens, tree or not: to continue from a token of a tree, take its
        intermediate_conv_window
    first_children, next_siblings, parents_out: [batch, T], all int32 or all int64: instead of parents, for trees of up to 128 tokens a
        sequence. Each token's first child and next sibling, which are later tokens, or -1; parents_out receives the parents, 0 if there is
        none

    Returns out. CPU tensors run the reference implementation. Raises the same errors as causal_conv1d.
    Source: causal-conv1d, vLLM and SGLang define these conventions.
    """
    if out is None and isinstance(x, Tensor):
        out = x.new_empty(x.shape) if x.dim() == 2 else new_like(x)
    tensors = OPERANDS.Tensors(
        x, conv_state, weight, bias, cache_seqlens, conv_state_indices, num_accepted_tokens, query_start_loc, parents, first_children,
        next_siblings, parents_out, intermediate_conv_window, intermediate_state_indices, has_initial_state,
        input_gate, output_gate, residual, outer_residual, out,
    )  # fmt: skip
    return run(CALLER, tensors, Options(ACTIVATIONS[activation], pad_slot_id, dilation), pdl)


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with x and out as [batch, dim, T] ([1, dim, tokens] for packed sequences). Adds to `problems`."""
    if not check_convolution(OPERANDS, named, problems):
        return {}
    views, x, weight = dict(named), named["x"], named["weight"]
    ragged = "query_start_loc" in named
    if x.dim() not in ((2,) if ragged else (2, 3)):
        problems.append(
            f"x is {list(x.shape)}; expected " + ("[tokens, dim], as query_start_loc is given" if ragged else "[batch, dim(, T)]")
        )
        return {}
    like_x = ["x", "out", *(n for n in BESIDE if n in named)]
    if others := [f"{n} is {list(named[n].shape)}; expected {list(x.shape)}, the shape of x" for n in like_x if named[n].shape != x.shape]:
        problems += others
        return {}
    if len(like_x) > 2 and ("parents" in named or CHILDREN[0] in named):
        problems.append(f"{' and '.join(like_x[2:])} is given with a draft tree; expected None. Multiply and add around the call.")
    if options.dilation > 1 and ("parents" in named or CHILDREN[0] in named):
        problems.append(f"dilation is {options.dilation} with a draft tree; expected 1")
    if x.dim() == 2:
        views |= {n: named[n].t().unsqueeze(0) if ragged else named[n].unsqueeze(2) for n in like_x}
    lead, dim, T = views["x"].shape
    batch = named["query_start_loc"].numel() - 1 if ragged else lead
    if batch < 0:
        problems.append("query_start_loc is empty; expected [batch + 1]")
        return {}
    width = weight.shape[1]
    if not 2 <= width <= MAX_WIDTH:
        problems.append(f"weight is {list(weight.shape)}, of width {width}; expected a width of 2 … {MAX_WIDTH}")
        return {}
    if not check_reach(width, options.dilation, problems):
        return {}
    sizes = {"batch": batch, "starts": batch + 1, "dim": dim, "width": width}
    reach, words = reach_of(width, options.dilation), history_in_words(options.dilation)
    simple = {n: t for n, t in named.items() if n not in (*like_x, "conv_state", "intermediate_conv_window", "parents", *CHILDREN)}
    fits = [checks.check_shapes(OPERANDS, simple, sizes, problems)]
    fits += [_check_tree(named, batch, None if ragged else T, problems)]
    fits += [_check_state(named, batch, dim, reach, words, None if ragged else T, problems)]
    if "intermediate_conv_window" in named:
        fits += [_check_windows(named, batch, dim, reach, words, None if ragged else T, problems)]
    elif "intermediate_state_indices" in named:
        problems.append("intermediate_state_indices is given without intermediate_conv_window; expected both. Pass both, or neither.")
    moving = [n for n in ("cache_seqlens", "num_accepted_tokens") if n in named]
    if "has_initial_state" in named and moving:
        problems.append(f"has_initial_state is given with {moving[0]}; expected one of them. Clear the slots of new sequences before.")
    if len(moving) > 1:
        problems.append(
            "cache_seqlens and num_accepted_tokens are both given; expected one: each says where the history is. Leave out one."
        )
    if not all(fits):
        return {}
    checks.check_distinct(views, ("out", "conv_state", "intermediate_conv_window"), problems)
    for name, t in views.items():
        check_strides(name, t, problems)
    return views


def _check_tree(named: Mapping[str, Tensor], batch: int, tokens: int | None, problems: list[str]) -> bool:
    before, children = len(problems), [n for n in CHILDREN if n in named]
    given = [n for n in ("parents", *CHILDREN) if n in named]
    if children and len(children) < len(CHILDREN):
        problems.append(f"{' and '.join(children)} is given; expected all of {', '.join(CHILDREN)} for a tree by children")
    if children and "parents" in named:
        problems.append(f"parents and {children[0]} are both given; expected one: each describes the tree. Leave out one.")
    if children and tokens is None:
        problems.append(f"{children[0]} is given with query_start_loc; expected parents for packed sequences. Pass parents.")
    if children and (tokens or 0) > MAX_TREE:
        problems.append(f"{children[0]} is given and x has {tokens} tokens per sequence; expected at most {MAX_TREE}. Pass parents.")
    if len({named[n].dtype for n in children}) > 1:
        problems.append(", ".join(f"{n} is {named[n].dtype}" for n in children) + "; expected one dtype for all")
    for name in given:
        columns = named[name].shape[-1] if tokens is None and named[name].dim() else tokens or 0
        checks.check_shape(name, named[name], {"[batch, T]": (batch, columns)}, problems)
    checks.check_distinct(named, ("parents_out",), problems)
    return len(problems) == before


def _check_state(
    named: Mapping[str, Tensor], batch: int, dim: int, reach: int, words: str, tokens: int | None, problems: list[str]
) -> bool:
    state = named["conv_state"]
    if state.dim() != 3 or state.shape[1] != dim:
        problems.append(f"conv_state is {list(state.shape)}; expected [slots, dim, state_len] = [slots, {dim}, {reach - 1} or more]")
        return False
    slots, _, length = state.shape
    if length < reach - 1:
        problems.append(f"conv_state is {list(state.shape)}, of state_len {length}; expected {words} = {reach - 1} or more")
    elif "num_accepted_tokens" in named and tokens is not None and length < reach - 2 + tokens:
        wanted = f"{'width - 2' if words == 'width - 1' else f'{words} - 1'} + T = {reach - 2 + tokens}"
        problems.append(f"conv_state is {list(state.shape)}, of state_len {length}; expected {wanted} or more")
    if "conv_state_indices" not in named and slots < batch:
        problems.append(
            f"conv_state has {slots} slots; expected {batch}, one per sequence of the batch. "
            "Pass a larger conv_state, or conv_state_indices."
        )
    return True


def _check_windows(
    named: Mapping[str, Tensor], batch: int, dim: int, reach: int, words: str, tokens: int | None, problems: list[str]
) -> bool:
    windows = named["intermediate_conv_window"]
    rows = 0 if "intermediate_state_indices" in named else batch
    wanted = f"[{'rows' if rows == 0 else f'{rows} or more'}, {tokens or 'T'} or more, {dim}, {reach - 1}]"
    enough = windows.dim() == 4 and windows.shape[0] >= rows and windows.shape[1] >= (tokens or 0)
    if not enough or tuple(windows.shape[2:]) != (dim, reach - 1):
        problems.append(f"intermediate_conv_window is {list(windows.shape)}; expected [batch, T, dim, {words}] = {wanted}")
        return False
    return True


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> UpdateProblem:
    """The problem of checked operands and their addresses."""
    x, state, weight, bias = views["x"], views["conv_state"], views["weight"], views.get("bias")
    _, dim, T = x.shape
    width, state_len = weight.shape[1], state.shape[2]
    reach = reach_of(width, options.dilation)

    starts = index_of(views, "query_start_loc")
    parents, children = index_of(views, "parents"), index_of(views, "first_children")
    tokens, count = tokens_of(reach, T, starts, parents if children is Index.NONE else children)
    advance = Advance.RING if "cache_seqlens" in views else Advance.ROLL if "num_accepted_tokens" in views else Advance.SHIFT
    lane = 8 // x.element_size()  # channels of a lane
    whole = dim % lane == 0

    def runs(name: str, length: int) -> bool:
        """Whether a channel's entries are contiguous, its neighbours follow, and runs of a lane's channels are aligned."""
        t, step = views[name], 16 // x.element_size()
        dense = (t.stride(-1) == 1 or length == 1) and t.stride(-2) == length
        return (
            dense and pointers[name] % 16 == 0 and all(s % step == 0 for n, s in zip(t.shape[:-2], t.stride()[:-2], strict=True) if n > 1)
        )

    rewritten = (reach + tokens - 2,) if advance is Advance.ROLL else (reach - 1, reach)  # entries, if the kernel knows their number
    known = advance is Advance.SHIFT or (advance is Advance.ROLL and count is Tokens.FIXED)
    if whole and known and state_len in rewritten and runs("conv_state", state_len):
        layout = StateLayout.RUNS
    elif whole and checks.aligned(state, pointers["conv_state"], lane, 1):
        layout = StateLayout.CHANNELS
    else:
        layout = StateLayout.ANY
    saved = Saved.NO
    if "intermediate_conv_window" in views:
        saved = Saved.RUNS if whole and runs("intermediate_conv_window", reach - 1) else Saved.ANY
    vector = whole and all(checks.aligned(views[n], pointers[n], lane, 1) for n in ("x", "out", *BESIDE) if n in views)
    return UpdateProblem(
        width=width,
        x=DTYPES[x.dtype],
        weight=DTYPES[weight.dtype],
        bias=None if bias is None else DTYPES[bias.dtype],
        silu=options.silu,
        advance=advance,
        position=index_of(views, "cache_seqlens" if advance is Advance.RING else "num_accepted_tokens"),
        tokens=tokens,
        count=count,
        query_start_loc=starts,
        index=index_of(views, "conv_state_indices"),
        layout=layout,
        state_len=state_len if layout is StateLayout.RUNS else 0,
        saved=saved,
        saved_index=index_of(views, "intermediate_state_indices"),
        loads=Loads.VECTOR if vector else Loads.ELEMENT,
        taps=Loads.VECTOR if whole and taps_are_runs(views, pointers, lane) else Loads.ELEMENT,
        parents=parents,
        children=children,
        input_gate="input_gate" in views,
        output_gate="output_gate" in views,
        dilation=options.dilation,
        residual="residual" in views,
        outer_residual="outer_residual" in views,
        started="has_initial_state" in views,
    )


def _sequences(views: Mapping[str, Tensor]) -> int:
    return views["query_start_loc"].shape[0] - 1 if "query_start_loc" in views else views["x"].shape[0]


def _channel_blocks(spec: UpdateSpec, dim: int) -> int:
    return -(-dim // (spec.threads * spec.vec))


def grid_of(spec: UpdateSpec, views: Mapping[str, Tensor]) -> int:
    return _sequences(views) * _channel_blocks(spec, views["x"].shape[1])


def kernel_values(spec: UpdateSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    _, dim, length = views["x"].shape
    slots, _, state_len = views["conv_state"].shape
    values: dict[str, int | float] = {"dim": dim, "length": length, **divisor("channel_blocks", _channel_blocks(spec, dim))}
    values |= {"slots": slots, "state_len": state_len, "pad_slot_id": options.pad_slot_id}
    if "intermediate_conv_window" in views:
        values["window_rows"], values["window_tokens"] = views["intermediate_conv_window"].shape[:2]
    if "parents" in views:
        values["parent_columns"] = views["parents"].shape[1]
    return values | OPERANDS.stride_values(spec, views)


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: _sequences(views) if views["x"].numel() else 0,
    grid_of=grid_of,
    values_of=kernel_values,
    in_place=OPERANDS.in_place,
)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, by_name(reference)).values()
