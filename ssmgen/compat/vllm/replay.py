"""vLLM's ReplaySSM for Mamba-2, as in vLLM 0.33: most decode steps keep inputs and write no state. One function for each backend."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.replay_selective_state_update.call import checkpoint_selective_state_update
from ..shared import noise
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement

_MODULE, _FUNCTION = "vllm.model_executor.layers.mamba.ops.ssu_dispatch", "selective_state_update_replayssm_flashinfer"
NAME = f"vllm's {_FUNCTION}"
_CACHED = "selective_state_update_replayssm_output_only"  # its module has the same name
MOST_ROUNDS = 10  # of the noise in replay's kernels


@_takes(
    "enable_stochastic_rounding", state_batch_indices="[N] or [N, T]", cu_seqlens="[N + 1]",
    **dict.fromkeys(("ring_start", "prev_num_accepted_tokens"), "[slots]"),
)  # fmt: skip
def selective_state_update_replayssm_flashinfer(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    prev_query_len: Tensor,
    logical_window: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = 0,
    scratch: tuple[Tensor, Tensor, Tensor] | None = None,
    update_trackers: bool = True,
    enable_stochastic_rounding: bool = False,
    stochastic_rounding_philox_rounds: int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
) -> Tensor:
    """Decode steps or drafts of Mamba-2 on a state from some tokens ago, whose inputs since then are in a ring: out = C state + D x.

    A slot's state is advanced and written if its ring would hold more than logical_window entries. The ring then begins with the new ones.

    state: [slots, H, P, N]          x, out: [N, H, P], [N, T, H, P], or with cu_seqlens [tokens, H, P]; dt likewise, one value per head
    B, C: like x with [G, N]          A: [H, P, N], D, dt_bias: [H, P], one value of A and dt_bias per head, expanded
    x_cache: [slots, H, R, P], B_cache: [slots, G, R, N], dt_cache: [slots, H, R] f32: the ring, R >= logical_window + tokens of a step
    ring_start, prev_num_accepted_tokens: [slots] int32, first entry of each ring, and how many count
    state_batch_indices: [N], or [N, T], whose first column is read; null_block_id and negative slots are padding: a zero output
    update_trackers: afterwards, vLLM's kernel advances ring_start and prev_num_accepted_tokens by one token
    enable_stochastic_rounding: rounds the states that are written with noise

    Returns out, written. Products are exact to 2^-24.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    scratch, enable_pdl: choose among FlashInfer's kernels; max_seqlen: follows from the ring; prev_query_len: vLLM's kernel reads it
    """
    if x_cache.dim() != 4 or B_cache.dim() != 4:
        shapes = f"x_cache is {list(x_cache.shape)} and B_cache {list(B_cache.shape)}"
        raise ArgumentError(NAME, [f"{shapes}; expected [slots, H, R, P] and [slots, G, R, N]"])
    result, slots = out, state_batch_indices
    if slots is not None and slots.dim() == 2 and slots.shape[1]:
        slots = slots[:, 0]
    if cu_seqlens is None and x.dim() == 3:
        x, dt, B, C, out = (t.unsqueeze(1) for t in (x, dt, B, C, out))
    noisy = noise.of(state, "mamba", asked=enable_stochastic_rounding, philox_rounds=stochastic_rounding_philox_rounds)
    if noisy:
        noisy["philox_rounds"] = min(noisy["philox_rounds"], MOST_ROUNDS)
    checkpoint_selective_state_update(
        state, x_cache.transpose(1, 2), B_cache.transpose(1, 2), dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, D,
        None, dt_bias, dt_softplus, state_indices=slots, cu_seqlens=cu_seqlens, max_tokens=x_cache.shape[2] - logical_window,
        pad_slot_id=null_block_id, out=out, **noisy,
    )  # fmt: skip
    if update_trackers and slots is not None:
        import_module(_MODULE).update_replayssm_ring_trackers(
            ring_start, prev_num_accepted_tokens, prev_query_len, slots, logical_window=logical_window,
            ring_buffer_len=x_cache.shape[2], pad_slot_id=null_block_id,
        )  # fmt: skip
    return result


@_takes(
    "enable_stochastic_rounding", x="[N, H, P]", state_batch_indices="[N] or [N, T]", **dict.fromkeys(("write_pos", "is_flush"), "[N]"),
)  # fmt: skip
def selective_state_update_replayssm_output_only(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    x_cache: Tensor | None = None,
    dt_cache: Tensor | None = None,
    B_cache: Tensor | None = None,
    bc_pre: Tensor | None = None,
    write_pos: Tensor | None = None,
    is_flush: Tensor | None = None,
    max_cache_len: int = 16,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = 0,
    out: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> Tensor:
    """One token per sequence of Mamba-2 on a state from some tokens ago, whose inputs since then are in a cache: out = C state + D x.

    vLLM decides in which steps a sequence's state is written: it then includes the new token, and nothing goes to the cache. In other steps
    the token goes to the cache, and no state changes.

    state: [slots, H, P, N]          x, z, out: [batch, H, P]; dt likewise, one value per head          B, C: [batch, G, N]
    A: [H, P, N], D, dt_bias: [H, P], one value of A and dt_bias per head, expanded
    x_cache: [slots, H, L, P], B_cache: [slots, G, L, N], dt_cache: [slots, H, L] f32
    write_pos: [batch] int32, how many entries of each sequence count, below L
    is_flush: [batch] bool or int8, whether its state is written
    state_batch_indices: [batch], or [batch, T], whose first column is read; null_block_id and negative slots are padding: a zero output
    enable_stochastic_rounding: rounds the states that are written with noise

    Returns out, written. Products are exact to 2^-24.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    bc_pre: vLLM's first kernel hands it to the second; max_cache_len: follows from x_cache
    """
    given = {"x_cache": x_cache, "dt_cache": dt_cache, "B_cache": B_cache, "write_pos": write_pos, "is_flush": is_flush, "out": out}
    if missing := [f"{name} is None; expected a tensor" for name, t in given.items() if t is None]:
        raise ArgumentError(f"vllm's {_CACHED}", missing)
    assert x_cache is not None and dt_cache is not None and B_cache is not None  # looked at before
    assert write_pos is not None and is_flush is not None and out is not None
    if x_cache.dim() != 4 or B_cache.dim() != 4:
        shapes = f"x_cache is {list(x_cache.shape)} and B_cache {list(B_cache.shape)}"
        raise ArgumentError(f"vllm's {_CACHED}", [f"{shapes}; expected [slots, H, L, P] and [slots, G, L, N]"])
    rows, slots = x.shape[0], state_batch_indices
    if slots is not None:
        slots = slots[:rows, 0] if slots.dim() == 2 and slots.shape[1] else slots[:rows]
    flags = is_flush if is_flush.dtype is torch.bool else is_flush.view(torch.bool)
    noisy = noise.of(state, "mamba", asked=enable_stochastic_rounding, philox_rounds=cache_philox_rounds)
    if noisy:
        noisy["philox_rounds"] = min(noisy["philox_rounds"], MOST_ROUNDS)
    checkpoint_selective_state_update(
        state, x_cache.transpose(1, 2), B_cache.transpose(1, 2), dt_cache, None, write_pos[:rows], x.unsqueeze(1), dt.unsqueeze(1), A,
        B.unsqueeze(1), C.unsqueeze(1), D, None if z is None else z.unsqueeze(1), dt_bias, dt_softplus, state_indices=slots,
        flush=flags[:rows], pad_slot_id=null_block_id, out=out.unsqueeze(1), **noisy,
    )  # fmt: skip
    return out


REPLACEMENTS = [
    Replacement(_MODULE, _FUNCTION, selective_state_update_replayssm_flashinfer),
    Replacement(
        f"vllm.model_executor.layers.mamba.ops.{_CACHED}", _CACHED, selective_state_update_replayssm_output_only,
        impossible=noise.impossible,
    ),
]  # fmt: skip
