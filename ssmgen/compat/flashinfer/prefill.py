"""flashinfer.gdn_prefill's function, as in FlashInfer 0.7.2.

Deliberate differences:
- q, k and v are bf16 or f16 with any strides of tokens and heads, K and V multiples of 16 up to 256; g and beta are f32, bf16 or f16.
- A sequence whose slot is negative or none of the pool's gets a zero output and touches nothing; without output_final_state, it starts
  from zeros. FlashInfer requires slots of the pool: it has no padding. The decode steps' null_slot and zero_padding do not exist here.
- output_state is only written with output_final_state, and always then: a sequence without tokens leaves its initial state there, zeros
  without one, where FlashInfer leaves what was there. Normalised q and k are not rounded on the way.
- Where q has more heads than v, k and v are repeated for them, in copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..shared import delta_prompts as _prompts
from ..shared.gated_delta import new_output as _new_output
from ..shared.operands import takes as _takes

_STATES = "[N or slots, HV, V, K]"


@_takes(
    "output_final_state",
    **dict.fromkeys(("q", "k"), "[tokens, H, K]"), **dict.fromkeys(("v", "output"), "[tokens, HV, V]"),
    **dict.fromkeys(("g", "beta"), "[tokens, HV]"), **dict.fromkeys(("cu_seqlens", "checkpoint_cu_starts"), "[N + 1]"),
    **dict.fromkeys(("initial_state", "output_state"), _STATES), state_checkpoints="[count, HV, V, K]", state_indices="[N]",
)  # fmt: skip
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prompts of the gated delta rule, packed -> output [tokens, HV, V], or (output, states after each sequence) with output_final_state.

    q, k: [tokens, H, K]   v: [tokens, HV, V]; or q: [tokens, HV, K] with fewer heads of k and v, equally many of both
    g: [tokens, HV], the decay itself, 0 … 1, None for one; beta: like it, None for one
    cu_seqlens: [N + 1], needed   scale: None or 0 is K^-0.5
    initial_state: [N, HV, V, K], None for zeros; output_state: the same, None for new ones of f32
    state_indices: [N], distinct slots: initial_state and output_state are pools [slots, HV, V, K], or one pool, which is then updated in
        place. output_final_state needs output_state then, and returns it
    checkpoint_every_n_tokens: n, a multiple of 64: the state after every n tokens of sequence i goes to the rows of state_checkpoints
        [count, HV, V, K] from checkpoint_cu_starts[i] on; other rows stay. With a pool, states are rounded to its dtype
    use_cp, _cp_chunk_len and max_seqlen divide FlashInfer's work: ignored   backend: "auto" or "flashinfer"

    Raises UnsupportedError for another backend, and the errors of ssmgen.chunk_gated_delta_rule.
    """
    name = "FlashInfer's chunk_gated_delta_rule"
    _check_served(name, q, k, v, backend)
    if v.shape[1] < q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    problems = _prompts.objections(v, {"state_indices": state_indices}, {"initial_state": initial_state})
    if state_indices is not None and output_final_state and output_state is None:
        problems.append("output_state is None with state_indices; expected the pool that receives the final states. Pass output_state.")
    if not isinstance(use_cp, bool) and use_cp != "auto":
        problems.append(f"use_cp is {use_cp!r}; expected 'auto', True or False")
    tokens, kept = checkpoint_every_n_tokens, state_checkpoints
    positions = _prompts.places(name, v, tokens, cu_seqlens, kept, checkpoint_cu_starts, problems)
    beta = v.new_ones(()).expand(v.shape[:-1]) if beta is None else beta
    out = _new_output(q, v) if output is None else output
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "scale": scale or None, "use_qk_l2norm": use_qk_l2norm_in_kernel}
    options |= {"positions": positions, "checkpoints": kept} | ({} if g is None else {"linear_gate": True})
    operands, final = _prompts.Operands(q, k, v, g, beta), output_state if output_final_state else None
    if state_indices is None:
        if output_final_state and final is None:
            final = _prompts.states_of(q, v, _prompts.sequences_of(v, cu_seqlens))
        _prompts.scan(operands, out, initial_states=initial_state, last=final, **options)
    elif final is not None and (initial_state is None or initial_state is final):
        started = None if initial_state is None else torch.ones_like(state_indices, dtype=torch.bool)
        _prompts.scan(operands, out, state=final, state_indices=state_indices, has_initial_state=started, **options)
    else:
        before = None if initial_state is None else _prompts.gathered(initial_state, state_indices)
        slots = {} if final is None else {"state": final, "state_indices": state_indices}
        _prompts.scan(operands, out, initial_states=before, **slots, **options)
    return out if final is None else (out, final)


def _check_served(name: str, q: Tensor, k: Tensor, v: Tensor, backend: str) -> None:
    """Raises UnsupportedError for calls that only FlashInfer has kernels for."""
    reasons = [] if backend in ("auto", "flashinfer") else [f"backend is {backend!r}; expected 'auto' or 'flashinfer'"]
    heads = q.shape[1], k.shape[1], v.shape[1]
    if heads[0] > heads[2] and (heads[1] != heads[2] or not heads[2] or heads[0] % heads[2]):
        reasons.append(f"q, k and v have {heads[0]}, {heads[1]} and {heads[2]} heads; expected multiples of both others where q has more")
    if reasons:
        raise UnsupportedError(name, reasons)
