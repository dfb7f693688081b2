"""vLLM's functions for decode steps of gated delta rules, as in vLLM 0.33."""

from __future__ import annotations

from torch import Tensor

from ...errors import UnsupportedError
from ...families.linear_attention.call import gated_delta_rule as _gated_delta_rule
from ..shared import gated_delta, noise
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement


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
    """One token per sequence of Gated DeltaNet: S <- e^g S + beta (v - e^g S k) k^T;  out = scale S q.

    g = -e^A_log softplus(a + dt_bias), and beta = sigmoid(b).

    mixed_qkv: [B, 2 HK K + HV V], q, k and v consecutive          a, b: [B, HV], raw gate, and logit of beta          A_log, dt_bias: [HV]
    initial_state: [slots, HV, V, K], updated in place          out: [B, 1, HV, V], written          ssm_state_indices: [B]
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)

    Returns (out, initial_state). Slots of 0 and below, and slots out of the pool, are padding: a zero output, and no state is touched.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    return gated_delta.packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel, pad_slot_id=0
    )  # fmt: skip


@_takes("inplace_final_state", q="[B, T, HK, K]", v="[B, T, HV, V]", **gated_delta.POOL)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Steps of Gated DeltaNet on a pool, per token: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, HK, K]          v: [B, T, HV, V]          g, beta: [B, T, HV], log decay and write strength; beta None for 1
    initial_state: [slots, HV, V, K], updated in place          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    ssm_state_indices: [N] for one token per sequence, or [N, T]: each token's state goes to its own column, and the first is read
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    num_accepted_tokens: [N]: the column that is read is this less one, instead of the first

    Returns (a new output of q's dtype, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output.
    Raises UnsupportedError without a pool and indices, or with inplace_final_state=False; and ArgumentError (a ValueError).
    """
    name = "vllm's fused_recurrent_gated_delta_rule"
    options = gated_delta.on_a_pool(name, v, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens)
    assert initial_state is not None, "on_a_pool raises without one"
    beta = v.new_ones(()).expand(v.shape[:-1]) if beta is None else beta
    out = _gated_delta_rule(
        initial_state, q, k, v, g, beta, use_qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, out=gated_delta.new_output(q, v), **options,
        **noise.of(initial_state),
    )  # fmt: skip
    return out, initial_state


@_takes("inplace_final_state is_kda", **gated_delta.LOGITS, **gated_delta.POOL)
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """Steps of Gated DeltaNet, or with is_kda of KDA, on a pool: S <- S D + beta (v - S D k) k^T;  o = scale S q, with a raw gate a of D.

    D is e^g, or diag(e^g) for KDA, with g = -e^A_log softplus(a + dt_bias), and beta = sigmoid(b).

    q, k: [B, T, HK, K]          v: [B, T, HV, V]          b: [B, T, HV] or [tokens, HV]          A_log: [HV]
    a: [B, T, HV] or [tokens, HV], dt_bias: [HV]; for KDA per key channel, [B, T, HV, K] or with joined axes, dt_bias [HV K]
    initial_state: [slots, HV, V, K], updated in place          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    ssm_state_indices: [N], or [N, T]: each token's state goes to its own column, and the first is read
    num_accepted_tokens: [N]: the column that is read is this less one, instead of the first
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5

    Returns (a new output of q's dtype, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output.
    Raises UnsupportedError without a pool and indices, with inplace_final_state=False, and for beta other than 1 or threshold other than 20
    of the gate's softplus. Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    name = "vllm's fused_sigmoid_gating_delta_rule_update"
    if (beta, threshold) != (1.0, 20.0):
        raise UnsupportedError(name, [f"the gate's softplus has beta {beta} and threshold {threshold}; expected 1 and 20"])
    options = gated_delta.on_a_pool(name, v, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens)
    assert initial_state is not None, "on_a_pool raises without one"
    out = gated_delta.from_logits(
        initial_state, q, k, v, a, b, A_log, dt_bias, is_kda, use_qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, **options
    )
    return out, initial_state


_FLA = "vllm.third_party.flash_linear_attention.ops"
REPLACEMENTS = [
    Replacement(
        f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode", fused_recurrent_gated_delta_rule_packed_decode
    ),
    Replacement(f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule),
    Replacement(f"{_FLA}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update", fused_sigmoid_gating_delta_rule_update),
]
