"""Calls of flash-linear-attention's two functions of each linear attention: of prompts, and of the same tokens one by one."""

from __future__ import annotations

from typing import Any

from delta_oracles import F32, HK, HV, K, V, randn
from torch import Tensor
from torch.nn.functional import logsigmoid

from ssmgen.compat import fla


def bag(*lead: int) -> dict[str, Tensor]:
    """Operands of all functions. Keys, and operands used as keys, are slices of one row and have length about one."""
    keys = (randn(*lead, 5, HK, K, seed=1, dtype=F32) / K**0.5).bfloat16().unbind(-3)
    x = dict(zip(("q", "k", "p", "kk", "kb"), keys, strict=True))
    x |= {"v": randn(*lead, HV, V, seed=2), "v_narrow": randn(*lead, HK, V, seed=2)}
    x |= {"g": logsigmoid(randn(*lead, HV, seed=3, dtype=F32) + 2), "gk": logsigmoid(randn(*lead, HV, K, seed=4, dtype=F32) + 2)}
    x |= {"gk_narrow": x["gk"][..., :HK, :], "beta": randn(*lead, HV, seed=5).sigmoid(), "logit": randn(*lead, HV, seed=6)}
    x |= {"raw": randn(*lead, HV, K, seed=7), "A_log": randn(HV, seed=8, dtype=F32) / 2, "dt_bias": randn(HV * K, seed=9, dtype=F32)}
    x |= {"erase": randn(*lead, HV, K, seed=10).sigmoid(), "write": randn(*lead, HV, V, seed=11).sigmoid(), "gamma": x["g"][0, 0]}
    return x


RAW = "g=raw A_log dt_bias"
KDA: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
# flash-linear-attention's two functions: the name after chunk_ and fused_recurrent_, the operands (name=operand if renamed), the options.
CASES = {
    "kda": ("kda", "q k v g=gk beta", {}),
    "kda-raw": ("kda", f"q k v {RAW} beta=logit", KDA | {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}),
    "kda-bounded": ("kda", f"q k v {RAW} beta=logit", KDA | {"use_gate_in_kernel": True, "lower_bound": -5.0, "scale": 0.3}),
    "kda-bounded-bare": ("kda", "q k v g=raw beta", KDA | {"use_gate_in_kernel": True, "lower_bound": -2.0}),
    "kda-gate-given": ("kda", "q k v g=gk A_log dt_bias beta", {"lower_bound": -2.0}),  # which these three then say nothing of
    "kda-twice": ("kda", "q k v g=gk beta=logit", {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}),
    "gdn2": ("gdn2", "q k v g=gk b=erase w=write", {}),
    "gdn2-raw": ("gdn2", f"q k v {RAW} b=erase w=write", KDA | {"use_gate_in_kernel": True}),
    "comba": ("comba", "q k v p g beta", {"use_qk_l2norm_in_kernel": True}),
    "comba-bare": ("comba", "q k v p= g beta=", {}),
    "gla": ("gla", "q k v {}=gk", {"scale": 0.5}),
    "rwkv7": ("rwkv7", "r=q w=gk_narrow k v=v_narrow a=kk b=kb", {"scale": 1.0}),
    "dplr": ("dplr_delta_rule", "q k v=v_narrow a=kk b=kb gk=gk_narrow", {}),
    "simple_gla": ("simple_gla", "q k v g", {}),
    "simple_gla-constant": ("simple_gla", "q k v g_gamma=gamma", {"scale": 0.5}),
    "simple_gla-none": ("simple_gla", "q k v", {}),
    "lightning_attn": ("lightning_attn", "q k v=v_narrow", {"layer_idx": 1, "num_layers": 4}),
}
V_FIRST = ("kda", "gdn2", "gla", "simple_gla")  # functions that take state_v_first


def call_of(case: str, chunk: bool, *lead: int) -> dict[str, Any]:
    """One of the two functions' keywords: the names of an operand may differ."""
    _, takes, how = CASES[case]
    x = bag(*lead)
    words = [word.format("g" if chunk else "gk").partition("=") for word in takes.split()]
    return {name: x[other or name] if other or not equals else None for name, equals, other in words} | how


def both(case: str, options: dict[str, Any], *lead: int) -> tuple[Any, Any]:
    """(result of the prompt function, result of the token function)."""
    name, *_ = CASES[case]
    return tuple(
        getattr(fla, f"{kind}_{name}")(**call_of(case, kind == "chunk", *lead), **options) for kind in ("chunk", "fused_recurrent")
    )
