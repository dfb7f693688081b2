"""vLLM's layers that are one kernel each here: Kimi-K3's decode steps and LFM2's, as in vLLM 0.33."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ..shared import kda_layers
from ..shared.gated_delta import first, first_column
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement

_LAYERS = "vllm.model_executor.layers.mamba"
_SHORT, _CONV = f"{_LAYERS}.short_conv", f"{_LAYERS}.ops.causal_conv1d"


@_takes(
    x="[B, channels]", weight="[3, width, H V]", conv_state="[slots, channels, width - 1]", raw_g="[1, B, H, K]", raw_beta="[1, B, H]",
    state_indices="[B]", state="[slots, H, V, K]", out="[1, B, H, V]", output_gate="[B, H, V]",
)  # fmt: skip
def fused_kda_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    state: Tensor,
    out: Tensor | None = None,
    lower_bound: float | None = None,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
) -> Tensor:
    """The decode step of Kimi-K3's layer between its projections: convolution, Kimi delta attention, and a gated RMS norm, in one kernel.

    S <- S D + beta (v - S D k) k^T;  o = K^-0.5 S q, with D = diag(e^g) and beta = sigmoid(raw_beta). g is -e^A_log softplus(raw_g +
    dt_bias), or lower_bound sigmoid(e^A_log (raw_g + dt_bias)).

    x: [B, 3 H V], q, k and v consecutive, before their convolution          weight: [3, width, H V]          bias: [3 H V]; None for none
    conv_state: [slots, 3 H V, width - 1] of x's dtype, in either layout; state: [slots, H, V, K]. Both are updated in place
    raw_g: [1, B, H, K], raw gate          raw_beta: [1, B, H], logit          A_log, dt_bias: H and H K elements
    lower_bound: a number for the second form of the gate; None for the first
    output_gate, norm_weight: [B, H, V] and [V], of an RMS norm that the sigmoid of output_gate gates; None for no norm
    state_indices: [B], slots; 0 and below is padding: a zero output, and no state is touched
    out: [1, B, H, V], receives the output; None for a new one of x's dtype

    Returns out. Unlike in vLLM, a separate kernel transposes the weight.
    Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    if weight.shape[0] != 3 or x.shape[-1] != 3 * weight.shape[2]:
        problem = f"weight is {list(weight.shape)} and x {list(x.shape)}; expected [3, width, H V] and [B, 3 H V]"
        raise ArgumentError("vllm's fused_kda_decode", [problem])
    if out is None:
        out = torch.empty((1, x.shape[0], *state.shape[1:3]), dtype=x.dtype, device=x.device)
    kda_layers.decode(
        x, raw_g[0], raw_beta[0], output_gate, conv_state, state, weight.transpose(1, 2).flatten(0, 1), bias, A_log, dt_bias, norm_weight,
        lower_bound=lower_bound, norm_eps=norm_eps, slots=state_indices, pad_slot_id=0, out=out[0],
    )  # fmt: skip
    return out


@_takes(hidden_states="[tokens, hidden]", output="[tokens, hidden]")
def short_conv(self: Any, hidden_states: Tensor, output: Tensor) -> None:
    """Decode steps, drafts and prompts of LFM2's short convolution, into output: the method forward_cuda of vLLM's ShortConv.

    One kernel between the projections for decoded tokens and one for prompts. vLLM has two multiplications and a convolution for each, and
    copies. The profiling run, which has no states, is vLLM's own method, without a warning.
    """
    engine = import_module(_SHORT)
    step = engine.get_forward_context().attn_metadata
    step = step.get(self.prefix) if isinstance(step, dict) else None
    if step is None or not (step.num_prefills or step.num_decode_tokens):
        raise NotReplaced
    window, steps = self.kv_cache[0], step.num_decode_tokens
    if not engine.is_conv_state_dim_first():
        window = window.transpose(-1, -2)
    tokens, weight = steps + (step.num_prefill_tokens if step.num_prefills else 0), self.conv.weight.squeeze(1)
    projected, _ = self.in_proj(hidden_states)
    before, after, x = projected[:tokens].chunk(3, dim=-1)
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = []
    if steps:
        calls.append((causal_conv1d_update, _decoded(step, window, weight, *(t[:steps] for t in (x, before, after, convolved)))))
    if step.num_prefills:
        calls.append((causal_conv1d, _prompts(step, window, weight, *(t[steps:].t() for t in (x, before, after, convolved)))))
    if len(calls) > 1:  # the objections to both come first, while the windows are as they were
        launches = [call_of(function, weight=weight, bias=self.conv.bias, pad_slot_id=0, **more).plan() for function, more in calls]
        for launch in launches:
            launch()
    else:
        for function, more in calls:
            function(weight=weight, bias=self.conv.bias, pad_slot_id=0, **more)
    output[:tokens], _ = self.out_proj(convolved)


def _decoded(step: Any, window: Tensor, weight: Tensor, x: Tensor, before: Tensor, after: Tensor, out: Tensor) -> dict[str, Any]:
    """The arguments for a token of each sequence, or for its drafts; all tensors of tokens are [tokens, dim]."""
    table, accepted, tokens = step.state_indices_tensor_d, step.num_accepted_tokens, x.shape[0]
    given: dict[str, Any] = {"x": x, "input_gate": before, "output_gate": after, "out": out}
    if accepted is None:
        return given | {"conv_state": window[..., : weight.shape[1] - 1], "conv_state_indices": first_column(table, tokens)}
    sequences = table.shape[0]
    given |= {"conv_state": window, "conv_state_indices": first_column(table, sequences)}
    return given | {"num_accepted_tokens": first(accepted, sequences), "query_start_loc": first(step.query_start_loc_d, sequences + 1)}


def _prompts(step: Any, window: Tensor, weight: Tensor, x: Tensor, before: Tensor, after: Tensor, out: Tensor) -> dict[str, Any]:
    """The arguments for packed prompts; all tensors of tokens are [dim, tokens]."""
    starts = step.query_start_loc_p
    sequences = starts.shape[0] - 1
    return {
        "x": x, "input_gate": before, "output_gate": after, "out": out, "query_start_loc": starts,
        "conv_states": window[..., : weight.shape[1] - 1], "conv_state_indices": first_column(step.state_indices_tensor_p, sequences),
        "has_initial_state": first(step.has_initial_states_p, sequences),
    }  # fmt: skip


REPLACEMENTS = [
    Replacement("vllm._custom_ops", "fused_kda_decode", fused_kda_decode),
    Replacement(_SHORT, "ShortConv.forward_cuda", short_conv, needs=(f"{_CONV}.causal_conv1d_fn", f"{_CONV}.causal_conv1d_update")),
]
