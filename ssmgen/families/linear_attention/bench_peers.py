"""What is timed beside gated_delta_rule and its relatives: other packages' functions, and of a draft tree the same tokens without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ssmgen

from ...bench import report as reports
from .bench_recurrences import OPS


def flashinfer(case: Any) -> reports.Peer | None:
    """FlashInfer's kernels for a bf16 state of 128 x 128."""
    if (
        case.parents is not None
        or case.op != "gated_delta_rule"
        or case.state.dtype != torch.bfloat16
        or case.state.shape[2:] != (128, 128)
    ):
        return None
    name = "gated_delta_rule" if case.tokens == 1 and not case.intermediates else "gated_delta_rule_mtp"
    function = reports.imported("flashinfer.gdn_kernels.gdn_decode_bf16_state", name)
    if function is None:
        return None
    theirs = {
        "g": "a", "beta": "b", "out": "output", "state": "initial_state_source", "state_indices": "initial_state_indices",
        "dst_state_indices": "output_state_indices", "intermediate_states": "intermediate_states_buffer",
    }  # fmt: skip
    options = {"use_qk_l2norm_in_kernel": True} | ({"disable_state_update": True} if case.intermediates or case.ring else {})
    calls = [{theirs.get(n, n): t for n, t in case.arguments(i).items() if isinstance(t, Tensor)} | options for i in range(case.sets)]
    return lambda i: function(**calls[i])


def fla(case: Any) -> reports.Peer | None:
    """flash-linear-attention's fused_recurrent functions."""
    recurrence = OPS[case.op]
    _, heads, V, K = case.state.shape
    if case.parents is not None or (heads != case.key_heads and not recurrence.fla_groups):
        return None
    module, _, name = recurrence.fla.rpartition(".")
    function = reports.imported(module, name)
    if function is None:
        return None
    parts = case.state.flatten().view(torch.float32).split(case.batch * heads * K * V)
    states = [part.view(case.batch, heads, K, V) for part in parts if len(part) == len(parts[0])]
    calls = []
    for i in range(case.sets):
        call = {n: t[i] for n, t in case.operands.items()} | case.weights | recurrence.fla_options
        call = {n: value for n, value in call.items() if value is not None}
        calls.append(call | {"initial_state": states[i % len(states)], "output_final_state": True})
    return lambda i: function(**calls[i])


def chain(case: Any) -> reports.Peer | None:
    """The same call without its draft tree: each token goes on from the one before it."""
    if case.parents is None:
        return None
    calls = [{n: value for n, value in case.arguments(i).items() if n != "parents"} for i in range(case.sets)]
    bound = [ssmgen.bind(case.function, **call) for call in calls]
    return lambda i: bound[i]()
