"""vLLM's functions around FlashKDA, its default for prompts of Kimi-K3 and GLM5-Next, as in vLLM 0.33."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...families.chunk_linear_attention.call import chunk_kda
from ..shared import delta_prompts as _prompts
from ..shared.gated_delta import shaped as _shaped
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement

_KIMI, _GLM = "vllm.models.kimi_k3.nvidia.kda", "vllm.models.glm5next.common.kda"
_ROWS = {n: shape for n, shape in _prompts.PACKED.items() if n != "g"} | {"initial_state": "[N, HV, V, K]"}


class _Places:
    """Whether the engine's layers have asked for the alignment of checkpoints since ssmgen answers."""

    aligned = False


def aligned(checkpoint: Any) -> bool:
    """Whether the positions of vLLM's checkpoints in prompts are ones whose states the scan keeps."""
    return _Places.aligned and not any(offset % _prompts.CHUNK for offset in checkpoint.offsets or ())


def kda_prefill_checkpoint_alignment(backend: str) -> int | None:
    """64 for "flashkda", where FlashKDA has 16, and None for other backends: checkpoints lie at multiples of it in a prompt.

    Layers ask for it when they describe their states, before any prompt.
    """
    if backend != "flashkda":
        return None
    _Places.aligned = True
    return _prompts.CHUNK


@_takes(**_ROWS, out="[B, T, HV, V]", final_state="[N, HV, V, K]", checkpoint_state="[N, HV, V, K]", checkpoint_offsets="[N]")
def flashkda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    final_state: Tensor,
    workspace: Tensor,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention over prompts of Kimi-K3, the function _flashkda_prefill: S <- S D + beta (v - S D k) k^T;  o = K^-0.5 S q.

    D = diag(e^g'), with g' = lower_bound sigmoid(e^A_log (g + dt_bias)).

    q, k: [1, T, H, K], which are divided by sqrt(|x|^2 + 1e-6)          v, out: [1, T, HV, V]; out is written
    g: [1, T, HV, K], raw gate          beta: [1, T, HV], logit          A_log, dt_bias: HV and HV K elements
    initial_state, final_state: [N, HV, V, K], states before and after each sequence; final_state is written
    cu_seqlens: [N + 1], start of each packed sequence          workspace: ignored

    Returns (out, final_state).
    Raises UnsupportedError for checkpoints of layers that were built before ssmgen was registered, which lie at multiples of 16. Raises
    ArgumentError (a ValueError) for operands that do not fit.

    States at positions, for prefix caches:
    checkpoint_state: [N, HV, V, K], receives the state of each sequence after checkpoint_offsets tokens
    checkpoint_offsets: [N], multiples of 64; the state of a 0 is undefined
    """
    name = "vllm's _flashkda_prefill"
    if (checkpoint_state is None) != (checkpoint_offsets is None):
        raise ArgumentError(name, ["one of checkpoint_state and checkpoint_offsets is None; expected both or neither"])
    if checkpoint_offsets is not None and not _Places.aligned:
        raise UnsupportedError(
            name, ["checkpoint_offsets are multiples of 16; expected multiples of 64. Call register before the engine is built."]
        )
    _scan(
        name,
        (q, k, v, g, beta, A_log, dt_bias),
        lower_bound,
        initial_state,
        cu_seqlens,
        out,
        final_state,
        checkpoint_state,
        checkpoint_offsets,
    )
    return out, final_state


@_takes(**_ROWS, out="[B, T, HV, V]")
def glm_flashkda_prefill(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor | None,
    checkpoint: Any = None,
    raw_qkv: Tensor | None = None,
    conv_state: Tensor | None = None,
    recurrent_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention over prompts of GLM5-Next, the method _flashkda_prefill: S <- S D + beta (v - S D k) k^T;  o = K^-0.5 S q.

    D = diag(e^g'), with g' = kda_lower_bound sigmoid(e^A_log (g + dt_bias)); the layer holds these three.

    q, k: [1, T, H, K], which are divided by sqrt(|x|^2 + 1e-6)          v: [1, T, HV, V]
    g: [1, T, HV, K], raw gate          beta: [1, T, HV], logit
    initial_state: [N, HV, V, K], states before each sequence          cu_seqlens: [N + 1], start of each packed sequence
    out: [1, T, HV, V], is written; None for one in vLLM's workspaces

    Returns (out, states after each sequence), the latter in vLLM's workspaces.
    Raises UnsupportedError for checkpoints at other places than multiples of 64, and ArgumentError (a ValueError) for operands that do not
    fit.

    States at positions, for prefix caches:
    checkpoint: vLLM's MambaPrefillCheckpointMetadata; its states are exported as the layer does
    raw_qkv, conv_state, recurrent_state: needed with checkpoint, and passed to that export
    """
    name = "vllm's Glm5NextLinearAttention._flashkda_prefill"
    if checkpoint is not None and any(offset % _prompts.CHUNK for offset in checkpoint.offsets or (1,)):
        raise UnsupportedError(
            name, ["the offsets of checkpoint are not all multiples of 64; expected such. Call register before the engine is built."]
        )
    buffers = import_module(_GLM).current_workspace_manager().get_simultaneous(*self._flashkda_buffer_specs)
    final, kept, _, spare = buffers
    count = initial_state.shape[0]
    final, kept = final[:count], None if checkpoint is None else kept[:count]
    out = spare[:, : q.shape[1]] if out is None else out
    offsets = None if checkpoint is None else checkpoint.checkpoint_offsets
    operands = (q, k, v, g, beta, self.A_log, self.dt_bias)
    _scan(name, operands, self.kda_lower_bound, initial_state, cu_seqlens, out, final, kept, offsets)
    if checkpoint is not None:
        self._checkpoint_exporter.export(
            checkpoint, raw_qkv=raw_qkv, conv_state=conv_state, recurrent_checkpoint=kept, recurrent_state=recurrent_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return out, final


def _scan(
    name: str, operands: tuple[Tensor, ...], lower_bound: float, before: Tensor, starts: Tensor, out: Tensor, last: Tensor,
    kept: Tensor | None, offsets: Tensor | None,
) -> None:  # fmt: skip
    """Writes out, the last states, and into `kept` the states after given numbers of tokens of each sequence."""
    q, k, v, g, beta, A_log, bias = operands
    if problems := _prompts.objections(v, {"cu_seqlens": starts, "checkpoint_offsets": offsets}):
        raise ArgumentError(name, problems)
    positions = None if offsets is None else torch.add(starts[:-1], offsets)
    tokens = (q, k, v, _shaped(g, (*v.shape[:3], k.shape[-1])), _shaped(beta, tuple(v.shape[:3])), A_log.reshape(-1), bias.reshape(-1))
    _prompts.run(
        chunk_kda, tokens, out, initial_states=before, last=last, cu_seqlens=starts, positions=positions, checkpoints=kept,
        lower_bound=lower_bound, use_qk_l2norm=True, beta_sigmoid=True,
    )  # fmt: skip


REPLACEMENTS = [
    Replacement("vllm.model_executor.layers.mamba.kda_checkpoint", "kda_prefill_checkpoint_alignment", kda_prefill_checkpoint_alignment),
    Replacement(_KIMI, "_flashkda_prefill", flashkda_prefill),
    Replacement(_GLM, "Glm5NextLinearAttention._flashkda_prefill", glm_flashkda_prefill),
]
