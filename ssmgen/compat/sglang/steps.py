"""SGLang's packed decode step of Kimi delta attention, its convolution of prompts in Triton, its gated norm of Mamba-2's layers and its two
functions that merge attention, as in SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d as _conv
from ...families.combine_splits.call import combine_splits
from ...families.linear_attention.call import kda as _kda
from ..shared import engine_norms as _norms
from ..shared import gated_delta, noise
from ..shared.engine_norms import rms_norm_gated as rms_norm_gated
from ..shared.gated_delta import first as _first
from ..shared.gated_delta import shaped as _shaped
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement


@_takes(**gated_delta.PACKED)
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per sequence of Kimi delta attention, with q, k and v packed: S <- S D + beta (v - S D k) k^T;  out = scale S q.

    D = diag(e^g), with g = -e^A_log softplus(a + dt_bias), or lower_bound sigmoid(e^A_log (a + dt_bias)); beta = sigmoid(b).

    mixed_qkv: [B, 2 HK K + HV V], q, k and v consecutive          a: [B, HV K], raw gate          b: [B, HV], logit of beta
    A_log, dt_bias: [HV], [HV K]          lower_bound: a number for the second form of the gate; None for the first
    initial_state: [slots, HV, V, K], updated in place          out: [B, 1, HV, V], written          ssm_state_indices: [B]
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)

    Returns (out, initial_state). Slots below 0 and out of the pool are padding: a zero output, and no state is touched.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    name = "fused_recurrent_kda_packed_decode"
    q, k, v = gated_delta.unpacked(name, mixed_qkv, initial_state)
    B, HV, _ = v.shape
    _kda(
        initial_state, q, k, v, _shaped(a, (B, HV, k.shape[-1])), b, A_log, dt_bias, lower_bound=lower_bound,
        use_qk_l2norm=use_qk_l2norm_in_kernel, beta_sigmoid=True, scale=scale, state_indices=_first(ssm_state_indices, B),
        out=gated_delta.of_one_token(name, out), **noise.of(initial_state),
    )  # fmt: skip
    return out, initial_state


@_takes(
    x="[dim, tokens]", weight="[dim, width]", conv_states="[slots, dim, state_len]", query_start_loc="[batch + 1]",
    cache_indices="[batch]", has_initial_state="[batch]",
)  # fmt: skip
def causal_conv1d_fn_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int = -1,
    validate_data: bool = False,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """A causal convolution per channel of packed sequences: out[d, t] = act(bias[d] + sum_j weight[d, j] x[d, t - (width - 1) + j]).

    x: [dim, tokens]          weight: [dim, width], width 1 … 8          bias: [dim]; None for none
    activation: None, "silu", "swish", or a bool for "silu"
    conv_states: [slots, dim, width - 1 or more] of x's dtype; the first width - 1 entries receive each sequence's last inputs
    query_start_loc: [N + 1], start of each sequence          cache_indices: [N], slot of each; None for slot = sequence
    has_initial_state: [N] bool, whether conv_states holds the inputs before the first token; None for no
    pad_slot_id: a slot equal to this, negative or out of the pool is padding: a zero output, and no state is touched

    Returns a new tensor laid out like x. The function causal_conv1d_fn of sglang.kernels.ops.mamba.causal_conv1d_triton, which layers of
    Kimi delta attention call.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    seq_lens_cpu, block_table, validate_data: they divide SGLang's work, or check; other keywords are ignored as in SGLang
    """
    sequences = query_start_loc.shape[0] - 1
    found: Any = _conv(
        x, weight, bias, activation="silu" if activation is True else activation or None, query_start_loc=query_start_loc,
        conv_states=conv_states[..., : weight.shape[1] - 1], conv_state_indices=_first(cache_indices, sequences),
        has_initial_state=_first(has_initial_state, sequences), pad_slot_id=pad_slot_id,
    )  # fmt: skip
    out: Tensor = found
    return out


@_takes("norm_before_gate is_rms_norm")
def mixer2_rms_norm_gated(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Gated RMS norm: x rsqrt(mean(x^2) + eps) weight, times act(z); with norm_before_gate=False, x is multiplied by act(z) first.

    x: [*rows, channels]          z: like x, or for x [tokens * heads, size] also [tokens, heads, size]; None for no gate
    weight, bias: [channels]; bias None for an RMS norm          group_size: channels of a group, over which the norm is; None for all
    activation: "swish", "silu" or "sigmoid"
    is_rms_norm: False by default: the mean is subtracted, and bias added

    Returns a new tensor like x. The function rms_norm_gated of sglang.kernels.ops.attention.fla.layernorm_gated.
    Raises UnsupportedError for a bias of an RMS norm, and ArgumentError (a ValueError) for operands that do not fit.
    """
    name, shape = "sglang's rms_norm_gated", x.shape
    if z is not None and z.dim() == 3 and x.dim() == 2:
        x = _shaped(x, tuple(z.shape))
        if x.dim() == 2:
            raise ArgumentError(name, [f"z is {list(z.shape)}; expected as many elements as x {list(shape)}"])
    found = _norms.normed(
        name, x, z, weight, bias, eps, group_size=group_size, norm_before_gate=norm_before_gate, activation=activation,
        is_rms_norm=is_rms_norm,
    )  # fmt: skip
    return found.view(shape)


@_takes()
def merge_state(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merges outputs [tokens, heads, head_dim] by LSEs [tokens, heads] f32, natural logarithms: (output, output_lse), new if not given."""
    output = torch.empty_like(prefix_output) if output is None else output
    output_lse = torch.empty_like(prefix_lse) if output_lse is None else output_lse
    combine_splits((prefix_output, suffix_output), (prefix_lse, suffix_lse), out=output, lse_out=output_lse)
    return output, output_lse


@_takes()
def merge_state_v2(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v_merged: Tensor | None = None, s_merged: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges two parts of an attention, weighted by their softmax sums: the function of sgl_kernel.

    v_a, v_b, v_merged: [tokens, heads, head_dim] f32, f16 or bf16
    s_a, s_b, s_merged: [tokens, heads], natural logarithms; s_merged f32

    Returns (v_merged, s_merged), new if not given. Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    s_a, s_b = (s if s.dtype == torch.float32 else s.float() for s in (s_a, s_b))
    v_merged = torch.empty_like(v_a) if v_merged is None else v_merged
    s_merged = torch.empty_like(s_a) if s_merged is None else s_merged
    combine_splits((v_a, v_b), (s_a, s_b), out=v_merged, lse_out=s_merged)
    return v_merged, s_merged


_KERNELS, _LAYERS = "sglang.kernels.ops", "sglang.srt.layers.attention"
_FLA = f"{_KERNELS}.attention.fla"
REPLACEMENTS = [
    Replacement(f"{_FLA}.fused_recurrent", "fused_recurrent_kda_packed_decode", fused_recurrent_kda_packed_decode),
    Replacement(f"{_KERNELS}.mamba.causal_conv1d_triton", "causal_conv1d_fn", causal_conv1d_fn_triton),
    Replacement(f"{_FLA}.fused_norm_gate", "rms_norm_gated", rms_norm_gated, traced=True),
    Replacement(f"{_FLA}.layernorm_gated", "rms_norm_gated", mixer2_rms_norm_gated, traced=True),
    Replacement(f"{_LAYERS}.merge_state", "merge_state", merge_state),
    Replacement(f"{_LAYERS}.flashattention_backend", "merge_state_v2", merge_state_v2),
]
