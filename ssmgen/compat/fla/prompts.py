"""Functions of fla.ops for prompts, as in flash-linear-attention 0.6, forward only. Import them from `compat.fla`.

cu_seqlens_cpu, chunk_indices, chunk_size, use_graph and max_num_seqs follow from cu_seqlens or divide fla's work, safe_gate makes a promise
on which ssmgen does not rely, and disable_recompute belongs to training: all are ignored. Rows are copied if K or V is not a multiple of
16. To split sequences over ranks, instead of cp_context, call ssmgen.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...families.chunk_linear_attention import call as linear
from ...families.chunk_scan import attention
from ..shared import delta_prompts as _prompts
from ..shared.operands import takes as _takes
from .arguments import STATES as _STATES
from .arguments import Result
from .arguments import beta_of as _beta
from .arguments import decay_of as _decay
from .arguments import gate as _gate
from .arguments import none_of as _none_of
from .arguments import slopes as _slopes
from .arguments import v_first as _v_first
from .widths import any_width as _any_width

_KEYS = {"q": "[B, T, H, K]", "k": "[B, T, H, K]"}
_GATED = {"g": "[B, T, HV, K]", **_KEYS, **_STATES}
_HEADS = {"g": "[B, T, HV]", "beta": "[B, T, HV]", **_KEYS, **_STATES}
_LOW_RANK = {"a": "[B, T, H, K]", "b": "[B, T, H, K]", "k": "[B, T, H, K]", **_STATES}


@_any_width
def _chunked(
    function: Callable[..., Any], operands: tuple[Tensor | None, ...], initial_state: Tensor | None, output_final_state: bool,
    state_v_first: bool, cu_seqlens: Tensor | None, **options: Any,
) -> Result:  # fmt: skip
    """A prompt's o, of q's dtype, and final states, new and f32. operands: q, k and v, and the function's other operands."""
    options["state_layout"] = "vk" if state_v_first else "kv"
    return _prompts.returned(function, operands, output_final_state, initial_states=initial_state, cu_seqlens=cu_seqlens, **options)


@_any_width
def _attention(
    function: Callable[..., Any], operands: tuple[Tensor | None, ...], initial_state: Tensor | None, output_final_state: bool,
    state_v_first: bool, cu_seqlens: Tensor | None, *, scale: float | None,
) -> Result:  # fmt: skip
    """As _chunked, for functions that only know states [·, HV, V, K]: other layouts are transposed before and after."""
    q, _, v, *_ = operands
    assert q is not None and v is not None  # looked at before
    if initial_state is not None and not state_v_first:
        if initial_state.shape != (expected := (_prompts.sequences_of(v, cu_seqlens), v.shape[-2], q.shape[-1], v.shape[-1])):
            raise ArgumentError(
                function.__name__, [f"initial_state is {list(initial_state.shape)}; expected [N, HV, K, V] = {list(expected)}"]
            )
        initial_state = initial_state.transpose(-1, -2)
    out, final = _prompts.returned(function, operands, output_final_state, initial_states=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    return out, final if final is None or state_v_first else final.transpose(-1, -2).contiguous()


def _check_chunk_size(name: str, others: dict[str, Any], sizes: tuple[int, ...] = (16, 32, 64)) -> None:
    """Takes chunk_size out of the keywords: it divides fla's work, and changes no result."""
    size = others.pop("chunk_size", sizes[-1])
    if isinstance(size, bool) or size not in sizes:
        *first, last = map(str, sizes)
        said = f"{', '.join(first)} or {last}" if first else last
        raise ArgumentError(name, [f"chunk_size is {size!r}; expected {said}"])


def _check_power_of_two(name: str, size: object) -> None:
    """The same of functions that take any power of two, or None."""
    if size is not None and not (isinstance(size, int) and not isinstance(size, bool) and size > 0 and size & (size - 1) == 0):
        raise ArgumentError(name, [f"chunk_size is {size!r}; expected a power of 2"])


def _whole(cp_context: object, intermediate: bool = False) -> None:
    if cp_context is not None:
        raise NotImplementedError("cp_context is given; expected None. To split sequences over ranks, call ssmgen.distributed.")
    if intermediate:
        raise NotImplementedError(
            "return_intermediate_states is True; expected False. Call ssmgen's own function with checkpoint_positions."
        )


def _raw_gate(
    name: str, in_kernel: bool, others: dict[str, Any], safe_gate: bool = False, lower_bound: float | None = None
) -> dict[str, Any]:
    """The native functions' arguments for a raw gate; takes A_log and dt_bias out of the keywords."""
    A_log, dt_bias, bound = _gate(name, in_kernel, others.pop("A_log", None), others.pop("dt_bias", None), lower_bound)
    if in_kernel and safe_gate and bound is None:
        raise ArgumentError(name, ["lower_bound is None with safe_gate=True and use_gate_in_kernel=True; expected a number"])
    return {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": bound}


@_takes("output_final_state state_v_first use_beta_sigmoid_in_kernel allow_neg_eigval", **_HEADS)
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: Any = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Gated DeltaNet over prompts, per token: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          g: [B, T, HV], log decay, at most 0
    beta: [B, T, HV]; None for 1          use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6)
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16; None for zeros          scale: None for K^-0.5

    q, k and v are bf16 or f16, one dtype; g and beta are f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32
    states, or None without output_final_state). Unlike in fla, states between chunks are f32, and normed q and k are not rounded. Raises
    NotImplementedError for cp_context and unknown keywords, and ArgumentError if g is None or if operands do not fit or require grad.

    Rare arguments:
    use_beta_sigmoid_in_kernel: beta is a logit          allow_neg_eigval: uses twice the sigmoid of beta; needs use_beta_sigmoid_in_kernel
    use_gate_in_kernel: a keyword: g is a raw gate, whose log decay is -e^A_log softplus(g + dt_bias)
    A_log, dt_bias: keywords, [HV]          chunk_size: 16, 32 or 64; ignored
    """
    name = "chunk_gated_delta_rule"
    _whole(cp_context)
    _check_chunk_size(name, kwargs)
    if not isinstance(in_kernel := kwargs.pop("use_gate_in_kernel", False), bool):
        raise ArgumentError(name, [f"use_gate_in_kernel is a {type(in_kernel).__name__}; expected True or False"])
    raw = _gate(name, in_kernel, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    state_v_first = _v_first(state_v_first, kwargs)
    if g is None:
        raise ArgumentError(name, ["g is None; expected a decay. Without one, call chunk_delta_rule."])
    return _chunked(
        _prompts.chunk_gated_delta_rule, (q, k, v, g, _beta(name, beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)), initial_state,
        output_final_state, state_v_first, cu_seqlens, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel, A_log=raw[0], dt_bias=raw[1],
        beta_sigmoid=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule


@_takes("output_final_state", beta="[B, T, HV]", **_KEYS, **_STATES)
def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """DeltaNet over prompts, per token: S <- S + beta (v - S k) k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          beta: [B, T, HV]; None for 1
    use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6)          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    initial_state: [N, HV, K, V], f32, f16 or bf16; None for zeros          scale: None for K^-0.5

    q, k and v are bf16 or f16, one dtype; beta is f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32
    states, or None without output_final_state). Unlike in fla, states between chunks are f32, and normed q and k are not rounded. Raises
    NotImplementedError for unknown keywords, and ArgumentError for operands that do not fit or require grad. chunk_size is ignored.
    """
    _check_chunk_size("chunk_delta_rule", kwargs)
    _none_of(kwargs)
    return _chunked(
        _prompts.chunk_delta_rule, (q, k, v, beta), initial_state, output_final_state, False, cu_seqlens, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


@_takes(
    "output_final_state state_v_first use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate return_intermediate_states",
    beta="[B, T, HV]", **_GATED,
)  # fmt: skip
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False, lower_bound: float | None = None,
    disable_recompute: bool = False, return_intermediate_states: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Kimi delta attention over prompts, per token: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          g: [B, T, HV, K], log decay of each key channel, at most 0
    beta: [B, T, HV]; None for 1          use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6)
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16; None for zeros          scale: None for K^-0.5

    q, k and v are bf16 or f16, one dtype; g and beta are f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32
    states, or None without output_final_state). Unlike in fla, states between chunks are f32, and normed q and k are not rounded. Raises
    NotImplementedError for cp_context, return_intermediate_states and unknown keywords, and ArgumentError for operands that do not fit or
    require grad.

    Rare arguments:
    use_beta_sigmoid_in_kernel: beta is a logit          allow_neg_eigval: uses twice the sigmoid of beta; needs use_beta_sigmoid_in_kernel
    use_gate_in_kernel: g is a raw gate, with log decay -e^A_log softplus(g + dt_bias); else A_log, dt_bias and lower_bound do not count
    lower_bound: log decay lower_bound sigmoid(e^A_log (g + dt_bias)) instead; A_log may be None          chunk_size: 32 or 64; ignored
    A_log: a keyword, [HV]          dt_bias: a keyword, [HV, K] or [HV K]          safe_gate: with a raw gate, only requires lower_bound
    """
    name = "chunk_kda"
    _whole(cp_context, return_intermediate_states)
    _check_chunk_size(name, kwargs, (32, 64))
    raw = _raw_gate(name, use_gate_in_kernel, kwargs, safe_gate, lower_bound)
    state_v_first = _v_first(state_v_first, kwargs)
    return _chunked(
        linear.chunk_kda, (q, k, v, g, _beta(name, beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)), initial_state,
        output_final_state, state_v_first, cu_seqlens, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, **raw,
    )  # fmt: skip


@_takes(
    "output_final_state state_v_first use_gate_in_kernel safe_gate return_intermediate_states",
    b="[B, T, HV, K]", w="[B, T, HV, V]", **_GATED,
)  # fmt: skip
def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False, lower_bound: float | None = None,
    disable_recompute: bool = False, return_intermediate_states: bool = False, state_v_first: bool = False, cp_context: Any = None,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Gated DeltaNet 2 over prompts, per token: S <- S D + (w v - S D (b k)) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          g: [B, T, HV, K], log decay of each key channel, at most 0
    b: [B, T, HV, K], the erase gate of each key channel          w: [B, T, HV, V], the write gate of each value channel
    use_qk_l2norm_in_kernel: divides q and k by sqrt(|x|^2 + 1e-6)          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16; None for zeros          scale: None for K^-0.5

    q, k and v are bf16 or f16, one dtype; gates are f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32
    states, or None without output_final_state). Unlike in fla, states between chunks are f32, and normed q and k are not rounded. Raises
    NotImplementedError for cp_context, return_intermediate_states and unknown keywords, and ArgumentError for operands that do not fit or
    require grad.

    Rare arguments:
    use_gate_in_kernel: g is a raw gate, with log decay -e^A_log softplus(g + dt_bias); else A_log, dt_bias and lower_bound do not count
    lower_bound: log decay lower_bound sigmoid(e^A_log (g + dt_bias)) instead; A_log may be None          chunk_size: 64; ignored
    A_log: a keyword, [HV]          dt_bias: a keyword, [HV, K] or [HV K]          safe_gate: with a raw gate, only requires lower_bound
    """
    _whole(cp_context, return_intermediate_states)
    _check_chunk_size("chunk_gdn2", kwargs, (64,))
    raw = _raw_gate("chunk_gdn2", use_gate_in_kernel, kwargs, safe_gate, lower_bound)
    state_v_first = _v_first(state_v_first, kwargs)
    return _chunked(
        linear.chunk_gdn2, (q, k, v, g, b, w), initial_state, output_final_state, state_v_first, cu_seqlens, values=(2, 5), scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel, **raw,
    )  # fmt: skip


@_takes("output_final_state", p="[B, T, H, K]", **_HEADS)
def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Comba over prompts, per token: S <- a S + beta (v - S p) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H
    p: [B, T, H, K], the key that reads the state before its decay; None for k          g: [B, T, HV], log decay, at most 0
    beta: [B, T, HV]; None for 1          use_qk_l2norm_in_kernel: divides q, k and p by sqrt(|x|^2 + 1e-6)
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B          initial_state: [N, HV, K, V], f32, f16 or bf16; None for zeros
    scale: None for K^-0.5

    q, k, v and p are bf16 or f16, one dtype; g and beta are f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final
    f32 states, or None without output_final_state). Unlike in fla, states between chunks are f32, and normed q and k are not rounded.
    Raises ArgumentError for operands that do not fit or require grad.
    """
    operands = (q, k, v, k if p is None else p, g, _beta("chunk_comba", beta, v))
    return _chunked(
        linear.chunk_comba, operands, initial_state, output_final_state, False, cu_seqlens, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


@_takes("output_final_state state_v_first", **_GATED)
def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Gated linear attention over prompts, per token: S <- S D + v k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H          g: [B, T, HV, K], log decay of each key channel, at most 0
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16; None for zeros          scale: None for K^-0.5

    q, k and v are bf16 or f16, one dtype; g is f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32 states,
    or None without output_final_state). Unlike in fla, states between chunks are f32. Raises ArgumentError for operands that do not fit or
    require grad.
    """
    return _chunked(linear.chunk_gla, (q, k, v, g), initial_state, output_final_state, state_v_first, cu_seqlens, scale=scale)


@_takes("output_final_state", q="[B, T, H, K]", gk="[B, T, H, K]", **_LOW_RANK)
def chunk_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False,
    chunk_size: int | None = None, disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Diagonal plus low rank over prompts, per token: S <- S D + (S a) b^T + v k^T, with D = diag(e^gk);  o = scale S q.

    q, k, a, b: [B, T, H, K]          v: [B, T, H, V]          gk: [B, T, H, K], log decay of each key channel, at most 0
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B          initial_state: [N, HV, K, V], f32, f16 or bf16; None for zeros
    scale: None for K^-0.5

    q, k, v, a and b are bf16 or f16, one dtype; gk is f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32
    states, or None without output_final_state). Unlike in fla, states between chunks are f32. Raises NotImplementedError for cp_context and
    unknown keywords, and ArgumentError for operands that do not fit or require grad. lower_bound must be below 0, and is ignored.
    """
    _none_of(kwargs)
    return _low_rank(
        "chunk_dplr_delta_rule", (q, k, v, a, b, gk), scale, initial_state, output_final_state, cu_seqlens, chunk_size, cp_context,
        lower_bound,
    )  # fmt: skip


@_takes("output_final_state", r="[B, T, H, K]", w="[B, T, H, K]", **_LOW_RANK)
def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False,
    chunk_size: int | None = None, disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None,
) -> Result:  # fmt: skip
    """RWKV-7 over prompts, per token: S <- S D + (S a) b^T + v k^T, with D = diag(e^w);  o = scale S r.

    r, k, a, b: [B, T, H, K]          v: [B, T, H, V]          w: [B, T, H, K], log decay of each key channel, at most 0
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B          initial_state: [N, HV, K, V], f32, f16 or bf16; None for zeros
    scale: 1 by default; None for K^-0.5

    r, k, v, a and b are bf16 or f16, one dtype; w is f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of r's dtype, final f32
    states, or None without output_final_state). Unlike in fla, states between chunks are f32. Raises NotImplementedError for cp_context,
    and ArgumentError for operands that do not fit or require grad. lower_bound must be below 0, and is ignored.
    """
    return _low_rank(
        "chunk_rwkv7", (r, k, v, a, b, w), scale, initial_state, output_final_state, cu_seqlens, chunk_size, cp_context, lower_bound
    )


def _low_rank(
    name: str, operands: tuple[Tensor, ...], scale: float | None, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, chunk_size: int | None, cp_context: object, lower_bound: float | None,
) -> Result:  # fmt: skip
    _whole(cp_context)
    _check_power_of_two(name, chunk_size)
    if lower_bound is not None and not lower_bound < 0:
        raise ArgumentError(name, [f"lower_bound is {lower_bound}; expected below 0, like a log decay"])
    return _chunked(linear.chunk_dplr_delta_rule, operands, initial_state, output_final_state, False, cu_seqlens, scale=scale)


@_takes("output_final_state state_v_first", g="[B, T, HV]", g_gamma="[HV]", **_KEYS, **_STATES)
def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Linear attention with a decay per head over prompts, per token: S <- e^g S + v k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V], HV a multiple of H
    g: [B, T, HV], log decay of each token, or g_gamma: [HV], log decay of all tokens, at most 0; without both, S does not decay
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    initial_state: [N, HV, K, V], or with state_v_first [N, HV, V, K], f32, f16 or bf16; None for zeros          scale: None for K^-0.5

    q, k and v are bf16, f16 or f32, one dtype; g and g_gamma are f32, bf16 or f16; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype,
    final f32 states, or None without output_final_state). Unlike in fla, states between chunks are f32. Raises NotImplementedError for g
    and g_gamma together and unknown keywords, and ArgumentError for operands that do not fit or require grad.
    """
    _check_power_of_two("chunk_simple_gla", kwargs.pop("chunk_size", None))
    state_v_first = _v_first(state_v_first, kwargs)
    operands = (q, k, v, _decay("chunk_simple_gla", g, g_gamma))
    return _attention(attention.chunk_simple_gla, operands, initial_state, output_final_state, state_v_first, cu_seqlens, scale=scale)


@_takes("output_final_state", **_KEYS, **_STATES)
def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Lightning attention over prompts, per token: S <- e^-s S + v k^T;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, H, V]          scale: None for K^-0.5
    layer_idx, num_layers: the layer, from 0, and the number of layers. Head h of H decays with s = 8 h / H (1 - layer_idx / num_layers)
    cu_seqlens: [N + 1], packed sequences, B = 1; else N is B          initial_state: [N, HV, K, V], f32, f16 or bf16; None for zeros

    q, k and v are bf16, f16 or f32, one dtype; K, V up to 256. Returns (o [B, T, HV, V] of q's dtype, final f32 states, or None without
    output_final_state). Unlike in fla, states between chunks are f32. Raises NotImplementedError for unknown keywords, and ArgumentError
    for layer_idx out of 0 … num_layers - 1, or if operands do not fit or require grad.
    """
    _check_power_of_two("chunk_lightning_attn", kwargs.pop("chunk_size", None))
    _none_of(kwargs)
    slope = _slopes("chunk_lightning_attn", q, layer_idx, num_layers)
    return _attention(attention.chunk_lightning_attn, (q, k, v, slope), initial_state, output_final_state, False, cu_seqlens, scale=scale)
