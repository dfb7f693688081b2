"""Functions of SGLang 0.5.23 for Mamba, convolutions, delta rules, Lightning attention, gated norms and merged attention, and its plugin.

Slots equal to pad_slot_id (-1), negative or out of the pool are padding: a zero output, and no state is touched; SGLang leaves some outputs
unchanged, or starts from zeros. Index tensors may have extra rows. UnsupportedError names arguments that no kernel serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...families.causal_conv1d.call import causal_conv1d as _conv
from ...families.causal_conv1d_update.call import causal_conv1d_update as _conv_update
from ...families.selective_state_update.call import selective_state_update as _ssu
from ..shared import gated_delta, replacing
from ..shared.draft_trees import kept_of_drafts as _kept_of_drafts
from ..shared.gated_delta import first as _first
from ..shared.lightning import lightning_attention as lightning_attention
from ..shared.lightning import linear_decode_forward_triton as linear_decode_forward_triton
from ..shared.noise import of as _noise_of
from ..shared.operands import one as _one
from ..shared.operands import takes as _takes
from . import delta as _delta
from . import gdn_layers as _gdn_layers
from . import invariance as _invariance
from . import layers as _layers
from . import linears as _linears
from . import mamba as _mamba
from . import noise as _noise
from . import ple as _ple
from . import rings as _rings
from . import steps as _steps
from . import updates as _updates
from .delta import chunk_gated_delta_rule as chunk_gated_delta_rule
from .delta import chunk_kda as chunk_kda
from .delta import flashinfer_gdn_prefill_default as flashinfer_gdn_prefill_default
from .delta import fused_qkv_split_gdn_prefill as fused_qkv_split_gdn_prefill
from .gdn_layers import qwen3_next_forward as qwen3_next_forward
from .gdn_layers import qwen35_forward as qwen35_forward
from .layers import fused_lfm_short_conv_decode as fused_lfm_short_conv_decode
from .layers import fused_lfm_short_conv_prefill as fused_lfm_short_conv_prefill
from .layers import kda_fused_decode as kda_fused_decode
from .layers import lfm2_forward as lfm2_forward
from .lightning import seg_la_fwd as seg_la_fwd
from .linears import compute_lm_head as compute_lm_head
from .linears import linear_apply as linear_apply
from .mamba import mamba1_prompts as mamba1_prompts
from .mamba import mamba_chunk_scan_combined as mamba_chunk_scan_combined
from .ple import fused_qwen4_verify_conv as fused_qwen4_verify_conv
from .ple import ple_short_conv as ple_short_conv
from .rings import commit_kda_replayssm_spec_all_layers as commit_kda_replayssm_spec_all_layers
from .rings import fused_recurrent_linear_replayssm_decode as fused_recurrent_linear_replayssm_decode
from .steps import causal_conv1d_fn_triton as causal_conv1d_fn_triton
from .steps import fused_recurrent_kda_packed_decode as fused_recurrent_kda_packed_decode
from .steps import merge_state as merge_state
from .steps import merge_state_v2 as merge_state_v2
from .steps import mixer2_rms_norm_gated as mixer2_rms_norm_gated
from .steps import rms_norm_gated as rms_norm_gated
from .updates import fused_recurrent_gated_delta_rule_update as fused_recurrent_gated_delta_rule_update


@_takes(
    "disable_state_update enable_stochastic_rounding", x="[batch, dim] or [batch, H, P] or [batch, T, H, P]",
    state_batch_indices="[batch]", intermediate_state_indices="[batch]", retrieve_parent_token="[batch, T]",
)  # fmt: skip
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> None:
    """Decode steps of Mamba-1 or Mamba-2, per token: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z).

    state: [slots, H, P, N] or [slots, dim, N], updated in place          x, z, out: [batch, H, P], [batch, T, H, P] or [batch, dim]
    dt: like x, or without P          A: [H, P, N], [dim, N] or [H]          B, C: [batch, G, N], [batch, T, G, N] or [batch, N]
    D, dt_bias: [H, P], [dim], [H], None          dt_softplus: dt <- log(1 + e^(dt + dt_bias))          state_batch_indices: [batch], slots
    Returns None: out is needed, and written. f32, f16 or bf16 each. Raises ArgumentError if out is missing or operands do not fit.

    Rare arguments:
    disable_state_update: the pool is only read          retrieve_parent_token: [batch, T], a draft tree
    intermediate_states_buffer: [rows, cache_steps, H, P, N], the state after each token, by intermediate_state_indices [batch] or else slot
    enable_stochastic_rounding: rounds an f16 state with noise of cache_philox_rounds rounds (0 is 10); ArgumentError for other states
    """
    name = "sglang's selective_state_update"
    problems = ["out is None; expected a tensor, since nothing is returned. Pass out."] if out is None else []
    kept = intermediate_states_buffer
    if kept is not None and kept.dim() == 5 and cache_steps != kept.shape[1]:
        problems.append(
            f"cache_steps is {cache_steps} and intermediate_states_buffer {list(kept.shape)}; expected that many steps in its second axis"
        )
    if enable_stochastic_rounding and state.dtype != torch.float16:
        problems.append(f"state is {state.dtype} with enable_stochastic_rounding=True; expected float16".replace("torch.", ""))
    if problems:
        raise ArgumentError(name, problems)
    batch = x.shape[0]
    slots = _first(state_batch_indices, batch)
    if kept is None and x.dim() == 3 and x.shape[2] == 1 and B.dim() == 3 and B.shape[1] == 1:
        state, x, dt, A, B, C, D, z, dt_bias, out = _mamba.one_head(state, x, dt, A, B, C, D, z, dt_bias, out)
    rows = None if kept is None else slots if intermediate_state_indices is None else _first(intermediate_state_indices, batch)
    writes = not disable_state_update
    asked: Any = {"asked": enable_stochastic_rounding and writes, "philox_rounds": cache_philox_rounds}
    noisy = _noise_of(state, "mamba", **asked, written=writes or _alike(kept, state))
    _ssu(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_indices=slots, parents=_first(retrieve_parent_token, batch),
        intermediate_states=kept, intermediate_state_indices=rows, update_state=not disable_state_update, pad_slot_id=pad_slot_id,
        out=out, **noisy,
    )  # fmt: skip


def _alike(kept: Tensor | None, state: Tensor) -> bool:
    return kept is not None and kept.dtype == state.dtype


@_takes(x="[batch, dim] or [batch, dim, T]", cache_seqlens="[batch]", conv_state_indices="[batch]")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """Decode steps of a causal convolution, per token: x <- act(bias + sum_j weight[:, j] window[:, j]), over its last width inputs.

    x: [batch, dim] or [batch, dim, T], overwritten          weight: [dim, width], width 2 … 8          bias: [dim]; None for none
    conv_state: [slots, dim, width - 1 or more] of x's dtype, updated in place; the last width - 1 entries are the history
    conv_state_indices: [batch], slots          cache_seqlens: [batch], inputs so far, for a ring          activation: None, "silu"
    Returns x. The function of sglang.srt.layers.attention.mamba. Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    batch = x.shape[0]
    return _conv_update(
        x, conv_state, weight, bias, activation, cache_seqlens=_first(cache_seqlens, batch),
        conv_state_indices=_first(conv_state_indices, batch), pad_slot_id=pad_slot_id, out=x,
    )  # fmt: skip


@_takes(
    x="[batch, dim] or [batch, dim, T]",
    conv_state="[slots, dim, state_len]",
    weight="[dim, width]",
    conv_state_indices="[batch]",
    num_accept_tokens="[batch]",
    intermediate_state_indices="[batch]",
    retrieve_next_token="[batch, T]",
    retrieve_next_sibling="[batch, T]",
    retrieve_parent_token="[batch, T]",
)
def causal_conv1d_update_triton(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Decode steps of a causal convolution, per token: out = act(bias + sum_j weight[:, j] window[:, j]), over its last width inputs.

    x: [batch, dim(, T)]          weight: [dim, width], width 2 … 8          bias: [dim] or None          activation: None, "silu"
    conv_state: [slots, dim, width - 1 or more] of x's dtype, updated in place; the first width - 1 entries are the history
    conv_state_indices: [batch], slots          num_accept_tokens: [batch]: the history begins at entry num_accept_tokens - 1
    Returns a new tensor. Raises UnsupportedError for cache_seqlens, and ArgumentError. metadata and validate_data are ignored.

    Draft trees:
    retrieve_next_token, retrieve_next_sibling: [batch, T], first child and next sibling, or -1; retrieve_parent_token receives the parents
    intermediate_conv_window: [rows, T or more, dim, width - 1], the history after each token, by intermediate_state_indices
    """
    if cache_seqlens is not None:
        reason = "cache_seqlens is given, a ring buffer; expected None"
        raise UnsupportedError("sglang's causal_conv1d_update", [reason])
    batch, tree = x.shape[0], retrieve_next_token is not None
    if num_accept_tokens is None:
        conv_state = conv_state[..., : weight.shape[1] - 1]
    rows = None if intermediate_conv_window is None else _first(intermediate_state_indices, batch)
    return _conv_update(
        x, conv_state, weight, bias, activation, conv_state_indices=_first(conv_state_indices, batch),
        num_accepted_tokens=_first(num_accept_tokens, batch), intermediate_conv_window=intermediate_conv_window,
        intermediate_state_indices=rows, pad_slot_id=pad_slot_id,
        first_children=_first(retrieve_next_token, batch) if tree else None,
        next_siblings=_first(retrieve_next_sibling, batch) if tree else None,
        parents_out=_first(retrieve_parent_token, batch) if tree else None,
    )  # fmt: skip


_WORK = ("seq_lens_cpu", "block_table")  # which sequence, and which of its blocks, each of SGLang's programs takes


@_takes(
    x="[dim, tokens] or [batch, dim, length]", weight="[dim, width]", conv_states="[slots, dim, state_len]",
    query_start_loc="[batch + 1]", cache_indices="[batch]", has_initial_state="[batch]",
)  # fmt: skip
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    **kwargs: Any,
) -> Tensor:
    """A causal convolution per channel, with act SiLU or none: out[:, t] = act(bias + sum_j weight[:, j] x[:, t - (width - 1) + j]).

    x: [dim, tokens] with query_start_loc [N + 1], or [batch, dim, length]          weight: [dim, width]          bias: [dim]; None for none
    conv_states: [slots, dim, width - 1 or more], in place          cache_indices: [N], slots          has_initial_state: [N] bool
    Returns a new tensor, never x itself. seq_lens_cpu and block_table are ignored. Raises UnsupportedError for other keywords that are not
    None, and ArgumentError (a ValueError) for operands that do not fit.
    """
    if others := sorted(name for name, value in kwargs.items() if name not in _WORK and value is not None):
        raise UnsupportedError(
            "sglang's causal_conv1d_fn", [f"ssmgen does not know {name}, and ignores no argument. Leave it out." for name in others]
        )
    if conv_states is not None:
        conv_states = conv_states[..., : weight.shape[1] - 1]
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    found = _conv(
        x, weight, bias, activation=activation, query_start_loc=query_start_loc, conv_states=conv_states,
        conv_state_indices=_first(cache_indices, sequences), has_initial_state=_first(has_initial_state, sequences),
        pad_slot_id=pad_slot_id,
    )  # fmt: skip
    return _one(found)


@_takes(**gated_delta.PACKED)
def fused_recurrent_gated_delta_rule_packed_decode(
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
) -> tuple[Tensor, Tensor]:
    """One token of Gated DeltaNet: S <- e^g S + beta (v - e^g S k) k^T;  out = scale S q, g = -e^A_log softplus(a + dt_bias).

    mixed_qkv: [B, 2 HK K + HV V], q, k and v consecutive          a, b: [B, HV], raw gate, logit of beta          A_log, dt_bias: [HV]
    initial_state: [slots, HV, V, K], updated in place          out: [B, 1, HV, V], written          ssm_state_indices: [B]
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)
    Returns (out, initial_state). Unlike in SGLang, beta stays f32. Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    return gated_delta.packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel, pad_slot_id=-1
    )  # fmt: skip


@_takes(
    "is_kda disable_state_update cache_ring match_cutedsl_decode", **gated_delta.LOGITS, initial_state_indices="[N]", cu_seqlens="[N + 1]",
    intermediate_state_indices="[N]",
    intermediate_states_buffer="[rows, cache_steps, HV, V, K]", retrieve_parent_token="[N, T]",
)  # fmt: skip
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """Steps of Gated DeltaNet, or with is_kda KDA: S <- S D + beta (v - S D k) k^T;  o = scale S q, with D = e^g or diag(e^g).

    g = -e^A_log softplus(a + dt_bias), or for KDA with lower_bound lower_bound sigmoid(e^A_log (a + dt_bias)); beta = sigmoid(b).
    q, k: [B, T, HK, K]          v: [B, T, HV, V]          a, b: [B, T, HV] or [tokens, HV]; a of KDA: also per key channel, K
    initial_state_source: [slots, HV, V, K], updated in place          initial_state_indices: [N], slots          cu_seqlens: [N + 1]
    disable_state_update: the pool is only read          use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6)
    Returns a new output [B, T, HV, V] of q's dtype. Raises UnsupportedError for match_cutedsl_decode, no pool, lower_bound without
    is_kda, and for a softplus with beta other than 1 or threshold other than 20; ArgumentError (a ValueError) for operands that do not fit.

    Drafts:
    intermediate_states_buffer: [rows, cache_steps, HV, V, K], receives the state after each token, in row intermediate_state_indices [N]
    retrieve_parent_token: [N, T or more], a draft tree, whose tokens continue from that buffer; ignored without it, as in SGLang
    cache_ring: replayssm_rawk, _rawv, _g, _beta [slots, heads, L, …] receive k, v and, in f32, log decays and betas of the first L tokens
    """
    name = "sglang's fused_sigmoid_gating_delta_rule_update"
    pairs = {
        "match_cutedsl_decode is True; expected False: it asks for the rounding of another kernel": match_cutedsl_decode,
        "initial_state_source is None; expected a pool of states": initial_state_source is None,
        "lower_bound is given; expected None: only KDA's gate has one": lower_bound is not None and not is_kda,
        f"softplus_beta is {softplus_beta} and softplus_threshold {softplus_threshold}; expected 1 and 20": (
            (softplus_beta, softplus_threshold) != (1.0, 20.0)
        ),
    }
    if reasons := [reason for reason, present in pairs.items() if present]:
        raise UnsupportedError(name, reasons)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kept = _kept_of_drafts(name, intermediate_states_buffer, cache_steps, intermediate_state_indices, retrieve_parent_token, v, cu_seqlens)
    kept |= _rings.ring_of(name, cache_ring, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta, intermediate_states_buffer)
    return gated_delta.from_logits(
        initial_state_source, q, k, v, a, b, A_log, dt_bias, is_kda, lower_bound, use_qk_l2norm=use_qk_l2norm_in_kernel, scale=scale,
        state_indices=_first(initial_state_indices, sequences), cu_seqlens=cu_seqlens, update_state=not disable_state_update, **kept,
    )  # fmt: skip


_MAMBA, _ATTENTION = "sglang.kernels.ops.mamba", "sglang.kernels.ops.attention"
_LAYERS = "sglang.srt.layers.attention"
_ENGINE: replacing.Engine = replacing.Engine(
    "sglang", "0.5.23",
    [
        replacing.Replacement(
            f"{_MAMBA}.triton_ops.mamba_ssm", "selective_state_update", selective_state_update, impossible=_noise.impossible
        ),
        replacing.Replacement(f"{_MAMBA}.triton_ops.ssd_combined", "mamba_chunk_scan_combined", mamba_chunk_scan_combined),
        *_mamba.REPLACEMENTS,
        replacing.Replacement(f"{_MAMBA}.causal_conv1d_triton", "causal_conv1d_update", causal_conv1d_update_triton),
        replacing.Replacement(f"{_LAYERS}.mamba.causal_conv1d", "causal_conv1d_update", causal_conv1d_update),
        replacing.Replacement(f"{_LAYERS}.mamba.causal_conv1d", "causal_conv1d_fn", causal_conv1d_fn),
        replacing.Replacement(
            f"{_ATTENTION}.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode",
            fused_recurrent_gated_delta_rule_packed_decode,
        ),
        replacing.Replacement(
            f"{_ATTENTION}.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update",
            fused_sigmoid_gating_delta_rule_update,
        ),
        *_delta.REPLACEMENTS,
        *_gdn_layers.REPLACEMENTS,
        *_layers.REPLACEMENTS,
        *_linears.replacements(lambda: _ENGINE),
        *_ple.REPLACEMENTS,
        *_rings.REPLACEMENTS,
        *_steps.REPLACEMENTS,
        *_updates.REPLACEMENTS,
        replacing.Replacement(f"{_ATTENTION}.linear.lightning_attn", "lightning_attention", lightning_attention),
        replacing.Replacement(f"{_ATTENTION}.linear.lightning_attn", "linear_decode_forward_triton", linear_decode_forward_triton),
        replacing.Replacement(f"{_ATTENTION}.linear.seg_la", "seg_la_fwd", seg_la_fwd),
        *_invariance.replacements(lambda: _ENGINE),
        *_noise.replacements(lambda: _ENGINE),
    ],
    strict=_invariance.on,
)  # fmt: skip


def register() -> dict[str, str]:
    """SGLang's plugin (entry point sglang.srt.plugins): replaces its functions with this module's, in this process.

    Returns {place: what became of it}; {} without SGLang or CUDA. Functions of other parameters than in SGLang 0.5.23, and functions that
    SSMGEN_ENGINE_KEEP names, stay. Calls that ssmgen refuses go to SGLang's own. Raises ArgumentError if the variable names something else.
    """
    return _ENGINE.register()


def unregister() -> None:
    """Gives every name its function of SGLang's back."""
    _ENGINE.unregister()
