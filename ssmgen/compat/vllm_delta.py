"""vLLM's functions for prompts of gated delta rules, as in vLLM 0.33: what its layers call, by either of their backends."""

from __future__ import annotations

from torch import Tensor

from ..errors import ArgumentError
from . import delta_prompts as _prompts
from .gated_delta import new_output as _new_output
from .operands import takes as _takes


@_takes("output_final_state", **_prompts.PACKED, initial_state="[N, HV, V, K]")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output [B, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], None unless output_final_state).

    q, k: [B, T, H, K]   v: [B, T, HV, V]   g: [B, T, HV], the log decay   beta: [B, T, HV]   initial_state: [N, HV, V, K]
    cu_seqlens: [N + 1], packed sequences, with B = 1; else N is B
    core_attn_out: a dense buffer, whose first elements are the output; None for a new one
    chunk_indices and chunk_offsets follow from cu_seqlens: ignored
    """
    out = _output(q, v, core_attn_out)
    final = _prompts.states_of(q, v, _prompts.sequences_of(v, cu_seqlens)) if output_final_state else None
    _prompts.scan(
        _prompts.Operands(q, k, v, g, beta), out, initial_states=initial_state, last=final, cu_seqlens=cu_seqlens, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, final


def _output(q: Tensor, v: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is None:
        return _new_output(q, v)
    if buffer.numel() < v.numel() or not buffer.is_contiguous():
        found = f"{list(buffer.shape)} with strides {list(buffer.stride())}"
        problem = f"core_attn_out is {found}: it is dense, and its first elements are the output {list(v.shape)}"
        raise ArgumentError("vllm's chunk_gated_delta_rule", [problem])
    return buffer.view(-1)[: v.numel()].view(v.shape)


@_takes("output_final_state", **_prompts.PACKED, initial_state="[N, HV, V, K]", state_checkpoints="[count, HV, V, K]")
def fi_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule of packed sequences, as vLLM calls FlashInfer: also the states after each so many tokens, a multiple of 64.

    checkpoint_cu_starts: [N + 1], the first row of state_checkpoints [count, HV, V, K] of each sequence   use_cp: ignored
    """
    positions = _prompts.places(
        "vllm's fi_chunk_gated_delta_rule", v, checkpoint_every_n_tokens, cu_seqlens, state_checkpoints, checkpoint_cu_starts, []
    )
    out = _new_output(q, v)
    final = _prompts.states_of(q, v, _prompts.sequences_of(v, cu_seqlens)) if output_final_state else None
    _prompts.scan(
        _prompts.Operands(q, k, v, g, beta), out, initial_states=initial_state, last=final, cu_seqlens=cu_seqlens, positions=positions,
        checkpoints=state_checkpoints, use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, final
