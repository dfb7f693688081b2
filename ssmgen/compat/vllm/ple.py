"""vLLM's short convolution of Qwen4-Exp's n-gram layers, which is dilated, with the sums after it, as in vLLM 0.33."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...engine.window import reach_of
from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ..shared.gated_delta import first
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement


@_takes(
    inputs="[tokens, channels]", residual="[tokens, channels]", outer_residual="[tokens, channels]", conv_weights="[channels, width]",
    conv_state="[slots, channels, entries]", state_indices="[N]", query_start_loc="[N + 1]", num_accepted_tokens="[N]",
    has_initial_states="[N]", token_indices="[rows]",
)  # fmt: skip
def ple_conv(
    inputs: Tensor,
    residual: Tensor,
    conv_state: Tensor,
    conv_weights: Tensor,
    state_indices: Tensor,
    outer_residual: Tensor | None,
    *,
    mode: str,
    dilation: int,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    has_initial_states: Tensor | None = None,
    spec_query_len: int = 1,
    token_indices: Tensor | None = None,
) -> None:
    """residual <- outer_residual + (residual + silu(conv(inputs))), with a convolution whose taps are `dilation` tokens apart.

    inputs, residual, outer_residual: [tokens, channels]; residual is written. Without outer_residual it receives the convolution alone
    conv_state: [slots, channels, entries], updated in place; its first (width - 1) dilation entries are the history
    conv_weights: [channels, width]          state_indices: [N], slot of each sequence; 0 and below, and out of the pool, are padding
    mode: "decode" for a token per sequence, "prefill" for prompts, "spec" for drafts
    query_start_loc: [N + 1], start of each packed sequence of prompts and drafts
    has_initial_states: [N] bool, whether conv_state holds earlier inputs; for prompts and decode steps
    num_accepted_tokens: [N], for drafts: the history begins at entry num_accepted_tokens - 1
    token_indices: [rows], the rows of these sequences in inputs, residual and outer_residual; None for all. They are gathered, and the
        results scattered

    As in vLLM, the convolution and each sum are rounded to residual's dtype. Unlike in vLLM, SiLU comes before the first rounding, and
    padding gets 0. Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    spec_query_len: num_accepted_tokens never exceeds it
    """
    name = "vllm's ple_conv"
    needed: dict[str, Any] = {
        "decode": {}, "spec": {"query_start_loc": query_start_loc, "num_accepted_tokens": num_accepted_tokens},
        "prefill": {"query_start_loc": query_start_loc, "has_initial_states": has_initial_states},
    }  # fmt: skip
    if mode not in needed:
        raise ArgumentError(name, [f"mode is {mode!r}; expected one of {', '.join(needed)}"])
    if missing := [f"{what} is None with mode={mode!r}; expected a tensor" for what, given in needed[mode].items() if given is None]:
        raise ArgumentError(name, missing)
    rows, out, outer = (
        t if t is None or token_indices is None else t.index_select(0, token_indices) for t in (inputs, residual, outer_residual)
    )
    assert rows is not None and out is not None, "only outer_residual may be None"
    inner = None if outer is None else out
    history = reach_of(conv_weights.shape[1], dilation) - 1
    if mode == "prefill":
        sequences = state_indices.shape[0]
        causal_conv1d(
            rows.t(), conv_weights, activation="silu", query_start_loc=first(query_start_loc, sequences + 1),
            conv_states=conv_state[..., :history], conv_state_indices=state_indices, has_initial_state=first(has_initial_states, sequences),
            residual=None if inner is None else inner.t(), outer_residual=None if outer is None else outer.t(), dilation=dilation,
            pad_slot_id=0, out=out.t(),
        )  # fmt: skip
    else:
        drafts = mode == "spec"
        sequences = state_indices.shape[0] if drafts else rows.shape[0]
        causal_conv1d_update(
            rows, conv_state if drafts else conv_state[..., :history], conv_weights, None, "silu",
            conv_state_indices=first(state_indices, sequences), query_start_loc=first(query_start_loc, sequences + 1) if drafts else None,
            num_accepted_tokens=first(num_accepted_tokens, sequences) if drafts else None,
            has_initial_state=None if drafts else first(has_initial_states, sequences), residual=inner, outer_residual=outer,
            dilation=dilation, pad_slot_id=0, out=out,
        )  # fmt: skip
    if token_indices is not None:
        residual.index_copy_(0, token_indices, out)


REPLACEMENTS = [Replacement("vllm.models.qwen4_exp.common.ops.ple", "ple_conv", ple_conv)]
