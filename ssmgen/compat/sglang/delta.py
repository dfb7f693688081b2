"""SGLang's functions for prompts of gated delta rules and of Kimi delta attention, as in SGLang 0.5.23: the functions that its
Triton backends call, and the method of the gated delta rules' backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...families.chunk_linear_attention.call import chunk_kda as _chunk_kda
from ..shared import delta_prompts as _prompts
from ..shared.gated_delta import new_output as _new_output
from ..shared.gated_delta import shaped as _shaped
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement


@_takes("head_first inplace_update", **_prompts.PACKED, initial_state="[slots, HV, V, K]", initial_state_indices="[N]")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Gated DeltaNet over prompts, on a pool of states, per token: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    g: [B, T, HV], log decay, at most 0          beta: [B, T, HV]; f32, bf16 or f16 each
    initial_state: [slots, HV, V, K], a pool, which receives the states after each sequence, unless inplace_update is False
    initial_state_indices: [N], slots; a negative one, or one out of the pool, is padding: a zero output, and no state is touched
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5

    Returns (output [B, T, HV, V] of q's dtype, None, states before each chunk [B, chunks, HV, V, K] of the pool's dtype). Chunks have 64
    tokens, from each sequence's start, in the order of the sequences. chunks is the largest number that T tokens of N sequences can have;
    states after the last chunk are undefined.
    Raises UnsupportedError without a pool and its indices, and with head_first. Raises ArgumentError (a ValueError) for operands that do
    not fit.
    """
    reasons = [] if not head_first else ["head_first is True; expected False: operands are [B, T, heads, …]"]
    pool, indices = _pool_of("sglang's chunk_gated_delta_rule", v, initial_state, initial_state_indices, cu_seqlens, reasons)
    operands = _prompts.Operands(q, k, v, g, beta)
    out, chunks = _with_chunks(
        _prompts.chunk_gated_delta_rule, operands, pool, indices, cu_seqlens, inplace_update, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, None, chunks


def _pool_of(
    name: str, v: Tensor, pool: Tensor | None, indices: Tensor | None, cu_seqlens: Tensor | None, reasons: list[str]
) -> tuple[Tensor, Tensor]:
    """The pool, and the slots of the sequences. Raises UnsupportedError without one of them and for `reasons`, ArgumentError otherwise."""
    needed = {"initial_state": pool, "initial_state_indices": indices}
    reasons += [f"{what} is None; expected a pool of states" for what, t in needed.items() if t is None]
    if reasons or pool is None or indices is None:
        raise UnsupportedError(name, reasons)
    if problems := _prompts.objections(v, {"initial_state_indices": indices, "cu_seqlens": cu_seqlens}, {"initial_state": pool}):
        raise ArgumentError(name, problems)
    return pool, indices[: _prompts.sequences_of(v, cu_seqlens)]


def _with_chunks(
    function: Callable[..., Any], operands: Sequence[Tensor | None], pool: Tensor, slots: Tensor, cu_seqlens: Tensor | None, in_place: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, states before each chunk [B, chunks, HV, V, K] of the pool's dtype)."""
    q, _, v, *_ = operands
    assert q is not None and v is not None  # looked at before
    before, out = _prompts.gathered(pool, slots), _new_output(q, v)
    rows, positions = _chunks(v, cu_seqlens)
    chunks = pool.new_empty((positions.numel(), *pool.shape[1:]))
    into = {"state": pool, "state_indices": slots} if in_place else {}
    _prompts.run(
        function, operands, out, initial_states=before, cu_seqlens=cu_seqlens, positions=positions, checkpoints=chunks, **into, **options
    )
    if chunks.numel():
        chunks.index_copy_(0, rows, before)  # no token precedes a first chunk
    return out, chunks.unflatten(0, (v.shape[0], positions.numel() // max(v.shape[0], 1)))


def _chunks(v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """([N] row of each sequence's first chunk, [count] after how many tokens each chunk begins, ascending)."""
    batch, length = v.shape[:2]
    if cu_seqlens is None:
        each = -(-length // _prompts.CHUNK)
        start, chunk = (torch.arange(n, device=v.device) for n in (batch, each))
        return start * each, (start[:, None] * length + chunk * _prompts.CHUNK).flatten()
    sequences = cu_seqlens.shape[0] - 1
    if sequences < 1:
        return cu_seqlens[:0], cu_seqlens[:0]
    counts, ends = _ends(cu_seqlens)
    first, count = ends - counts, length // _prompts.CHUNK + sequences
    chunk = torch.arange(count, device=v.device)
    owner = torch.searchsorted(ends[:-1], chunk, right=True)
    positions = torch.add(torch.sub(cu_seqlens[:-1], first, alpha=_prompts.CHUNK)[owner], chunk, alpha=_prompts.CHUNK)
    return first.masked_fill(counts <= 0, count - 1), positions  # for a sequence without tokens, the last row, which no sequence owns


def _ends(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """([N] chunks of each sequence, [N] chunks up to its end)."""
    counts = (cu_seqlens.diff() + (_prompts.CHUNK - 1)) // _prompts.CHUNK
    return counts, counts.cumsum(0)


@_takes(
    "inplace_update", **_prompts.PACKED, **dict.fromkeys(("cache_indices", "track_chunk_idx"), "[N]"), query_start_loc="[N + 1]",
    ssm_states="[slots, HV, V, K]", track_state="[N, HV, V, K]",
)  # fmt: skip
def _extended(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
    inplace_update: bool, track_state: Tensor | None, track_chunk_idx: Tensor | None,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """The method with all that it looks at by name."""
    name, tracked, chunk = "sglang's TritonGDNKernel.extend", track_state, track_chunk_idx
    indices = {"cache_indices": cache_indices, "query_start_loc": query_start_loc, "track_chunk_idx": chunk}
    problems = _prompts.objections(v, indices, {"ssm_states": ssm_states, "track_state": tracked})
    if problems := problems + _tracking(query_start_loc, tracked, chunk):
        raise ArgumentError(name, problems)
    out = in_pool(
        _prompts.chunk_gated_delta_rule, _prompts.Operands(q, k, v, g, beta), ssm_states, cache_indices[: query_start_loc.shape[0] - 1],
        query_start_loc, inplace_update, tracked, chunk, use_qk_l2norm=True,
    )  # fmt: skip
    return out, None, None


def _tracking(starts: Tensor, tracked: Tensor | None, chunk: Tensor | None) -> list[str]:
    """The faults of a request for states after given numbers of chunks."""
    problems = [] if (tracked is None) == (chunk is None) else ["one of track_state and track_chunk_idx is None; expected both or neither"]
    if chunk is not None and chunk.shape[:1] != (sequences := starts.shape[0] - 1,):
        problems.append(f"track_chunk_idx is {list(chunk.shape)}; expected [N] = [{sequences}], as query_start_loc is [{sequences} + 1]")
    return problems


def in_pool(
    function: Callable[..., Any], operands: Sequence[Tensor | None], pool: Tensor, slots: Tensor, starts: Tensor | None, in_place: bool,
    tracked: Tensor | None, chunk: Tensor | None, **options: Any,
) -> Tensor:  # fmt: skip
    """The output of sequences in a pool; for packed ones, `tracked` receives the states after the given numbers of chunks."""
    q, _, v, *_ = operands
    assert q is not None and v is not None  # looked at before
    out = _new_output(q, v)
    before = None if in_place and tracked is None else _prompts.gathered(pool, slots)
    options["cu_seqlens"] = starts
    if in_place:
        options |= {"state": pool, "state_indices": slots, "has_initial_state": slots >= 0}
    else:
        options["initial_states"] = before
    if tracked is None or chunk is None or before is None or starts is None:
        _prompts.run(function, operands, out, **options)
        return out
    positions = torch.add(starts[:-1], chunk.clamp(min=0), alpha=_prompts.CHUNK)
    _prompts.run(function, operands, out, positions=positions, checkpoints=tracked, **options)
    # No token precedes a first chunk.
    torch.where((chunk == 0)[:, None, None, None], before.to(tracked.dtype), tracked, out=tracked)
    return out


def extend(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None, None]:
    """Gated DeltaNet over packed prompts, the method of SGLang's TritonGDNKernel: S <- a S + beta (v - a S k) k^T, with a = e^g;  o =
    K^-0.5 S q.

    q, k: [1, T, H, K], which are divided by sqrt(|x|^2 + 1e-6)          v: [1, T, HV, V]; bf16 or f16, one dtype
    g: [1, T, HV], log decay, at most 0          beta: [1, T, HV]; f32, bf16 or f16 each
    ssm_states: [slots, HV, V, K], a pool, which receives the states after each sequence, unless inplace_update is False
    cache_indices: [N], slots; a negative one, or one out of the pool, is padding: a zero output, and no state is touched
    query_start_loc: [N + 1], start of each packed sequence

    Returns (output [1, T, HV, V] of q's dtype, None, None). SGLang's method also returns the states before all chunks. Other keywords
    belong to other kernels of SGLang, and are ignored, as in SGLang.
    Raises ArgumentError (a ValueError) for operands that do not fit.

    States at positions, for prefix caches:
    track_state: a keyword, [N, HV, V, K] f32, receives the state of each sequence after track_chunk_idx [N] chunks of 64 tokens, rounded to
        the pool's dtype; a row with a negative number is undefined
    """
    tracked, chunk = kwargs.get("track_state"), kwargs.get("track_chunk_idx")
    found: tuple[Tensor, None, None] = _extended(
        q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, inplace_update, tracked, chunk
    )
    return found


@_takes(
    "output_intermediate_states beta_is_raw", **{n: shape for n, shape in _prompts.PACKED.items() if n != "g"},
    initial_state="[slots, HV, V, K]", initial_state_indices="[N]", track_state="[N, HV, V, K]", track_chunk_idx="[N]",
)  # fmt: skip
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    beta_is_raw: bool = False,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Kimi delta attention over prompts, on a pool of states, per token: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  o = scale S
    q.

    q, k: [B, T, H, K]          v: [B, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    g: [B, T, HV, K] elements, log decay, or with A_log the raw gate          beta: [B, T, HV], with beta_is_raw a logit
    initial_state: [slots, HV, V, K], a pool, which receives the states after each sequence
    initial_state_indices: [N], slots; a negative one, or one out of the pool, is padding: a zero output, and no state is touched
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5

    Returns output [B, T, HV, V] of q's dtype. chunk_indices, chunk_offsets and other keywords are ignored, as in SGLang.
    Raises UnsupportedError without a pool and its indices, and ArgumentError (a ValueError) for operands that do not fit.

    Raw gates:
    A_log, dt_bias: HV and HV K elements: the log decay is -e^A_log softplus(g + dt_bias)
    lower_bound: the log decay is lower_bound sigmoid(e^A_log (g + dt_bias)) instead; not read without A_log

    States at positions, for prefix caches:
    output_intermediate_states: returns (output, states before each chunk of 64 tokens [B, chunks, HV, V, K]), chunks as in
        chunk_gated_delta_rule; (output, None) with track_state
    track_state: [N, HV, V, K] f32, receives the state of each sequence after track_chunk_idx [N] chunks, rounded to the pool's dtype; needs
        cu_seqlens. A row with a negative number is undefined
    """
    name = "sglang's chunk_kda"
    pool, slots = _pool_of(name, v, initial_state, initial_state_indices, cu_seqlens, [])
    operands: tuple[Tensor | None, ...] = (q, k, v, _shaped(g, (*v.shape[:3], k.shape[-1])), beta)
    options: dict[str, Any] = {"scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel, "beta_sigmoid": beta_is_raw}
    if A_log is not None:
        operands += (A_log.reshape(-1), None if dt_bias is None else dt_bias.reshape(-1))
        options["lower_bound"] = lower_bound
    if output_intermediate_states and track_state is None:
        return _with_chunks(_chunk_kda, operands, pool, slots, cu_seqlens, True, **options)
    problems = _prompts.objections(v, {"track_chunk_idx": track_chunk_idx}, {"track_state": track_state})
    if track_state is not None and cu_seqlens is None:
        problems.append("track_state is given without cu_seqlens; expected both. Pass cu_seqlens.")
    if cu_seqlens is not None:
        problems += _tracking(cu_seqlens, track_state, track_chunk_idx)
    if problems:
        raise ArgumentError(name, problems)
    out = in_pool(_chunk_kda, operands, pool, slots, cu_seqlens, True, track_state, track_chunk_idx, **options)
    return (out, None) if output_intermediate_states else out


def with_tracked_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's own method, for calls that ssmgen refuses: it returns the states before all chunks, and does not know track_state."""

    @wraps(original)
    def call(*args: Any, track_state: Tensor | None = None, track_chunk_idx: Tensor | None = None, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if track_state is not None and track_chunk_idx is not None and track_state.numel():
            counts, ends = _ends(kwargs["query_start_loc"])
            track_state.copy_(found[2][0, (ends - counts + track_chunk_idx.clamp(min=0)).clamp_(max=found[2].shape[1] - 1)])
        return found

    return call


def flashinfer_gdn_prefill_default(model_runner: Any) -> str | None:
    """None, where SGLang names FlashInfer for prompts of gated delta rules: its Triton backend does them then, and so `extend`.

    Raises UnsupportedError for a GPU of another generation than sm_90, where the two have not been compared.
    """
    if torch.cuda.is_available() and (major := torch.cuda.get_device_capability()[0]) != 9:
        raise UnsupportedError(
            "sglang's flashinfer_gdn_prefill_default",
            [f"the GPU is sm_{major}0; expected sm_90, where this call was compared with FlashInfer"],
        )
    return None


@_takes(mixed_qkv="[tokens, channels]")
def fused_qkv_split_gdn_prefill(
    mixed_qkv: Tensor, num_q_heads: int, num_k_heads: int, num_v_heads: int, head_q: int, head_k: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a convolution's output [tokens, channels], as [1, tokens, heads, size] each: views, where SGLang copies.

    SGLang itself passes views to the same functions for more than 8192 channels.
    Raises ArgumentError (a ValueError) if the heads have another number of channels, or if channels are not contiguous.
    """
    heads = ((num_q_heads, head_q), (num_k_heads, head_k), (num_v_heads, head_v))
    sizes = [count * size for count, size in heads]
    problems = []
    if mixed_qkv.dim() != 2 or mixed_qkv.shape[1] != sum(sizes):
        problems.append(f"mixed_qkv is {list(mixed_qkv.shape)}; expected [tokens, {sum(sizes)}]")
    elif mixed_qkv.stride(1) != 1:
        problems.append(f"mixed_qkv has strides {list(mixed_qkv.stride())}; expected contiguous channels")
    if problems:
        raise ArgumentError("sglang's fused_qkv_split_gdn_prefill", problems)
    q, k, v = (t.unflatten(1, form)[None] for t, form in zip(mixed_qkv.split(sizes, 1), heads, strict=True))
    return q, k, v


_ATTENTION, _LAYERS = "sglang.kernels.ops.attention", "sglang.srt.layers.attention.linear.kernels"
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
REPLACEMENTS = [
    Replacement(f"{_ATTENTION}.triton_gdn_fused_proj", "fused_qkv_split_gdn_prefill", fused_qkv_split_gdn_prefill),
    Replacement(f"{_ATTENTION}.fla.chunk", "chunk_gated_delta_rule", chunk_gated_delta_rule),
    Replacement(
        f"{_LAYERS}.gdn_triton", "TritonGDNKernel.extend", extend, says={"supports_track_state_snapshot": True}, behind=with_tracked_states
    ),
    Replacement(f"{_ATTENTION}.fla.kda", "chunk_kda", chunk_kda),
    Replacement(
        _BACKEND, "flashinfer_gdn_prefill_default", flashinfer_gdn_prefill_default, needs=(f"{_LAYERS}.gdn_triton.TritonGDNKernel.extend",)
    ),
]
