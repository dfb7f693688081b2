"""Functions of fla.ops, as in flash-linear-attention 0.6, forward only: fused_recurrent functions of gated delta rules and of gated linear
attention, and chunk functions for prompts of them; and a patch of the layer Mamba3. Each function states its arguments, and how it differs
from the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.linear_attention import call as native
from ..shared.operands import takes as _takes
from .arguments import STATES as _STATES
from .arguments import Result
from .arguments import beta_of as _beta
from .arguments import decay_of as _decay
from .arguments import forward_only as _forward_only
from .arguments import gate as _gate
from .arguments import slopes as _slopes
from .arguments import v_first as _v_first
from .mamba3 import patch_mamba3 as patch_mamba3
from .prompts import chunk_comba as chunk_comba
from .prompts import chunk_delta_rule as chunk_delta_rule
from .prompts import chunk_dplr_delta_rule as chunk_dplr_delta_rule
from .prompts import chunk_gated_delta_rule as chunk_gated_delta_rule
from .prompts import chunk_gdn as chunk_gdn
from .prompts import chunk_gdn2 as chunk_gdn2
from .prompts import chunk_gla as chunk_gla
from .prompts import chunk_kda as chunk_kda
from .prompts import chunk_lightning_attn as chunk_lightning_attn
from .prompts import chunk_rwkv7 as chunk_rwkv7
from .prompts import chunk_simple_gla as chunk_simple_gla


def _run(
    function: Callable[..., Tensor], operands: tuple[Tensor | None, ...], q: Tensor, v: Tensor, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, state_v_first: bool, cu_seqlens: Tensor | None, like: Tensor, **options: Any,
) -> Result:  # fmt: skip
    """`function` of a state of its own and `operands`; o is of the dtype of `like`."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences < 0:
        raise ArgumentError(function.__name__, ["cu_seqlens is empty; expected [N + 1]"])
    if initial_state is None:
        last = (v.shape[-1], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[-1])
        state = v.new_zeros((sequences, v.shape[-2], *last), dtype=torch.float32)
    elif initial_state.shape[0] != sequences:
        raise ArgumentError(
            function.__name__, [f"initial_state has {initial_state.shape[0]} states; expected {sequences}, one per sequence"]
        )
    elif not initial_state.is_floating_point():
        raise ArgumentError(
            function.__name__, [f"initial_state is {initial_state.dtype}; expected a floating-point dtype".replace("torch.", "")]
        )
    elif output_final_state:
        state = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    else:
        state = initial_state.float().contiguous()  # only read
    o = v.new_empty(v.shape, dtype=like.dtype)
    function(
        state, *operands, scale=scale, state_layout="vk" if state_v_first else "kv",
        cu_seqlens=cu_seqlens, update_state=bool(output_final_state), out=o, **options,
    )  # fmt: skip
    return o, state if output_final_state else None


@_takes("output_final_state state_v_first use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval", q="[B, T, H, K]", **_STATES)
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Gated DeltaNet, token by token: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H
    g: [B, T, HV], log decay, or gk: [B, T, HV, K], log decay of each key channel; without both, S does not decay
    beta: [B, T, HV], or [B, T, HV, V] for one per value channel; None for 1
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of v's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only, and ignores no argument that it does not support. HV may exceed H with beta=None too.
    Raises NotImplementedError for gv, for g and gk together, and for unknown keywords. Raises ArgumentError (a ValueError) for operands
    that do not fit, or that require grad while grad is enabled.

    Rare arguments:
    use_beta_sigmoid_in_kernel: beta is a logit          allow_neg_eigval: uses twice the sigmoid of beta; needs use_beta_sigmoid_in_kernel
    use_gate_in_kernel: g is a raw gate, whose log decay is -e^A_log softplus(g + dt_bias); without it, A_log and dt_bias do not count
    A_log, dt_bias: [HV]; dt_bias None for none          transpose_state_layout: older name of state_v_first
    """
    name = "fused_recurrent_gated_delta_rule"
    state_v_first = _v_first(state_v_first, kwargs)
    if gv is not None:
        raise NotImplementedError("gv is given; expected None: ssmgen's gated delta rules have no decay per value channel")
    if g is not None and gk is not None:
        raise NotImplementedError(
            "g and gk are both given; expected one: ssmgen's gated delta rules have one decay, per head or per key channel. Add g to gk."
        )
    A_log, dt_bias, _ = _gate(name, use_gate_in_kernel, A_log, dt_bias)
    if use_gate_in_kernel and g is None:
        raise ArgumentError(name, ["g is None with use_gate_in_kernel=True; expected g"])
    beta = _beta(name, beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    function: Callable[..., Tensor] = native.delta_rule
    operands: tuple[Tensor | None, ...] = (q, k, v, beta)
    if g is not None:
        function, operands = native.gated_delta_rule, (q, k, v, g, beta, A_log, dt_bias)
    elif gk is not None:
        function, operands = native.kda, (q, k, v, gk, beta)
    return _run(
        function, operands, q, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens, like=v,
        use_qk_l2norm=use_qk_l2norm_in_kernel, beta_sigmoid=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


@_takes("output_final_state state_v_first use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval", q="[B, T, H, K]", **_STATES)
def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Kimi delta attention, token by token: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          g: [B, T, HV, K], log decay of each key channel
    beta: [B, T, HV], or [B, T, HV, V] for one per value channel
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of v's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only, and ignores no argument that it does not support.
    Raises NotImplementedError for unknown keywords. Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad
    while grad is enabled.

    Rare arguments:
    use_beta_sigmoid_in_kernel: beta is a logit          allow_neg_eigval: uses twice the sigmoid of beta; needs use_beta_sigmoid_in_kernel
    use_gate_in_kernel: g is a raw gate, whose log decay is -e^A_log softplus(g + dt_bias); without it, A_log, dt_bias and lower_bound do
        not count
    lower_bound: the log decay is lower_bound sigmoid(e^A_log (g + dt_bias)) instead, where A_log may be None          A_log: [HV]
    dt_bias: [HV, K] or [HV K]; None for none          transpose_state_layout: older name of state_v_first
    """
    state_v_first = _v_first(state_v_first, kwargs)
    A_log, dt_bias, lower_bound = _gate("fused_recurrent_kda", use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta = _beta("fused_recurrent_kda", beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _run(
        native.kda, (q, k, v, g, beta, A_log, dt_bias), q, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens, like=v,
        lower_bound=lower_bound, use_qk_l2norm=use_qk_l2norm_in_kernel, beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip


@_takes("output_final_state state_v_first use_gate_in_kernel", q="[B, T, H, K]", **_STATES)
def fused_recurrent_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Gated DeltaNet 2, token by token: S <- S D + (w v - S D (b k)) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          g: [B, T, HV, K], log decay of each key channel
    b: [B, T, HV, K], the erase gate of each key channel          w: [B, T, HV, V], the write gate of each value channel
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of v's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only, and ignores no argument that it does not support.
    Raises NotImplementedError for unknown keywords. Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad
    while grad is enabled.

    Rare arguments:
    use_gate_in_kernel: g is a raw gate, whose log decay is -e^A_log softplus(g + dt_bias); without it, A_log, dt_bias and lower_bound do
        not count
    lower_bound: the log decay is lower_bound sigmoid(e^A_log (g + dt_bias)) instead, where A_log may be None          A_log: [HV]
    dt_bias: [HV, K] or [HV K]; None for none          transpose_state_layout: older name of state_v_first
    """
    state_v_first = _v_first(state_v_first, kwargs)
    A_log, dt_bias, lower_bound = _gate("fused_recurrent_gdn2", use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return _run(
        native.gdn2, (q, k, v, g, b, w, A_log, dt_bias), q, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens, like=v,
        lower_bound=lower_bound, use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


@_takes("output_final_state", q="[B, T, H, K]", **_STATES)
def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """DeltaNet, token by token: S <- S + beta (v - S k) k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H
    beta: [B, T, HV], or [B, T, HV, V] for one per value channel; None for 1
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    initial_state: [N, HV, K, V], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of q's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only, HV may exceed H, and q and k are normalised in f32.
    Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad while grad is enabled.
    """
    operands = (q, k, v, _beta("fused_recurrent_delta_rule", beta, v))
    options = {"use_qk_l2norm": use_qk_l2norm_in_kernel}
    return _run(native.delta_rule, operands, q, v, scale, initial_state, output_final_state, False, cu_seqlens, like=q, **options)


@_takes("output_final_state", q="[B, T, H, K]", **_STATES)
def fused_recurrent_comba(
    q: Tensor, k: Tensor, p: Tensor | None, v: Tensor, g: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Comba, token by token: S <- a S + beta (v - S p) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H
    p: [B, T, H, K], the key that reads the state before its decay; None for k          g: [B, T, HV], log decay
    beta: [B, T, HV], or [B, T, HV, V] for one per value channel; None for 1
    use_qk_l2norm_in_kernel: q, k and p are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    initial_state: [N, HV, K, V], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of q's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only.
    Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad while grad is enabled.
    """
    operands = (q, k, v, k if p is None else p, g, _beta("fused_recurrent_comba", beta, v))
    options = {"use_qk_l2norm": use_qk_l2norm_in_kernel}
    return _run(native.comba, operands, q, v, scale, initial_state, output_final_state, False, cu_seqlens, like=q, **options)


@_takes("output_final_state reverse state_v_first", q="[B, T, H, K]", **_STATES)
def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Gated linear attention, token by token: S <- diag(e^gv) S diag(e^gk) + v k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          gk: [B, T, HV, K], log decay of each key channel, or None
    gv: [B, T, HV, V], log decay of each value channel, or None          scale: None for K^-0.5
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of q's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only, and ignores no argument that it does not support.
    Raises NotImplementedError for reverse=True, and for unknown keywords. Raises ArgumentError (a ValueError) for operands that do not fit,
    or that require grad while grad is enabled.

    Rare arguments:
    transpose_state_layout: older name of state_v_first
    """
    state_v_first = _v_first(state_v_first, kwargs)
    _forward_only(reverse)
    return _run(native.gla, (q, k, v, gk, gv), q, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens, like=q)


@_takes("output_final_state reverse state_v_first", q="[B, T, H, K]", **_STATES)
def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Linear attention with a decay per head, token by token: S <- e^g S + v k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H
    g: [B, T, HV], log decay of each token, or g_gamma: [HV], log decay of all tokens; without both, S does not decay
    scale: None for K^-0.5
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of q's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only, and ignores no argument that it does not support.
    Raises NotImplementedError for g and g_gamma together, for reverse=True, and for unknown keywords. Raises ArgumentError (a ValueError)
    for operands that do not fit, or that require grad while grad is enabled.

    Rare arguments:
    transpose_state_layout: older name of state_v_first
    """
    state_v_first = _v_first(state_v_first, kwargs)
    _forward_only(reverse)
    operands = (q, k, v, _decay("simple_gla", g, g_gamma))
    return _run(native.simple_gla, operands, q, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens, like=q)


@_takes("output_final_state reverse", q="[B, T, H, K]", **_STATES)
def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Lightning attention, token by token: S <- e^-s S + v k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, H, V]
    layer_idx, num_layers: the layer, from 0, and the number of layers. Head h of H decays with s = 8 h / H (1 - layer_idx / num_layers)
    scale: None for K^-0.5          initial_state: [N, HV, K, V], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of q's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only.
    Raises NotImplementedError for reverse=True. Raises ArgumentError (a ValueError) for layer_idx out of 0 … num_layers - 1, and for
    operands that do not fit, or that require grad while grad is enabled.
    """
    _forward_only(reverse)
    slope = _slopes("fused_recurrent_lightning_attn", q, layer_idx, num_layers)
    return _run(native.lightning_attn, (q, k, v, slope), q, v, scale, initial_state, output_final_state, False, cu_seqlens, like=q)


@_takes("output_final_state reverse", r="[B, T, H, K]", **_STATES)
def fused_mul_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, scale: float | None = 1.0, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """RWKV-7, token by token: S <- S D - (S kk) (kk a)^T + v k^T, with D = diag(e^w);  o = scale S r.

    r, k: [B, T, H, K]          v: [B, T, H, V]          w: [B, T, H, K], log decay of each key channel          kk, a: [B, T, H, K]
    scale: 1 by default; None for K^-0.5          initial_state: [N, HV, K, V], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of v's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only.
    Raises NotImplementedError for reverse=True. Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad
    while grad is enabled.
    """
    _forward_only(reverse)
    return _run(native.rwkv7, (r, w, k, v, kk, a), r, v, scale, initial_state, output_final_state, False, cu_seqlens, like=v)


@_takes("output_final_state", r="[B, T, H, K]", **_STATES)
def fused_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """RWKV-7, token by token: S <- S D + (S a) b^T + v k^T, with D = diag(e^w);  o = scale S r.

    r, k: [B, T, H, K]          v: [B, T, H, V]          w: [B, T, H, K], log decay of each key channel          a, b: [B, T, H, K]
    scale: None for K^-0.5          initial_state: [N, HV, K, V], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of v's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None with output_final_state=False.
    Unlike fla's function, it is forward only.
    Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad while grad is enabled.
    """
    return fused_recurrent_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


@_takes("output_final_state reverse", q="[B, T, H, K]", **_STATES)
def fused_recurrent_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Diagonal plus low rank, token by token: S <- S D + (S a) b^T + v k^T, with D = diag(e^gk);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, H, V]          gk: [B, T, H, K], log decay of each key channel          a, b: [B, T, H, K]
    scale: None for K^-0.5          initial_state: [N, HV, K, V], f32, f16 or bf16, not written; None for zeros
    cu_seqlens: [N + 1] int32 or int64, start of each packed sequence, with B = 1; without it, N is B

    Every floating tensor is f32, f16 or bf16, each with its own dtype; arithmetic is f32. Returns (o [B, T, HV, V] of v's dtype, the state
    after the last token), the latter f32, new and laid out like initial_state, or None without output_final_state.
    Unlike fla's function, it is forward only.
    Raises NotImplementedError for reverse=True. Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad
    while grad is enabled.
    """
    _forward_only(reverse)
    return _run(native.dplr_delta_rule, (q, k, v, a, b, gk), q, v, scale, initial_state, output_final_state, False, cu_seqlens, like=v)
