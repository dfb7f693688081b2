"""Functions of other packages that are timed against gated_delta_rule and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from ...bench import report as reports
from ...bench.case import Case, Launch
from .bench_recurrences import OPS


def flashinfer(case: Case) -> Launch | None:
    """FlashInfer's kernels for a bf16 state of 128 x 128."""
    state, plain = case.shared["state"], case.at.tokens == 1 and not case.at.intermediates
    if case.at.tree or case.at.op != "gated_delta_rule" or state.dtype != torch.bfloat16 or state.shape[2:] != (128, 128):
        return None
    name = "gated_delta_rule" if plain else "gated_delta_rule_mtp"
    function = reports.imported("flashinfer.gdn_kernels.gdn_decode_bf16_state", name)
    if function is None:
        return None
    theirs = {
        "g": "a", "beta": "b", "out": "output", "state": "initial_state_source", "state_indices": "initial_state_indices",
        "dst_state_indices": "output_state_indices", "intermediate_states": "intermediate_states_buffer",
    }  # fmt: skip
    options = {"use_qk_l2norm_in_kernel": True} | ({"disable_state_update": True} if case.at.intermediates or case.at.ring else {})
    calls = [{theirs.get(n, n): t for n, t in call.items() if isinstance(t, Tensor)} | options for call in case.calls]
    return lambda i: function(**calls[i])


def fla(case: Case) -> Launch | None:
    """flash-linear-attention's fused_recurrent functions."""
    recurrence, state = OPS[case.at.op], case.shared["state"]
    _, heads, V, K = state.shape
    if case.at.tree or (heads != case.at.key_heads and not recurrence.fla_groups):
        return None
    module, _, name = recurrence.fla.rpartition(".")
    function = reports.imported(module, name)
    if function is None:
        return None
    parts = state.flatten().view(torch.float32).split(case.at.batch * heads * K * V)
    states = [part.view(case.at.batch, heads, K, V) for part in parts if len(part) == len(parts[0])]
    calls = []
    for i in range(case.sets):
        call = {n: t[i] for n, t in case.more["operands"].items()} | case.more["weights"] | dict(recurrence.fla_options)
        call = {n: value for n, value in call.items() if value is not None}
        calls.append(call | {"initial_state": states[i % len(states)], "output_final_state": True})
    return lambda i: function(**calls[i])
