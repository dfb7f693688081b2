"""SGLang's rings of delta rules, as in SGLang 0.5.23: of decode steps (--enable-linear-replayssm), and of KDA's drafts
(--enable-linear-replayssm-spec), with the commit of the accepted ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...errors import ArgumentError, UnsupportedError
from ...families.linear_attention.call import Ring, gated_delta_rule, kda, kda_commit
from ..shared import gated_delta
from ..shared.gated_delta import first as _first
from ..shared.gated_delta import of_one_type as _of_one_type
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement


def ring_of(
    name: str, asked: bool, v: Tensor | None, k: Tensor | None, g: Tensor | None, beta: Tensor | None, kept: Tensor | None
) -> dict[str, Any]:
    """The arguments for a ring that receives a call's keys and values, log decays and step sizes: [slots, heads, tokens, …] each.

    kept: the buffer for the states after each token, which SGLang does not have beside a ring. Raises ArgumentError if tensors are missing.
    """
    if not asked:
        return {}
    given = {"replayssm_rawv": v, "replayssm_rawk": k, "replayssm_g": g, "replayssm_beta": beta}
    problems = [f"{n} is None with cache_ring=True; expected a tensor" for n, t in given.items() if t is None]
    problems += [
        f"{n} is {list(t.shape)}; expected [slots, heads, tokens, …] of one layer"
        for n, t in given.items()
        if t is not None and t.dim() < 3
    ]
    if kept is not None:
        problems.append("intermediate_states_buffer is given with cache_ring=True; expected one of them. Leave out one.")
    if problems:
        raise ArgumentError(name, problems)
    assert k is not None and v is not None and g is not None and beta is not None  # looked at before
    return {"ring": Ring(*(t.transpose(1, 2) for t in (k, v, g, beta))), "ring_ready": True}


@_takes(
    "use_qk_l2norm_in_kernel", checkpoint_state="[layers, slots, HV, V, K]", rawv_cache="[layers, slots, HV, L, V]",
    rawk_cache="[layers, slots, H, L, K]", gk_cache="[layers, slots, HV, L, K]", beta_cache="[layers, slots, HV, L]",
    ssm_state_indices="[B]", accept_lens="[B]", mamba_track_indices="[B]", mamba_steps_to_track="[B]",
)  # fmt: skip
def commit_kda_replayssm_spec_all_layers(
    checkpoint_state: Tensor,
    rawv_cache: Tensor,
    rawk_cache: Tensor,
    gk_cache: Tensor,
    beta_cache: Tensor,
    ssm_state_indices: Tensor,
    accept_lens: Tensor,
    max_cache_len: int,
    num_k_heads: int,
    mamba_track_indices: Tensor | None = None,
    mamba_steps_to_track: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    null_block_id: int = 0,
) -> None:
    """Replays the accepted drafts of all layers of KDA, in one launch: S <- S D + beta (v - S D k) k^T, with D = diag(e^g).

    checkpoint_state: [layers, slots, HV, V, K], updated in place
    rawk_cache, rawv_cache: [layers, slots, H, L, K] and [layers, slots, HV, L, V], keys and values before their norm
    gk_cache, beta_cache: [layers, slots, HV, L, K] and [layers, slots, HV, L] f32, log decays and step sizes
    ssm_state_indices: [B], slots; null_block_id and negative ones are padding          accept_lens: [B], tokens to replay, at most L
    use_qk_l2norm_in_kernel: k is first divided by sqrt(|k|^2 + 1e-6)

    For the prefix cache:
    mamba_track_indices: [B], a second slot, which receives the state after token mamba_steps_to_track [B], counted from 0, in one more
        launch; a number below 0, or of a token that is not accepted, leaves the slot as it is

    max_cache_len and num_k_heads are ignored: they follow from shapes. Returns None.
    Raises UnsupportedError for a null_block_id above 0, and ArgumentError (a ValueError) for operands that do not fit.
    """
    name = "sglang's commit_kda_replayssm_spec_all_layers"
    if null_block_id > 0:
        raise UnsupportedError(name, [f"null_block_id is {null_block_id}; expected 0 or less: slots up to it would be padding"])
    ring = Ring(*(t.transpose(2, 3) if t.dim() > 3 else t for t in (rawk_cache, rawv_cache, gk_cache, beta_cache)))
    tokens = accept_lens.shape[0]
    slots, track = _of_one_type(_first(ssm_state_indices, tokens), _first(mamba_track_indices, tokens))
    how: dict[str, Any] = {"ring": ring, "state_indices": slots, "use_qk_l2norm": use_qk_l2norm_in_kernel, "pad_slot_id": null_block_id}
    calls = [how | {"num_accepted_tokens": accept_lens}]
    if track is not None and mamba_steps_to_track is not None:
        steps = _first(mamba_steps_to_track, tokens)
        counts = torch.where(steps < accept_lens, steps + 1, torch.zeros_like(steps))
        calls.insert(0, how | {"num_accepted_tokens": counts, "dst_state_indices": track})
    for launch in [call_of(kda_commit, checkpoint_state, **call).plan() for call in calls]:  # the objections to all come first
        launch()


@_takes(
    "use_qk_l2norm_in_kernel is_kda", mixed_qkv="[B, channels]", b="[B, HV]", initial_state="[slots, HV, V, K]",
    d_cache="[slots, HV, L, V]", k_cache="[slots, H, L, K]", out="[B, 1, HV, V]", ssm_state_indices="[B]", write_pos="[B]",
    force_flush="[B]",
)  # fmt: skip
def fused_recurrent_linear_replayssm_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    block_v: int | None = None,
    num_warps: int = 1,
    num_stages: int = 3,
    nk: int = 2,
) -> tuple[Tensor, Tensor]:
    """A decode step of Gated DeltaNet or KDA whose state is read through a ring of the tokens that it lacks, and written once in L steps.

    S <- S D + beta (v - S D k) k^T;  out = scale S q, with D = e^g, for KDA diag(e^g)
    g = -e^A_log softplus(a + dt_bias), and beta = sigmoid(b)

    mixed_qkv: [B, 2 H K + HV V], q, k and v consecutive          a, dt_bias: [B, HV] and [HV], for KDA [B, HV, K] and [HV, K]
    b: [B, HV]          A_log: [HV]          out: [B, 1, HV, V], is written
    initial_state: [slots, HV, V, K], read; written if write_pos is L - 1, or force_flush [B] is not 0
    d_cache, k_cache: [slots, HV, L, V] and [slots, H, L, K], of one dtype: errors beta (v - S D k), and keys after the norm
    g_cache: [slots, HV, L], for KDA [slots, HV, L, K], f32 log decays
    write_pos: [B]: how many tokens of the ring the state lacks; the step's token goes to the next place, if it does not write the state
    ssm_state_indices: [B], slots          use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)

    Returns (out, initial_state). Padding also includes numbers of write_pos out of range. The sigmoid of b is not rounded to its dtype,
    and products with the ring are f32; SGLang's are of out's dtype.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    block_v, num_warps, num_stages, nk: they choose SGLang's kernel
    """
    name = "fused_recurrent_linear_replayssm_decode"
    q, k, v = gated_delta.unpacked(name, mixed_qkv, initial_state)
    count = v.shape[0]
    function = kda if is_kda else gated_delta_rule
    ring = Ring(k_cache.transpose(1, 2), d_cache.transpose(1, 2), g_cache.transpose(1, 2))
    function(
        initial_state, q, k, v, a, b, A_log, dt_bias, use_qk_l2norm=use_qk_l2norm_in_kernel, beta_sigmoid=True, scale=scale,
        state_indices=_first(ssm_state_indices, count), ring=ring, ring_position=_first(write_pos, count),
        ring_flush=_first(force_flush, count), out=gated_delta.of_one_token(name, out),
    )  # fmt: skip
    return out, initial_state


REPLACEMENTS = [
    Replacement(
        "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm", "fused_recurrent_linear_replayssm_decode",
        fused_recurrent_linear_replayssm_decode,
    ),
    Replacement(
        "sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode", "commit_kda_replayssm_spec_all_layers",
        commit_kda_replayssm_spec_all_layers,
    ),
]  # fmt: skip
