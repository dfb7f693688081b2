"""Functions of vLLM 0.33 for Mamba, short convolutions, delta rules, Lightning attention, gated norms and merged attention, and vLLM's
plugin, `register`.

Slots equal to null_block_id (0), negative ones and ones out of the pool are padding: a zero output, and no state is touched. vLLM leaves
some of these outputs unchanged, or computes them from zeros. Index tensors may have more rows than there are sequences. Operands are f32,
f16 or bf16, and strided. UnsupportedError names arguments that no kernel serves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d as _conv
from ...families.causal_conv1d_update.call import causal_conv1d_update as _conv_update
from ...families.selective_state_update.call import selective_state_update as _ssu
from ..shared import gated_delta, replacing
from ..shared.gated_delta import first as _first
from ..shared.lightning import lightning_attention as lightning_attention
from ..shared.lightning import linear_decode_forward_triton as linear_decode_forward_triton
from ..shared.noise import of as _noise_of
from ..shared.operands import one as _one
from ..shared.operands import takes as _takes
from . import bailing as _bailing
from . import delta as _delta
from . import delta_steps as _delta_steps
from . import flashkda as _flashkda
from . import gdn as _gdn
from . import invariance as _invariance
from . import kda_prompts as _kda_prompts
from . import layers as _layers
from . import linears as _linears
from . import noise as _noise
from . import norms as _norms
from . import olmo as _olmo
from . import ple as _ple
from . import replay as _replay
from . import steps as _steps
from .bailing import clear_linear_attention_cache_for_new_sequences as clear_linear_attention_cache_for_new_sequences
from .bailing import linear_attention_prefill_and_mix as linear_attention_prefill_and_mix
from .delta import chunk_gated_delta_rule as chunk_gated_delta_rule
from .delta import chunk_kda as chunk_kda
from .delta import chunk_kda_with_fused_gate as chunk_kda_with_fused_gate
from .delta import chunk_kda_with_safe_gate as chunk_kda_with_safe_gate
from .delta import fi_chunk_gated_delta_rule as fi_chunk_gated_delta_rule
from .delta_steps import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from .delta_steps import fused_recurrent_gated_delta_rule_packed_decode as fused_recurrent_gated_delta_rule_packed_decode
from .delta_steps import fused_sigmoid_gating_delta_rule_update as fused_sigmoid_gating_delta_rule_update
from .flashkda import flashkda_prefill as flashkda_prefill
from .flashkda import glm_flashkda_prefill as glm_flashkda_prefill
from .flashkda import kda_prefill_checkpoint_alignment as kda_prefill_checkpoint_alignment
from .gdn import forward_core as forward_core
from .gdn import forward_decode as forward_decode
from .kda_prompts import bailing_v3_forward as bailing_v3_forward
from .kda_prompts import glm_forward as glm_forward
from .kda_prompts import kimi_k3_forward as kimi_k3_forward
from .kda_prompts import kimi_linear_forward as kimi_linear_forward
from .layers import fused_kda_decode as fused_kda_decode
from .layers import short_conv as short_conv
from .linears import embedding_apply as embedding_apply
from .linears import linear_apply as linear_apply
from .mamba import mamba_chunk_scan_combined_varlen as mamba_chunk_scan_combined_varlen
from .mamba import selective_scan_fn as selective_scan_fn
from .merging import merge_attn_states as merge_attn_states
from .norms import layer_norm_fwd as layer_norm_fwd
from .norms import mixer2_rms_norm_gated as mixer2_rms_norm_gated
from .norms import native_fused_rms_norm as native_fused_rms_norm
from .norms import native_mixer2_norm as native_mixer2_norm
from .norms import native_rms_norm as native_rms_norm
from .norms import rms_norm_gated as rms_norm_gated
from .olmo import olmo_forward_core as olmo_forward_core
from .ple import ple_conv as ple_conv
from .replay import selective_state_update_replayssm_flashinfer as selective_state_update_replayssm_flashinfer
from .replay import selective_state_update_replayssm_output_only as selective_state_update_replayssm_output_only
from .steps import bailing_linear_attention_decode_spec as bailing_linear_attention_decode_spec
from .steps import fused_gdn_decode_post_conv_mtp as fused_gdn_decode_post_conv_mtp
from .steps import fused_recurrent_kda as fused_recurrent_kda
from .steps import fused_recurrent_kda_fwd as fused_recurrent_kda_fwd
from .steps import fused_recurrent_kda_packed_decode as fused_recurrent_kda_packed_decode
from .steps import fused_recurrent_kda_with_fused_gate as fused_recurrent_kda_with_fused_gate
from .steps import fused_recurrent_kda_with_safe_gate as fused_recurrent_kda_with_safe_gate

_BY_TOKEN = "[N] or [N, T]"


def _columns(index: Tensor) -> Tensor:
    """An index with a column per token."""
    return index if index.dim() == 2 else index[:, None]


@_takes(
    "enable_stochastic_rounding",
    x="[tokens, dim] or [tokens, H, P]",
    state_batch_indices=_BY_TOKEN,
    dst_state_batch_indices=_BY_TOKEN,
    num_accepted_tokens="[N]",
    cu_seqlens="[N + 1]",
)
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    null_block_id: int = 0,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_blackwell: bool = False,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> None:
    """Decode steps of Mamba-1 or Mamba-2, per token: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z).

    Sequences have one token each, or with cu_seqlens [N + 1] they are packed. Mamba-1 has dim channels instead of [H, P].

    state: [slots, H, P, N] or [slots, dim, N], updated in place
    x, z, out: [tokens, H, P] or [tokens, dim]; z None for no gate; out is needed, and written          dt: like x, or [tokens, H]
    A: [H, P, N] or [dim, N], negative; or [H]          B, C: [tokens, G, N] or [tokens, N]
    D, dt_bias: [H, P] or [dim], or [H]; None for none          dt_softplus: dt <- log(1 + e^(dt + dt_bias))
    state_batch_indices: [sequences], or [sequences, T], whose first column is read. dst_state_batch_indices: slots to write; None for in
        place

    Every floating tensor is f32, f16 or bf16, each with its own dtype. Slots equal to null_block_id, negative or out of the pool are
    padding.

    Returns None. Unlike in vLLM, padding always gets a zero output. Raises ArgumentError (a ValueError) if out is None, and for operands
    that do not fit.

    Rare arguments:
    num_accepted_tokens: [sequences]: the column to read is this less one (0 is like 1), and each token's state goes to its own column
    enable_stochastic_rounding: rounds f16 and bf16 states with noise of cache_philox_rounds rounds (0 is 10), not in speculative steps.
        SSMGEN_ENGINE_NOISE asks for noise in both
    is_blackwell: ignored
    """
    if out is None:
        raise ArgumentError("vllm's selective_state_update", ["out is None; expected a tensor, since nothing is returned. Pass out."])
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    read, write = state_batch_indices, None if dst_state_batch_indices is state_batch_indices else dst_state_batch_indices
    asked = enable_stochastic_rounding and num_accepted_tokens is None
    if num_accepted_tokens is not None and read is not None:
        read = _columns(_first(read, sequences))
        write = read if write is None else _columns(_first(write, sequences))
        write = write[:, :1] if cu_seqlens is None else write
        num_accepted_tokens = _first(num_accepted_tokens, sequences).clamp(min=1)
    else:
        read, write = gated_delta.first_column(read, sequences), gated_delta.first_column(write, sequences)
    _ssu(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_indices=read, dst_state_indices=write,
        num_accepted_tokens=num_accepted_tokens, cu_seqlens=cu_seqlens, pad_slot_id=_pad(null_block_id), out=out,
        **_noise_of(state, "mamba", asked=asked, philox_rounds=cache_philox_rounds),
    )  # fmt: skip


@_takes(
    x="[N, dim] or [N, dim, T]",
    conv_state="[slots, dim, state_len]",
    weight="[dim, width]",
    conv_state_indices=_BY_TOKEN,
    num_accepted_tokens="[N]",
    query_start_loc="[N + 1]",
)
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Decode steps of a causal convolution, per token: out = act(bias + sum_j weight[:, j] window[:, j]), over its last width inputs.

    x, out: [batch, dim] or [batch, dim, T], or with query_start_loc [tokens, dim], packed; out None for x, which is then overwritten
    conv_state: [slots, dim, width - 1 or more] of x's dtype, updated in place; the first width - 1 entries are the history
    weight: [dim, width], width 2 … 8          bias: [dim]; None for none          activation: None, "silu", "swish", or a bool for "silu"
    conv_state_indices: [batch], or [batch, T], whose first column is read          query_start_loc: [batch + 1], start of each sequence

    Returns out, or x. Unlike in vLLM, widths are 2 … 8, and padding, which also means slots out of the pool, gets a zero output and touches
    no state. Slots equal to null_block_id and negative slots are padding.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Rare arguments:
    num_accepted_tokens: [batch], tokens of the last call that were accepted: the history then begins at entry num_accepted_tokens - 1
    max_query_len, validate_data: ignored; ssmgen always checks
    """
    if conv_state_indices is not None and conv_state_indices.dim() == 2:
        conv_state_indices = gated_delta.first_column(conv_state_indices, conv_state_indices.shape[0])
    if query_start_loc is None:
        sequences = x.shape[0]
        conv_state_indices = _first(conv_state_indices, sequences)
    else:
        sequences = query_start_loc.shape[0] - 1 if conv_state_indices is None else conv_state_indices.shape[0]
    if num_accepted_tokens is None:
        conv_state = conv_state[..., : weight.shape[1] - 1]
    return _conv_update(
        x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices,
        num_accepted_tokens=_first(num_accepted_tokens, sequences), query_start_loc=_first(query_start_loc, sequences + 1),
        pad_slot_id=_pad(null_block_id), out=x if out is None else out,
    )  # fmt: skip


@_takes(
    weight="[dim, width]", conv_states="[slots, dim, state_len]", query_start_loc="[N + 1]", cache_indices="[N]", has_initial_state="[N]"
)
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """A causal convolution per channel of packed sequences: out[d, t] = act(bias[d] + sum_j weight[d, j] x[d, t - (width - 1) + j]).

    x: [dim, tokens]          weight: [dim, width], width 1 … 8          bias: [dim] or None          activation: None, "silu" or "swish"
    conv_states: [slots, dim, width - 1 or more] of x's dtype; the first width - 1 entries receive each sequence's last inputs
    query_start_loc: [N + 1], start of each sequence          cache_indices: [N], slot of each; None for slot = sequence
    has_initial_state: [N] bool, whether conv_states holds the inputs before the first token; None for no

    Returns a new tensor laid out like x. Unlike in vLLM, x's strides are free, and slots equal to null_block_id, negative or out of the
    pool are
    padding: a zero output.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    pad_slot_id, metadata, validate_data: they divide vLLM's work, or check what ssmgen always checks
    """
    sequences = query_start_loc.shape[0] - 1
    found = _conv(
        x, weight, bias, activation=activation, query_start_loc=query_start_loc, conv_states=conv_states[..., : weight.shape[1] - 1],
        conv_state_indices=_first(cache_indices, sequences), has_initial_state=_first(has_initial_state, sequences),
        pad_slot_id=_pad(null_block_id),
    )  # fmt: skip
    return _one(found)


def _pad(null_block_id: int | None) -> int:
    return -1 if null_block_id is None else null_block_id


_OPS = "vllm.model_executor.layers.mamba.ops"
_LIGHTNING = "vllm.model_executor.layers.lightning_attn"
_ENGINE: replacing.Engine = replacing.Engine(
    "vllm", "0.33.0",
    [
        replacing.Replacement(f"{_OPS}.mamba_ssm", "selective_state_update", selective_state_update, impossible=_noise.impossible),
        replacing.Replacement(f"{_OPS}.mamba_ssm", "selective_scan_fn", selective_scan_fn),
        replacing.Replacement(f"{_OPS}.ssd_combined", "mamba_chunk_scan_combined_varlen", mamba_chunk_scan_combined_varlen),
        replacing.Replacement(f"{_OPS}.causal_conv1d", "causal_conv1d_update", causal_conv1d_update),
        replacing.Replacement(f"{_OPS}.causal_conv1d", "causal_conv1d_fn", causal_conv1d_fn),
        *_bailing.REPLACEMENTS,
        *_delta.REPLACEMENTS,
        *_delta_steps.REPLACEMENTS,
        *_flashkda.REPLACEMENTS,
        *_gdn.REPLACEMENTS,
        *_kda_prompts.REPLACEMENTS,
        *_olmo.REPLACEMENTS,
        *_ple.REPLACEMENTS,
        *_layers.REPLACEMENTS,
        *_linears.replacements(lambda: _ENGINE),
        *_steps.REPLACEMENTS,
        *_norms.REPLACEMENTS,
        *_replay.REPLACEMENTS,
        replacing.Replacement(_LIGHTNING, "lightning_attention", lightning_attention),
        replacing.Replacement(_LIGHTNING, "linear_decode_forward_triton", linear_decode_forward_triton),
        replacing.Replacement("vllm.v1.attention.ops.merge_attn_states", "merge_attn_states", merge_attn_states),
        *_invariance.replacements(lambda: _ENGINE),
        *_noise.replacements(lambda: _ENGINE),
    ],
    strict=_invariance.on,
)  # fmt: skip


def register() -> dict[str, str]:
    """vLLM's plugin (entry point vllm.general_plugins): replaces its functions with this module's, in this process.

    Returns what became of each, {place: words}; {} where vLLM is not installed, or torch has no CUDA. A function of other parameters than
    in vLLM 0.33 is left as it is, as is one that the variable SSMGEN_ENGINE_KEEP names. Calls that ssmgen refuses go to vLLM's own.
    Raises ArgumentError if the variable names something else.
    """
    return _ENGINE.register()


def unregister() -> None:
    """Gives every name its function of vLLM's back."""
    _ENGINE.unregister()
