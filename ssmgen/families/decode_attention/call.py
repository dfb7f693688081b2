"""decode_attention: the attention of one new token per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES
from ...calls.dispatch import by_name, callers
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.scalars import NOT_NEGATIVE, number
from ...errors import ArgumentError
from ...spec.arguments import divisor
from .operands import OPERANDS
from .reference import decode_attention as reference
from .spec import MOST_DIM, MOST_GROUP, OPERATOR, DecodeAttentionProblem, DecodeAttentionSpec

CACHES = ("key_cache", "value_cache")
LOG2_E = math.log2(math.e)


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    eps: float = 1e-6
    unit_offset: bool = False
    key_scale: float = 1.0
    scale: float | None = None


@operator(like="q", eps=NOT_NEGATIVE, key_scale=number())
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    key_scale: float = 1.0,
    gate: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """out = softmax(scale q' key_cache^T) value_cache, over the keys up to the new one, which is first stored: one launch per layer.

    q' = rotate(norm(q)); key_cache[b, h, position[b]] = rotate(key_scale norm(k)); value_cache[b, h, position[b]] = v.

    q, out: [batch, q_heads, head_dim]; k, v: [batch, kv_heads, head_dim]; f32, f16 or bf16, one dtype. Query heads are a multiple, up to
        64, of key heads; consecutive ones share a key head. Sequences and heads may have any stride
    head_dim: a multiple of 8, up to 256
    key_cache, value_cache: [batch, kv_heads, room, head_dim] f32, f16 or bf16; row position[b] is written in place. Their memory and each
        key begin at multiples of 16 bytes
    position: [batch] int64: the number of keys that the sequence has. Padding: a position that is not in 0 … room - 1 gives zero output and
        touches no cache
    cos, sin: [batch, rotary] or [1, rotary]: the first `rotary` channels are rotated, i together with i + rotary / 2; None for no rotation
    q_norm, k_norm: [head_dim] weights of an RMSNorm of each head, before the rotation; None for no norm
    eps, unit_offset: of these norms; with unit_offset, 1 + weight multiplies
    gate: [batch, q_heads, head_dim]: out is multiplied by sigmoid(gate)
    scale: of scores; None for head_dim^-0.5
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Arithmetic is f32. The new key and value are rounded to the caches' dtype before they are used. The batch changes no bit of a sequence.

    Returns out. CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Vaswani et al. 2017 (arXiv 1706.03762); Su et al. 2021 (arXiv 2104.09864); Milakov & Gimelshein 2018 (arXiv 1805.02867).
    """
    if out is None and isinstance(q, Tensor):
        out = q.new_empty(q.shape)
    tensors = OPERANDS.Tensors(q, k, v, key_cache, value_cache, position, cos, sin, q_norm, k_norm, gate, out)
    return run(CALLER, tensors, Options(eps, unit_offset, key_scale, scale), pdl)


def _check_dtypes(named: Mapping[str, Tensor], problems: list[str]) -> None:
    for names in (("q", "k", "v", "out"), CACHES, ("cos", "sin"), ("q_norm", "k_norm")):
        given = [named[n].dtype for n in names if n in named]
        if len({*given}) > 1:
            words = " and ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in given))
            problems.append(f"{', '.join(names)} are {words}; expected one dtype")


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands, with cos and sin for each sequence. Adds errors to `problems`; the result is usable only if there are none."""
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "q", problems, "attention of a decode step")
    for one, other in (("cos", "sin"), ("q_norm", "k_norm")):
        if (one in named) != (other in named):
            problems.append(f"one of {one} and {other} is None; expected both or neither")
    if options.unit_offset and "q_norm" not in named:
        problems.append("unit_offset is True and q_norm is None; expected q_norm and k_norm")
    q, k, cache = named["q"], named["k"], named["key_cache"]
    if q.dim() != 3 or k.dim() != 3 or cache.dim() != 4:
        problems.append(
            f"q is {list(q.shape)}, k is {list(k.shape)}, key_cache is {list(cache.shape)}; expected [batch, q_heads, head_dim], "
            "[batch, kv_heads, head_dim] and [batch, kv_heads, room, head_dim]"
        )
        return {}
    (batch, q_heads, d), kv_heads = q.shape, k.shape[1]
    sizes = {"batch": batch, "q_head": q_heads, "head": kv_heads, "d": d, "key": cache.shape[2]}
    if "cos" in named and named["cos"].dim() == 2:
        sizes["r"] = named["cos"].shape[1]
        if sizes["r"] % 2 or not 0 < sizes["r"] <= d:
            problems.append(f"cos is {list(named['cos'].shape)}; expected an even rotary_dim up to head_dim {d}")
    elif "cos" in named:
        problems.append(f"cos is {list(named['cos'].shape)}; expected [batch, rotary_dim] or [1, rotary_dim]")
    if not 8 <= d <= MOST_DIM or d % 8:
        problems.append(f"q is {list(q.shape)}, of head_dim {d}; expected a multiple of 8 up to {MOST_DIM}")
    if not kv_heads or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MOST_GROUP:
        problems.append(f"q has {q_heads} heads and k has {kv_heads}; expected a multiple of k's heads, up to {MOST_GROUP} times as many")
    _check_dtypes(named, problems)
    fits = checks.check_shapes(OPERANDS, named, sizes, problems)
    if not fits or ("cos" in named and "r" not in sizes):
        return {}
    for name, t in named.items():
        if t.dim() > 1 and t.stride(-1) != 1:
            problems.append(f"{name} has strides {list(t.stride())}; expected 1 for its last axis. Pass a contiguous tensor.")
        if any(s >= 2**32 for s in t.stride()[1:]):
            problems.append(f"{name} has strides {list(t.stride())}; expected strides below 2^32 elements after the first axis")
        if name in ("q_norm", "k_norm") and t.stride(0) != 1:
            problems.append(f"{name} has strides {list(t.stride())}; expected a contiguous weight")
    problems += [
        f"{n} has strides {list(named[n].stride())}; expected keys at multiples of 16 bytes"
        for n in CACHES
        if any(s * named[n].element_size() % 16 for s in named[n].stride()[:-1])
    ]
    if cache.shape[2] >= 2**31:
        problems.append(f"key_cache is {list(cache.shape)}; expected room for fewer than 2^31 keys")
    checks.check_distinct(named, OPERANDS.written, problems)
    return {name: t.expand(batch, -1) if name in ("cos", "sin") else t for name, t in named.items()}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> DecodeAttentionProblem:
    """The problem of checked operands. Raises ArgumentError for caches that do not begin at a multiple of 16 bytes."""
    if wrong := [name for name in CACHES if pointers[name] % 16]:
        raise ArgumentError(
            OPERATOR, [f"{name} does not begin at a multiple of 16 bytes; expected an aligned cache. Copy it." for name in wrong]
        )
    q, k = views["q"], views["k"]
    dtypes = {
        name: DTYPES[views[given].dtype] for name, given in (("angles", "cos"), ("norm", "q_norm"), ("gate", "gate")) if given in views
    }
    return DecodeAttentionProblem(
        head_dim=q.shape[2],
        group=q.shape[1] // k.shape[1],
        x=DTYPES[q.dtype],
        cache=DTYPES[views["key_cache"].dtype],
        rotary=views["cos"].shape[1] if "cos" in views else 0,
        unit_offset=options.unit_offset,
        **dtypes,
    )


def size_of(views: Mapping[str, Tensor]) -> int:
    """Key heads of all sequences."""
    return views["k"].shape[0] * views["k"].shape[1]


def kernel_values(spec: DecodeAttentionSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    scale = spec.head_dim**-0.5 if options.scale is None else options.scale
    values: dict[str, int | float] = {"scale_log2": scale * LOG2_E, "key_scale": options.key_scale, "eps": options.eps}
    values |= {"room": views["key_cache"].shape[2], **divisor("kv_heads", views["k"].shape[1])}
    return values | OPERANDS.stride_values(spec, views)


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of,
    grid_of=lambda spec, views: size_of(views) * spec.chunks * spec.blocks,
    values_of=kernel_values,
)
(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, by_name(reference)).values()
