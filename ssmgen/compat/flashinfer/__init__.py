"""flashinfer.gdn_decode's functions, as in FlashInfer 0.7.2, and functions of other modules of it, which state their own differences.

q, k: [B, T, H, K]; v: [B, T, HV, V]; a, b: [B, T, HV], the raw gate and the logit of beta; A_log, dt_bias: [HV]. States are updated in
place. Each returns (output, state or pool), output of shape [B, T, HV, V] and of q's dtype if it is not given. scale None is K^-0.5.

Deliberate differences:
- A sequence that reads from a negative slot, or from none of the pool's, gets a zero output and touches nothing; a state that would go to
  such a slot is not written. FlashInfer takes slot 0, leaves the output as it was, or reads beyond the pool. Slot 0 is like any other;
  null_slot=0 makes slot 0 padding, like a negative slot. zero_padding=False keeps the output of padding; pass `output`.
- Operands and states are f32, f16 or bf16, each its own: f16 is not rounded to bf16 on the way.
- K and V are not tied to 128, nor T to one or several: a buffer or disable_state_update goes with T = 1 too.
- A state whose last two axes are not dense is refused, not copied there and back.

Raises NotImplementedError for features of FlashInfer's other kernels, and the errors of ssmgen.gated_delta_rule.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...families.linear_attention.call import gated_delta_rule as _native
from ...families.selective_state_update.call import selective_state_update as _native_ssu
from ..shared.gated_delta import first_column as _first_column
from ..shared.gated_delta import of_one_type as _of_one_type
from ..shared.operands import takes as _takes
from .cascade import merge_state as merge_state
from .cascade import merge_state_in_place as merge_state_in_place
from .cascade import merge_states as merge_states
from .cascade import variable_length_merge_states as variable_length_merge_states
from .prefill import chunk_gated_delta_rule as chunk_gated_delta_rule
from .replay import checkpointing_ssu as checkpointing_ssu


def _run(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, scale: float | None,
    output: Tensor | None, use_qk_l2norm: bool, state_layout: str = "vk", read: Tensor | None = None, write: Tensor | None = None,
    kept: Tensor | None = None, update: bool = True, null_slot: int = -1, zero_padding: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not update:
        write = None  # where nothing is written, as there
    read, write = _of_one_type(read, write)
    if output is None and zero_padding:  # else it must be given, which the function says
        output = v.new_empty(v.shape, dtype=q.dtype)
    found = _native(
        state, q, k, v, a, b, A_log, dt_bias, use_qk_l2norm=use_qk_l2norm, beta_sigmoid=True, scale=scale, state_layout=state_layout,
        state_indices=read, dst_state_indices=write, intermediate_states=None if kept is None else kept[: q.shape[0]],
        update_state=update, pad_slot_id=null_slot, zero_padding=zero_padding, out=output,
    )  # fmt: skip
    return found, state


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "flashinfer"):
        raise NotImplementedError(f"backend is {backend!r}; expected 'auto' or 'flashinfer'")


_OPERANDS = {"q": "[B, T, H, K]", "v": "[B, T, HV, V]"}
_KEPT = "[B or more, T or more, HV, V, K]"


@_takes(
    "disable_state_update",
    **_OPERANDS,
    initial_state="[slots, HV, V, K] or, split in two, [2, slots, HV, V, K]",
    intermediate_states_buffer=_KEPT,
    initial_state_indices="[B]",
    output_state_indices="[B]",
)
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
    *,
    null_slot: int = -1,
    zero_padding: bool = True,
) -> tuple[Tensor, Tensor]:
    """state: [B, HV, V, K]; or None, and a pool initial_state [slots, HV, V, K] with initial_state_indices [B].

    output_state_indices: [B], slots to write, None for those read   intermediate_states_buffer: [B or more, T or more, HV, V, K]
    null_slot, zero_padding: ssmgen's own: a sequence in slot null_slot is padding; zero_padding=False keeps the output of padding
    """
    _check_backend(backend)
    if initial_state is not None and initial_state.dim() == 5:
        raise NotImplementedError("initial_state has 5 axes; expected 4: ssmgen has no kernel for a pool that is split between two dies")
    problems = []
    if (initial_state is None) != (initial_state_indices is None):
        problems.append("one of initial_state and initial_state_indices is None; expected both or neither")
    if initial_state is None and output_state_indices is not None:
        problems.append("output_state_indices is given without initial_state; expected both. Pass initial_state.")
    if initial_state is not None and state is not None:
        problems.append("state and initial_state are both given; expected one of them")
    held = state if initial_state is None else initial_state
    if held is None:
        problems.append("state and initial_state are None; expected one of them")
    if problems or held is None:
        raise ArgumentError("gated_delta_rule_decode_pretranspose", problems)
    return _run(
        q, k, v, held, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        read=initial_state_indices, write=output_state_indices, kept=intermediate_states_buffer, update=not disable_state_update,
        null_slot=null_slot, zero_padding=zero_padding,
    )  # fmt: skip


@_takes(**_OPERANDS)
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


@_takes(
    "disable_state_update cache_replayssm",
    **_OPERANDS,
    intermediate_states_buffer=_KEPT,
    initial_state_indices="[B]",
    output_state_indices="[B]",
)
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
    disable_state_update: bool | int | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    *,
    null_slot: int = -1,
    zero_padding: bool = True,
) -> tuple[Tensor, Tensor]:
    """initial_state: pool [slots, HV, V, K], read at initial_state_indices [B], written there or at output_state_indices [B].

    ssm_state_indices: [B, T], the slot for the state after each token; the slot read from is then not written
    output_state_indices in addition: the state after the last token goes there too, by a copy in a separate pass
    disable_state_update: None is True, with a warning, as long as FlashInfer's default is that; 0 is False, another integer True, as there
    intermediate_states_buffer: [B or more, T or more, HV, V, K]
    null_slot, zero_padding: as in gated_delta_rule_decode_pretranspose
    """
    if cache_replayssm or any(t is not None for t in (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)):
        raise NotImplementedError(
            "cache_replayssm or replayssm_* is given; expected None: ssmgen's ring keeps other tensors. "
            "Call ssmgen.gated_delta_rule with ring=."
        )
    if disable_state_update is None:
        message = "disable_state_update is None, which leaves the state unchanged; the default will change. Pass True or False."
        warnings.warn(message, FutureWarning, stacklevel=2)
        disable_state_update = True
    problems = []
    if ssm_state_indices is not None and disable_state_update:
        problems.append(
            "ssm_state_indices is given and disable_state_update is not False; expected False, to write states. "
            "Pass disable_state_update=False."
        )
    if ssm_state_indices is not None and ssm_state_indices.dim() != 2:
        problems.append(f"ssm_state_indices is {list(ssm_state_indices.shape)}; expected [batch, tokens]")
    if problems:
        raise ArgumentError("gated_delta_rule_mtp", problems)
    write, last = output_state_indices if ssm_state_indices is None else ssm_state_indices, None
    if ssm_state_indices is not None and output_state_indices is not None and output_state_indices is not initial_state_indices:
        write, last = _with_last(ssm_state_indices, output_state_indices, initial_state.shape[0], null_slot)
    found = _run(
        q, k, v, initial_state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, read=initial_state_indices, write=write,
        kept=intermediate_states_buffer, update=not disable_state_update, null_slot=null_slot, zero_padding=zero_padding,
    )  # fmt: skip
    if last is not None:
        _copy_slots(initial_state, *last, _is_slot(initial_state_indices, initial_state.shape[0], null_slot), null_slot)
    return found


def _is_slot(index: Tensor, slots: int, null_slot: int) -> Tensor:
    return (index >= 0) & (index < slots) & (index != null_slot)


def _with_last(each: Tensor, last: Tensor, slots: int, null_slot: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(slots [B, T] that are written, then a copy from and to slots [B]): the state after the last token goes to the slots `last` as well,
    at once where it has none in `each`."""
    if last.shape != each.shape[:1] or not each.numel():
        problem = f"output_state_indices is {list(last.shape)}; expected [batch], as ssm_state_indices is {list(each.shape)}"
        raise ArgumentError("gated_delta_rule_mtp", [problem])
    own = each[:, -1]
    at_once = torch.where(_is_slot(own, slots, null_slot), own, last.to(own))
    return torch.cat([each[:, :-1], at_once[:, None]], 1), (own.long(), last.long())


def _copy_slots(pool: Tensor, source: Tensor, target: Tensor, there: Tensor, null_slot: int) -> None:
    """Copies states from slots to slots [B], for sequences that exist and whose two slots are in the pool.

    The device decides: any other sequence repeats the first copy. If there is no copy, slot 0 is written over itself."""
    there = there & _is_slot(source, pool.shape[0], null_slot) & _is_slot(target, pool.shape[0], null_slot)
    row = torch.where(there, torch.arange(len(there), device=there.device), there.int().argmax())
    source, target = (torch.where(there.any(), index[row], 0) for index in (source, target))
    pool.index_copy_(0, target, pool[source])


_ALGORITHMS = ("auto", "simple", "vertical", "horizontal", "async_horizontal")


@_takes(
    "disable_state_update",
    x="[batch, dim] or [batch, H, P] or [batch, T, H, P]",
    num_accepted_tokens="[batch]",
    cu_seqlens="[batch + 1]",
    state_batch_indices="[batch] or [batch, columns]",
    dst_state_batch_indices="[batch] or [batch, T]",
)
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    backend: str = "auto",
    retrieve_parent_token: Tensor | None = None,
    *,
    zero_padding: bool = True,
) -> Tensor:
    """One token per sequence, x (batch, H, P) or (batch, dim); several, (batch, T, H, P); or packed, (tokens, H, P) with cu_seqlens.

    state: (slots, H, P, N) or (slots, dim, N)              state_batch_indices: (batch,), or (batch, columns), of which the first is read
    num_accepted_tokens: (batch,), instead the column num_accepted_tokens - 1; 0 is like 1
    dst_state_batch_indices: (batch,), or (batch, T) for the state after each token
    intermediate_states_buffer: (rows, T or more, H, P, N), by intermediate_state_indices (batch,), or else by the slot that is read
    retrieve_parent_token: (batch, T), a draft tree: of SGLang's variant, not of FlashInfer's
    state_scale: (slots, H, P), also with a last axis of 1, f32, of an int16, int8 or float8_e4m3fn state; written with it
    intermediate_state_scales: (rows, T or more, H, P) f32, the same of intermediate_states_buffer
    rand_seed: one int64, on the device, of the noise of states that are not f32

    Deliberate differences:
    - A sequence that reads from pad_slot_id, a negative slot or none of the pool's gets a zero output, or with zero_padding=False, which is
      not FlashInfer's, keeps what `out` has. A state that would go to such a slot is not written.
    - All arguments go together and mean the same, whatever the algorithm: the final state is written unless disable_state_update, with
      intermediate states too; a destination and disable_state_update contradict each other; num_accepted_tokens without destinations
      wants disable_state_update.
    - Noise equals Triton's randint4x for four neighbours, in the order of memory, and means are exact for subnormal numbers, to 2^-37
      in f16; FlashInfer's noise depends on its kernel.
    - int8 and float8_e4m3fn states too, which FlashInfer has in its checkpointing_ssu alone, and noise with scales. To integers what lies
      in the middle goes to the even one; the scale of a row of zeros is tiny, not 1.
    - D may be missing, and A, dt and dt_bias need not be tied where there is one token. The output is of x's shape, also without heads.

    Raises UnsupportedError for other packages' kernels, and the errors of ssmgen.selective_state_update.
    """
    if backend not in ("auto", "flashinfer"):
        reason = f"backend is {backend!r}; expected 'auto' or 'flashinfer'"
        raise UnsupportedError("FlashInfer's selective_state_update", [reason])
    problems = []
    if algorithm not in _ALGORITHMS:
        problems.append(f"algorithm is {algorithm!r}; expected one of {', '.join(_ALGORITHMS)}")
    if x.dim() == 4 and cache_steps not in (0, x.shape[1]):
        problems.append(f"cache_steps is {cache_steps}; expected {x.shape[1]}, the tokens of x")
    if rand_seed is not None and (rand_seed.numel() != 1 or philox_rounds <= 0):
        problems.append(
            f"rand_seed has {rand_seed.numel()} elements and philox_rounds is {philox_rounds}; expected one seed and 1 or more rounds"
        )
    if problems:
        raise ArgumentError("selective_state_update", problems)
    read, write = state_batch_indices, dst_state_batch_indices
    if num_accepted_tokens is not None:
        num_accepted_tokens = num_accepted_tokens.clamp(min=1)
    elif read is not None and read.dim() == 2:
        read = _first_column(read, read.shape[0])
    if intermediate_states_buffer is not None and intermediate_state_indices is None and read is not None and read.dim() == 1:
        intermediate_state_indices = read
    if write is not None and write.dim() == 2 and x.dim() == 3 and cu_seqlens is None:
        write = _first_column(write, write.shape[0])
    read, write = _of_one_type(read, write)
    if state_scale is not None and state_scale.dim() == 4:
        state_scale = state_scale.squeeze(-1)
    if state_scale is not None and state.dim() == 3 and state_scale.dim() == 3:  # of one head
        state_scale = state_scale.squeeze(1)
    return _native_ssu(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_indices=read, dst_state_indices=write,
        num_accepted_tokens=num_accepted_tokens, cu_seqlens=cu_seqlens, parents=retrieve_parent_token,
        intermediate_states=intermediate_states_buffer, intermediate_state_indices=intermediate_state_indices,
        update_state=not disable_state_update, state_scale=state_scale, intermediate_state_scales=intermediate_state_scales,
        rand_seed=None if rand_seed is None else rand_seed.reshape(1), philox_rounds=philox_rounds, pad_slot_id=pad_slot_id,
        zero_padding=zero_padding, out=out,
    )  # fmt: skip
