"""SGLang's gated delta rule of Jet-Nemotron, prompts and decode steps, as in SGLang 0.5.23."""

from __future__ import annotations

from torch import Tensor

from ...errors import UnsupportedError
from ...families.linear_attention.call import gated_delta_rule
from ..shared import delta_prompts as _prompts
from ..shared import invariance
from ..shared.draft_trees import kept_of_drafts
from ..shared.gated_delta import first as _first
from ..shared.gated_delta import new_output as _new_output
from ..shared.gated_delta import noise_of as _noise_of
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement
from .delta import in_pool


@_takes(
    "use_qk_l2norm_in_kernel disable_state_update disable_output_calculation", **_prompts.PACKED,
    initial_state_source="[slots, HV, V, K]", initial_state_indices="[N]", intermediate_state_indices="[N]",
    intermediate_states_buffer="[rows, cache_steps, HV, V, K]", retrieve_parent_token="[N, T]",
)  # fmt: skip
def fused_recurrent_gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Prompts and decode steps of Jet-Nemotron's gated delta rule: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V]          g: [B, T, HV], log decay          beta: [B, T, HV]; None for 1
    initial_state_source: [slots, HV, V, K], a pool, updated in place unless disable_state_update
    initial_state_indices: [N], slots; a negative one, or one out of the pool, is padding: a zero output, and no state is touched
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5

    Returns a new output [B, T, HV, V] of q's dtype. Unlike in SGLang, more tokens than sequences, without drafts, run by chunks of 64
    tokens.
    Raises UnsupportedError without a pool and its indices, and with disable_output_calculation. Raises ArgumentError (a ValueError) for
    operands that do not fit.

    Drafts:
    intermediate_states_buffer: [rows, cache_steps, HV, V, K], receives the state after each token, in row intermediate_state_indices [N]; a
        row that is out of range is not written
    retrieve_parent_token: [N, T or more], a draft tree, whose tokens continue from that buffer; ignored without it, as in SGLang
    """
    name = "sglang's fused_recurrent_gated_delta_rule_update"
    pool, slots = initial_state_source, initial_state_indices
    pairs = {
        "disable_output_calculation is True; expected False: ssmgen's kernels always write an output": disable_output_calculation,
        "initial_state_source is None; expected a pool of states": pool is None,
        "initial_state_indices is None; expected the slots in the pool of states": slots is None,
    }
    if reasons := [reason for reason, present in pairs.items() if present] + invariance.one_function_for_both():
        raise UnsupportedError(name, reasons)
    assert pool is not None and slots is not None  # looked at before
    beta = v.new_ones(()).expand(v.shape[:-1]) if beta is None else beta
    sequences = _prompts.sequences_of(v, cu_seqlens)
    slots = _first(slots, sequences)
    if intermediate_states_buffer is None and v.shape[0] * v.shape[1] > sequences:
        return in_pool(
            _prompts.chunk_gated_delta_rule, _prompts.Operands(q, k, v, g, beta), pool, slots, cu_seqlens, not disable_state_update, None,
            None, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel,
        )  # fmt: skip
    kept = kept_of_drafts(name, intermediate_states_buffer, cache_steps, intermediate_state_indices, retrieve_parent_token, v, cu_seqlens)
    kept |= {"update_state": not disable_state_update}
    return gated_delta_rule(
        pool, q, k, v, g, beta, use_qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, state_indices=slots, cu_seqlens=cu_seqlens,
        out=_new_output(q, v), **kept, **_noise_of(pool, kept),
    )  # fmt: skip


REPLACEMENTS = [
    Replacement(
        "sglang.kernels.ops.attention.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_update",
        fused_recurrent_gated_delta_rule_update,
    )
]  # fmt: skip
