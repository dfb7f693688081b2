"""The options of a pool and the construction of calls, for all functions of linear attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...calls.checks import padding_objections
from ...calls.operator import run
from ...engine.noise import seeded
from ...engine.recurrences.attention.operands import OPERANDS
from ...engine.recurrences.attention.switches import Form
from .planning import CALLERS, Options, ring_objections
from .planning import RawInputs as Ring


class PoolOptions(NamedTuple):
    """Keywords of all functions of linear attention that decode.

    scale: factor of the output; None for K^-0.5
    state_layout: "vk" for a state [slots, HV, V, K], "kv" for [slots, HV, K, V]; never inferred. Its last three axes are dense
    state_indices: [batch] int32 or int64, slot of each sequence; None for slot = sequence
    pad_slot_id: a sequence is padding if its slot is negative, equals this or is not in the pool. It gets a zero output and touches no
        state
    zero_padding: False leaves the output of padding unchanged; pass `out`
    out: of v's shape; None for a new one
    pdl: whether the kernel may start while the previous one in the stream ends (it waits before it reads anything); None = if the
        device can (sm_90 and later)

    Several tokens:
    cu_seqlens: [batch + 1] int32 or int64, start of each sequence's tokens; ends with the number of tokens. A sequence may have none
    update_state: False leaves the pool unchanged
    dst_state_indices: [batch], the slot of the state after the last token, None for in place; or [batch, T], a slot for the state after
        each token. A slot that is not valid is not written. Slots must be distinct, else sequences race
    intermediate_states: [batch, T or more, HV, V, K] (or K, V) of the state's dtype: receives the state after each token
    intermediate_state_indices: only gated_delta_rule, delta_rule, kda and lightning_attn: [batch] int32 or int64, the row of each
        sequence in intermediate_states, which may have any number of rows; a row out of range is not written
    num_accepted_tokens: [batch] int32 or int64, from 1, with state_indices [batch, columns]: the sequence starts from the slot in that
        column of state_indices. A count out of range makes the sequence padding

    Draft trees and rings, for gated_delta_rule, delta_rule and kda:
    parents: [batch, T] int32 or int64, a draft tree; needs intermediate_states. Token t continues from the state
        after token parents[t], an earlier token of the sequence, as stored in intermediate_states. Any other number means the state after
        token t - 1, unrounded. Packed sequences may have any number of columns. A sequence whose row is out of range is padding
    ring: receives the tokens' raw k, v, g and beta in the sequence's slot. With cu_seqlens, tokens past the ring's end are not kept
    ring_ready: the ring's g and beta are f32, and receive log decays and step sizes for raw gates and logits. A commit of such a ring has
        neither A_log nor beta_sigmoid

    States that lack tokens, for gated_delta_rule and kda, with one token per sequence:
    ring_position: [batch] int32 or int64: the number of tokens in the ring that the state of the sequence's slot lacks. The state is read
        through them, and the step adds its own token to the ring instead of writing the state. If that would be the last place of the ring,
        L - 1, the step writes the state with this token instead; the caller continues at 0 then, otherwise at the next number. A number
        out of range makes the sequence padding. The ring has other contents here: keys after use_qk_l2norm in k [slots, L, HK, K];
        errors beta (v - a S k) in v [slots, L, HV, V], of the same dtype; f32 log decays in g; beta is None
    ring_flush: [batch] int32 or int64: a number other than 0 makes this step write the state. None for no

    States in fewer bits:
    state_scale: [slots, HV, V] f32, for a state of int16, int8 or float8_e4m3fn in layout "vk": the state is its elements times the scale
        of their row, which is the K elements of a value channel. Written with the state, see selective_state_update. Not with
        intermediate_states or a ring

    Stochastic rounding:
    rand_seed: [1] or [slots] int64, on the device: states, except f32 ones, are rounded stochastically with Philox noise of philox_rounds
        rounds, as in selective_state_update. Element number slot HV V K + (h V + v) K + k of the pool, in layout "kv" slot HV K V +
        (h K + k) V + v, takes word n % 4 of the counter of the first of its four neighbours in memory; n is its number. Change the seed
        between calls
    """

    scale: float | None
    state_layout: str
    state_indices: Tensor | None
    dst_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    pad_slot_id: int
    cu_seqlens: Tensor | None
    intermediate_states: Tensor | None
    update_state: bool
    out: Tensor | None
    pdl: bool | None
    ring: Ring | None = None
    state_scale: Tensor | None = None
    parents: Tensor | None = None
    intermediate_state_indices: Tensor | None = None
    zero_padding: bool = True
    rand_seed: Tensor | None = None
    philox_rounds: int = 10
    ring_ready: bool = False
    ring_position: Tensor | None = None
    ring_flush: Tensor | None = None


_CONTIGUOUS = torch.contiguous_format


def decode(
    name: str, form: Form, pool: PoolOptions, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
    gk: Tensor | None = None, gv: Tensor | None = None, beta: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, read: Tensor | None = None, erase: Tensor | None = None, w: Tensor | None = None,
    write: Tensor | None = None, alpha: Tensor | None = None, bonus: Tensor | None = None, *,
    lower_bound: float | None = None, objections: tuple[str, ...] = (),
) -> Tensor:  # fmt: skip
    """The result of a function, from its tensors by their roles in the recurrence (spec.py)."""
    scale, out = pool.scale, pool.out
    objections += padding_objections(pool.zero_padding, out)
    if out is None:
        out = torch.empty_like(v, memory_format=_CONTIGUOUS) if isinstance(v, Tensor) else v  # the checks object to v
    if scale is None:
        scale = q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0
    ring_k, ring_v, ring_g, ring_gk, ring_beta = _by_operand(pool.ring, gk is not None)
    rand_seed, philox_rounds = seeded(pool.rand_seed, pool.philox_rounds)
    tensors = OPERANDS.Tensors(
        state, q, k, v, g, gk, gv, beta, A_log, dt_bias, read, erase, w, write, alpha, bonus, out, pool.state_indices,
        pool.dst_state_indices, pool.num_accepted_tokens, pool.cu_seqlens, pool.intermediate_states, ring_k, ring_v, ring_g, ring_gk,
        ring_beta, pool.state_scale, pool.parents, pool.intermediate_state_indices, rand_seed, pool.ring_position, pool.ring_flush,
    )  # fmt: skip
    written = (pool.state_layout, pool.pad_slot_id, pool.update_state)
    how = Options(
        form, scale, lower_bound or 0.0, *written, zero_padding=pool.zero_padding, philox_rounds=philox_rounds, ring_ready=pool.ring_ready
    )
    return run(CALLERS[name], tensors, how, pool.pdl, objections=objections + ring_objections(pool.ring))


def commit(
    name: str, form: Form, state: Tensor, ring: Ring, num_accepted_tokens: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *,
    per_channel: bool, lower_bound: float | None = None, state_layout: str, state_indices: Tensor | None,
    dst_state_indices: Tensor | None, pad_slot_id: int, pdl: bool | None, objections: tuple[str, ...],
) -> Tensor:  # fmt: skip
    """The result of a call that replays accepted tokens of a ring; per_channel: the ring holds a gate per key channel."""
    k, v, g, gk, beta = _by_operand(ring, per_channel)
    tensors = OPERANDS.Tensors(
        state=state, k=k, v=v, g=g, gk=gk, beta=beta, A_log=A_log, dt_bias=dt_bias, state_indices=state_indices,
        dst_state_indices=dst_state_indices, num_accepted_tokens=num_accepted_tokens,
    )  # fmt: skip
    how = Options(form, 1.0, lower_bound or 0.0, state_layout, pad_slot_id, True, commit=True)
    return run(CALLERS[name], tensors, how, pdl, returns=("state",), objections=objections + ring_objections(ring))


def _by_operand(ring: Ring | None, per_channel: bool) -> tuple[Tensor | None, ...]:
    if ring is None or ring_objections(ring):
        return (None,) * 5
    k, v, g, beta = ring
    return (k, v, None, g, beta) if per_channel else (k, v, g, None, beta)
