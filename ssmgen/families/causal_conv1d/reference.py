"""causal_conv1d in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.short_conv_reference import convolve, finished, valid_slot
from ...engine.window import reach_of


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    silu: bool = False,
    seq_idx: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    final_states: Tensor | None = None,
    conv_states: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    residual: Tensor | None = None,
    outer_residual: Tensor | None = None,
    pad_slot_id: int = -1,
    dilation: int = 1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """x, out, gates, residuals: [batch, dim, length], with query_start_loc [1, dim, tokens]; weight [dim, width]; bias [dim];
    states [·, dim, width - 1]. Computes in `dtype`; writes out, rounded once (and once more by its gate and each residual), and the states,
    which are copies of inputs, of products with the gate.
    """
    reach = reach_of(weight.shape[1], dilation)
    x = x if input_gate is None else x * input_gate
    starts = None if query_start_loc is None else query_start_loc.tolist()
    for s in range(x.shape[0] if starts is None else len(starts) - 1):
        row, span = (s, slice(None)) if starts is None else (0, slice(starts[s], starts[s + 1]))
        tokens, result = x[row, :, span], out[row, :, span]
        count = tokens.shape[1]
        if count == 0:
            if final_states is not None:
                final_states[s] = 0 if initial_states is None else initial_states[s]
            continue
        slot = s if conv_state_indices is None else int(conv_state_indices[s])
        if conv_states is not None and conv_state_indices is not None and not valid_slot(slot, conv_states.shape[0], pad_slot_id):
            result.zero_()
            continue
        gate, *added = (None if t is None else t[row, :, span] for t in (output_gate, residual, outer_residual))
        past = x.new_zeros(x.shape[1], reach - 1)
        if initial_states is not None:
            past = initial_states[s]
        elif conv_states is not None and has_initial_state is not None and bool(has_initial_state[s]):
            past = conv_states[slot]
        inputs = torch.cat([past, tokens], 1)
        if seq_idx is None:
            result.copy_(finished(convolve(inputs, weight, bias, silu, dtype, dilation), x.dtype, gate, added))
        else:  # inputs before the row belong to the sequence of its first token
            ids = torch.cat([seq_idx[s, :1].expand(reach - 1), seq_idx[s]])
            for t in range(count):
                same = ids[t : t + reach] == ids[t + reach - 1]
                window = torch.where(same, inputs[:, t : t + reach], 0)
                factor, *terms = (None if r is None else r[:, t : t + 1] for r in (gate, *added))
                y = finished(convolve(window, weight, bias, silu, dtype, dilation), x.dtype, factor, terms)
                result[:, t] = y[:, 0] if ids[t + reach - 1] >= 0 else 0
            inputs = torch.where(ids == ids[-1], inputs, 0)
        kept = inputs[:, inputs.shape[1] - (reach - 1) :].clone()
        if final_states is not None:
            final_states[s] = kept
        if conv_states is not None:
            conv_states[slot] = kept
