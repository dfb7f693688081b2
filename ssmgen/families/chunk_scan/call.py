"""chunk_scan: Mamba-2 (SSD) over prompts, on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.prompts import States
from ...engine.chunks.segments import SEGMENTS
from ...engine.chunks.views import token_views
from ...engine.tiles import maps
from ...spec.arguments import Value
from ...spec.operands import Table
from .operands import KERNELS, OF_OWN_TYPE, OPERANDS, SCAN
from .reference import chunk_scan as reference
from .spec import CHUNK, OPERATOR, Gate, ScanProblem, ScanSpec
from .warpgroups import many_short


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    dt_softplus: bool = False
    dt_limit: tuple[float, float] | None = None
    pad_slot_id: int = -1
    scale: float = 1.0  # of linear attention, and whether a g per head is a slope
    slope: bool = False
    segments: int | None = None


@operator(like="x", segments=SEGMENTS)
def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    dt_limit: tuple[float, float] | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None,
    checkpoints_out: Tensor | None = None,
    return_checkpoints: bool = False,
    segments: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Whole sequences, per token: S <- exp(dt A) S + dt x B;  out = C S + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C; P and N are multiples of 16 up to 256. […] is [batch,
    T], or for packed sequences with cu_seqlens [tokens] or [1, tokens]. `selective_state_update` continues from these states.

    x, z, out: […, H, P] bf16, f16 or f32, one dtype with B and C          dt: […, H]
    A: [H], negative          B, C: […, G, N]          D: [H] or [H, P], dt_bias: [H]; None for none
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: dt is then clamped to (low, high)
    cu_seqlens: [sequences + 1] int32 or int64 on the device, start of each packed sequence. A sequence may have no tokens; tokens outside
        all sequences get no output. States are then per sequence
    initial_states: [sequences, H, P, N] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after the last token, [sequences, H, P, N], in final_states_out if that is given (which may
        be initial_states), else new ones of initial_states' dtype or f32
    out: None for a new one, dense

    Several sequences in a row:
    seq_idx: [batch, T] int32 (or [T], for a batch of one), instead of cu_seqlens: the sequence of each token. If it differs from the
        previous token's, the state restarts from zero. A row's first token continues from the row's state, and its last one returns it.
        NaN and infinities reach other sequences of their chunk

    States in a pool:
    state: [slots, H, P, N], a pool instead of final states: receives the state after each sequence. Without initial_states it also
        holds the state before it, if has_initial_state, [sequences] bool, is true. A sequence without tokens leaves its slot unchanged
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals this or is not in the pool gets a zero output and touches no state

    States at positions, for prefix caches:
    checkpoint_positions: [count] int32 or int64 on the device, ascending: token counts after which the state is also wanted, 1 … tokens of
        the packed axis or of the flattened batch (b T + t). Any count is allowed. The states equal the final states of a call that ends
        there, bit for bit if a sequence cut there would keep its bits
    checkpoints_out: [count, H, P, N], receives these states, of the dtype of the other states. A position outside all sequences, or in a
        sequence without a valid slot, leaves its row unchanged
    return_checkpoints: also return these states, in checkpoints_out if that is given, else new ones of the other states' dtype or f32

    Launch and segments:
    segments: most parts of a sequence that blocks of a cluster compute in parallel, on sm_90a, 1 … 1024 (the kernel uses at most 8); 1
        leaves the sequence whole. None: the sequence's length and H P decide. On other devices parts change no bit, and this is ignored
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Types and precision:

    Tokens, heads and groups may have any stride; rows are contiguous, and begin at multiples of 4 bytes (fastest: of 16). Products are of
    x's 16-bit dtype, or of three bf16 terms per f32, summed in f32; decays and the state between chunks of 64 tokens are f32. The bits do
    not depend on the batch or on packing. A sequence cut at multiples of 64 tokens, with f32 states, gives the same bits as the whole
    sequence. On sm_90a with H P / 64 up to 36 (up to 66 with N = 256, or P not a multiple of 64), blocks divide a sequence by its length;
    this then holds only with segments=1. With x of f16, the state, and dt x and C B with their decays, must stay within f16's range.

    Returns out, or out and the requested states: (out[, final states][, checkpoints]). CPU tensors run the reference implementation,
    token by token.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError if no kernel serves the call;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Dao & Gu 2024 (arXiv 2405.21060); the arguments follow mamba-ssm and vLLM.
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out,
    )  # fmt: skip
    behind = states.operands(x, B)
    tensors = SCAN.Tensors(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, seq_idx=seq_idx, **behind)
    options = Options(dt_softplus, dt_limit, pad_slot_id, segments=segments)
    return run(CALLER, tensors, options, pdl, returns=states.returns(behind), objections=states.objections)


def views_of(table: Table, named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, H, P], [batch, T, H], [batch, T, G, N], [H, P]; for packed sequences, the batch is 1.

    Adds errors to `problems`; the result is usable only if there are none.
    """
    found, ids = dict(named), named.get("seq_idx")
    if isinstance(ids, Tensor) and ids.dim() == 1 and isinstance(named["x"], Tensor) and named["x"].shape[0] == 1:
        found["seq_idx"] = ids.unsqueeze(0)
    views = token_views(table, found, "x", "B", "the scan of a prompt", problems, "groups of B")
    if "seq_idx" in named and "cu_seqlens" in named:
        problems.append("seq_idx and cu_seqlens are both given; expected one: each divides the tokens into sequences. Leave out one.")
    if views and options.slope and views["g"].dim() != 1:
        problems.append(f"g is {list(named['g'].shape)}; expected {table.label(('head',), '')}")
    if "D" in views and views["D"].dim() == 1:
        views["D"] = views["D"].unsqueeze(1).expand(*views["x"].shape[2:])
    if views:
        prompts.check_strides(table, views, "x", problems)
    return views


def _sequences(views: Mapping[str, Tensor]) -> int:
    return prompts.sequences_of(views, "x")


def _gate(views: Mapping[str, Tensor], options: Options) -> Gate:
    if "dt" in views:
        return Gate.DT
    if "g" not in views:
        return Gate.NONE
    return Gate.LOG if views["g"].dim() == 3 else Gate.SLOPE if options.slope else Gate.CONSTANT


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> ScanProblem:
    """The problem of checked operands and their addresses."""
    typed: dict[str, Any] = dict.fromkeys(OF_OWN_TYPE) | checks.dtypes_of(views, OF_OWN_TYPE)
    problem = ScanProblem(
        headdim=views["x"].shape[3],
        d_state=views["B"].shape[3],
        x=DTYPES[views["x"].dtype],
        **typed,
        gate=_gate(views, options),
        D_rows="D" in views and views["D"].stride(1) != 0,
        z="z" in views,
        dt_softplus=options.dt_softplus,
        dt_limit=options.dt_limit is not None,
        seq_idx="seq_idx" in views,
        copy=prompts.together(views, pointers, OPERANDS.alike("x")),
        segments=options.segments or 0,
        **prompts.fields_of(views, pointers, 2),
    )
    batch, tokens, heads, _ = views["x"].shape
    return replace(problem, short=True) if many_short(problem, heads, _sequences(views), batch * tokens) else problem


def kernel_values(spec: ScanSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    """Every kernel argument that is not a pointer."""
    _, length, heads, _ = views["x"].shape
    values: dict[str, Value] = {"tokens": length, "heads": heads, "group_heads": heads // views["B"].shape[2]}
    values |= {"pad_slot_id": options.pad_slot_id, **prompts.values_of(views)}
    values |= {"scale": options.scale, "parts": _parts(spec, views), "items": grid_of(spec, views)}
    values |= dict(zip(("dt_low", "dt_high"), options.dt_limit or (), strict=False))
    values |= KERNELS.stride_values(spec, views, kind=0 if spec.g_by_token else 1)
    return values | maps(views, spec.mapped, CHUNK)


def _parts(spec: ScanSpec, views: Mapping[str, Tensor]) -> int:
    """Blocks per sequence and tile. A cluster has all of them; without a cluster they are fewer if there are more sequences."""
    return spec.parts if spec.cluster_blocks > 1 else max(1, spec.parts // max(1, _sequences(views)))


def grid_of(spec: ScanSpec, views: Mapping[str, Tensor]) -> int:
    return _sequences(views) * views["x"].shape[2] * spec.tiles * _parts(spec, views)


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads; 0 if nothing is to be written."""
    writes = views["x"].numel() or any(n in views for n in ("final_states", "state"))
    return views["x"].shape[2] if _sequences(views) and writes else 0


FAMILY = Family(
    OPERATOR,
    written=OPERANDS.written,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=grid_of,
    values_of=kernel_values,
    in_place=OPERANDS.in_place,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    named: dict[str, Any] = {"dt": None, "A": None, **views}
    how = options._asdict()
    del how["segments"]  # the reference runs token by token, without segments
    reference(**named, **how, dtype=dtype)


_OF_OPTIONS = ("dt_softplus", "dt_limit", "pad_slot_id", "segments")
(CALLER,) = callers(
    FAMILY, {OPERATOR: SCAN}, Options, partial(views_of, SCAN), run_reference, of_options=_OF_OPTIONS, words={OPERATOR: WRITTEN_WORDS}
).values()  # fmt: skip
