"""flashinfer.gdn_decode's functions, as in FlashInfer 0.7.2, and flashinfer.mamba.checkpointing_ssu, which says what it is itself.

q, k: [B, T, H, K]; v: [B, T, HV, V]; a, b: [B, T, HV], the raw gate and the logit of beta; A_log, dt_bias: [HV]. States are updated in
place. Each returns (output, state or pool), output of shape [B, T, HV, V] and of q's dtype if it is not given. scale None is K^-0.5.

Deliberate differences:
- A sequence that reads from a negative slot, or from none of the pool's, gets a zero output and touches nothing; a state that would go to
  such a slot is not written. FlashInfer takes slot 0, leaves the output as it was, or reads beyond the pool. Slot 0 is like any other.
- Operands and states are f32, f16 or bf16, each its own: f16 is not rounded to bf16 on the way.
- K and V are not tied to 128, nor T to one or several: a buffer or disable_state_update goes with T = 1 too.
- A state whose last three axes are not dense is refused, not copied there and back.

Raises NotImplementedError for what only FlashInfer's other kernels do, and what ssmgen.gated_delta_rule raises.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from ..errors import ArgumentError
from ..ops.linear_attention import gated_delta_rule as _native
from .flashinfer_replay import checkpointing_ssu as checkpointing_ssu


def _run(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, scale: float | None,
    output: Tensor | None, use_qk_l2norm: bool, state_layout: str = "vk", read: Tensor | None = None, write: Tensor | None = None,
    kept: Tensor | None = None, update: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not update:
        write = None  # where nothing is written, as there
    elif read is not None and write is not None and read.dtype != write.dtype:
        read, write = read.long(), write.long()  # a kernel has one type of index; the wider, so that no slot wraps around into the pool
    output = v.new_empty(v.shape, dtype=q.dtype) if output is None else output
    _native(
        state, q, k, v, a, b, A_log, dt_bias, use_qk_l2norm=use_qk_l2norm, beta_sigmoid=True, scale=scale, state_layout=state_layout,
        state_indices=read, dst_state_indices=write, intermediate_states=None if kept is None else kept[: q.shape[0]],
        update_state=update, out=output,
    )  # fmt: skip
    return output, state


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "flashinfer"):
        raise NotImplementedError(f"backend={backend!r} names kernels that ssmgen does not have; it takes 'auto' and 'flashinfer'")


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """state: [B, HV, V, K]; or None, and a pool initial_state [slots, HV, V, K] with initial_state_indices [B].

    output_state_indices: [B], slots to write, None for those read   intermediate_states_buffer: [B or more, T or more, HV, V, K]
    """
    _check_backend(backend)
    if initial_state is not None and initial_state.dim() == 5:
        raise NotImplementedError("initial_state has 5 axes: ssmgen has no kernel for a pool that is split between two dies")
    problems = []
    if (initial_state is None) != (initial_state_indices is None):
        problems.append("initial_state and initial_state_indices go together")
    if initial_state is None and output_state_indices is not None:
        problems.append("output_state_indices is given without initial_state")
    if initial_state is not None and state is not None:
        problems.append("both state and initial_state are given")
    if problems:
        raise ArgumentError("gated_delta_rule_decode_pretranspose", problems)
    return _run(
        q, k, v, state if initial_state is None else initial_state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        read=initial_state_indices, write=output_state_indices, kept=intermediate_states_buffer, update=not disable_state_update,
    )  # fmt: skip


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """state: [B, HV, K, V]."""
    _check_backend(backend)
    return _run(q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, state_layout="kv")


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """initial_state: pool [slots, HV, V, K], read at initial_state_indices [B], written there or at output_state_indices [B].

    ssm_state_indices: [B, T], the slot for the state after each token; the slot read from is then not written
    disable_state_update: None is True, with a warning, as long as FlashInfer's default is that
    intermediate_states_buffer: [B or more, T or more, HV, V, K]
    """
    if cache_replayssm or any(t is not None for t in (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)):
        raise NotImplementedError(
            "cache_replayssm and replayssm_*: ssmgen's ring keeps other tensors; see gated_delta_rule(ring=…) and its commit"
        )
    if disable_state_update is None:
        message = "gated_delta_rule_mtp does not update the state unless disable_state_update=False; say which, the default will change"
        warnings.warn(message, FutureWarning, stacklevel=2)
        disable_state_update = True
    problems = []
    if ssm_state_indices is not None and disable_state_update:
        problems.append("ssm_state_indices is given, and disable_state_update is not False")
    if ssm_state_indices is not None and output_state_indices is not None:
        problems.append("ssm_state_indices and output_state_indices both say where the last state goes")
    if ssm_state_indices is not None and ssm_state_indices.dim() != 2:
        problems.append(f"ssm_state_indices is {list(ssm_state_indices.shape)}, not [batch, tokens]")
    if problems:
        raise ArgumentError("gated_delta_rule_mtp", problems)
    return _run(
        q, k, v, initial_state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, read=initial_state_indices,
        write=output_state_indices if ssm_state_indices is None else ssm_state_indices, kept=intermediate_states_buffer,
        update=not disable_state_update,
    )  # fmt: skip
