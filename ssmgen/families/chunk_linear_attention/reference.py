"""chunk_linear_attention in plain PyTorch: token by token, by the maths of the decode steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls import prompts
from ...engine.recurrences.attention.reference import one_token
from ...engine.recurrences.attention.switches import Form
from .operands import OF_KEYS, OPERANDS
from .problem import Rule

DELTAS = {Rule.PLAIN: "none", Rule.DELTA: "decayed", Rule.OLD: "old", Rule.LOW_RANK: "old"}  # the names in decode steps


def chunk_linear_attention(
    *, rule: str, gate: str, beta_form: str, l2norm: bool, scale: float, lower_bound: float, state_layout: str, pad_slot_id: int,
    dtype: torch.dtype = torch.float32, **views: Tensor,
) -> None:  # fmt: skip
    """q, k, read, write, alpha: [B, T, HK, K]; gk, erase: [B, T, HV, K]; v, out: [B, T, HV, V]; g, beta: [B, T, HV]; A_log: [HV];
    dt_bias: [HV], or [HV, K] with gk; with cu_seqlens B is 1. States: [·, HV, V, K], or [·, HV, K, V] by the layout "kv". Computes in
    `dtype`; writes out and states, each rounded once.
    """
    kind = Rule(rule)
    form = Form(DELTAS[kind], gate, beta_form, l2norm)
    heads = views["v"].shape[2]
    weights = {n: views[n].to(dtype) for n in ("A_log", "dt_bias") if n in views}

    def walk(S: Tensor, row: int, span: slice, passed: prompts.Passed) -> tuple[Tensor, Tensor]:
        tokens = {n: views[n][row, span].to(dtype) for n in OPERANDS.tokenwise if n in views and n != "out"}
        tokens |= {n: tokens[n].repeat_interleave(heads // tokens[n].shape[1], 1) for n in OF_KEYS if n in tokens}
        out = torch.empty_like(tokens["v"])
        for t in range(len(out)):
            S, out[t] = one_token(S, {n: x[t] for n, x in tokens.items()} | weights, form, scale, lower_bound)
            passed(t + 1, S)
        return S, out

    prompts.walked(views, views["q"].shape[3], state_layout, pad_slot_id, kind.tokens, walk, dtype)
