"""chunk_scan: Mamba-2 (SSD) over prompts, on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.prompts import STATES
from ...engine.chunks.segments import SEGMENTS
from ...engine.tiles import maps
from ...spec.arguments import Value
from ...spec.kernel import Loads
from ...spec.operands import plain
from .reference import chunk_scan as reference
from .spec import CHUNK, OPERATOR, Gate, ScanProblem, ScanSpec
from .warpgroups import many_short

NAMES = (
    "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "cu_seqlens", "seq_idx", "initial_states", "final_states", "state", "state_indices",
    "has_initial_state", "checkpoint_positions", "checkpoints", "out",
)  # fmt: skip
WRITTEN = ("out", "final_states", "state", "checkpoints")
ROWS = ("x", "B", "C", "z", "out")


class Options(NamedTuple):
    """What a call says beside its tensors."""

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

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C; P and N are multiples of 16 up to 256. […] is
    [batch, T], or for packed sequences with cu_seqlens [tokens] or [1, tokens].
    Products are of x's 16-bit dtype, or of three bf16 terms per f32, summed in f32; decays and the state between chunks of 64 tokens are
    f32. The bits do not depend on the batch or on packing. A sequence cut at multiples of 64 tokens, with f32 states, gives those of the
    whole; but on sm_90a with H P / 64 up to 36, where blocks divide a sequence by its length, only with segments=1.
    With x of f16, the state, and dt x and C B with their decays, must stay within f16's range.

    x, z, out: […, H, P] bf16, f16 or f32, one dtype with B and C          dt: […, H]
    A: [H], negative          B, C: […, G, N]          D: [H] or [H, P], dt_bias: [H]; None for none
    Tokens, heads and groups may have any distance; rows are contiguous, and begin at multiples of 4 bytes (fastest: of 16)
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: then clamped to (low, high)
    cu_seqlens: [sequences + 1] int32 or int64 on the device, where each packed sequence starts. A sequence may have no tokens; tokens of no
        sequence get no output. States are then per sequence
    seq_idx: [batch, T] int32 (or [T], of a batch of one), in place of cu_seqlens: the sequence of each token. Where it differs from that of
        the token before, the state begins anew from zero; a row's first token goes on from its state, and its last one leaves it. NaN and
        infinities reach other sequences of their chunk
    initial_states: [sequences, H, P, N] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after the last token, [sequences, H, P, N], in final_states_out if that is given (which may
        be initial_states), else new ones of initial_states' dtype or f32
    state: [slots, H, P, N], a pool in place of final states: receives the state after each sequence. Without initial_states it holds the
        one before it too, where has_initial_state, [sequences] bool, is true. A sequence without tokens leaves its slot alone
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals it or is no slot of the pool gets a zero output and touches no state
    checkpoint_positions: [count] int32 or int64 on the device, ascending: after how many tokens the state is asked for too, 1 … tokens of
        the packed axis or of the flattened batch (b T + t). Any of them; the states are the final ones of a call that ends there, bit for
        bit where a sequence cut there would keep its bits
    checkpoints_out: [count, H, P, N], receives those states, of the dtype of the others. A position in no sequence (or in one whose slot is
        none) leaves its row alone
    return_checkpoints: also return them, in checkpoints_out if that is given, else new ones of the other states' dtype or f32
    segments: parts of a sequence that blocks of a cluster compute side by side, on sm_90a, 1 … 1024 at most (8 are the most there are); 1
        leaves it whole. None: as its own length and H P say. Elsewhere parts change no bit, and this is not looked at
    out: None for a new one, dense
    pdl: whether the kernel may start while the one ahead of it in the stream ends; None = where the device can (sm_90 and later)

    Returns out, or out and what else was asked for: (out[, final states][, checkpoints]). CPU tensors run the reference implementation,
    token by token.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError for what no kernel serves;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Dao & Gu 2024 (arXiv 2405.21060); the arguments are those of mamba-ssm and vLLM.
    """
    final, checkpoints = final_states_out, checkpoints_out
    if isinstance(x, Tensor) and isinstance(B, Tensor):
        out = x.new_empty(x.shape) if out is None else out
        dtypes = [t.dtype for t in (initial_states, final_states_out, state) if isinstance(t, Tensor)]
        if x.dim() in (3, 4) and B.dim() == x.dim():
            inner = (*x.shape[-2:], B.shape[-1])
            if return_final_states and final is None:
                count = x.shape[0] if not isinstance(cu_seqlens, Tensor) else max(cu_seqlens.numel() - 1, 0)
                final = x.new_empty((count, *inner), dtype=dtypes[0] if dtypes else torch.float32)
            if return_checkpoints and checkpoints is None and isinstance(checkpoint_positions, Tensor):
                checkpoints = x.new_empty((checkpoint_positions.numel(), *inner), dtype=dtypes[0] if dtypes else torch.float32)
    unplaced = "return_checkpoints asks for states after tokens, and checkpoint_positions, which names those, is not given"
    objections = (unplaced,) if return_checkpoints and checkpoint_positions is None else ()
    given = (
        x, dt, A, B, C, D, z, dt_bias, cu_seqlens, seq_idx, initial_states, final, state, state_indices, has_initial_state,
        checkpoint_positions, checkpoints, out,
    )  # fmt: skip
    asked = {"final_states": return_final_states and final is not None, "checkpoints": return_checkpoints and checkpoints is not None}
    returns = ("out", *(name for name, wanted in asked.items() if wanted))
    options = Options(dt_softplus, dt_limit, pad_slot_id, segments=segments)
    return run(CALLER, given, options, pdl, returns=returns, objections=objections)


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, H, P], [batch, T, H], [batch, T, G, N], [H, P]; of packed sequences, the batch is 1.

    Adds to `problems`; what comes back is only usable if that is nothing.
    """
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "x", problems, "the scan of a prompt")
    views, x, ragged = dict(named), named["x"], "cu_seqlens" in named
    if x.dim() not in ((3, 4) if ragged else (4,)) or (ragged and x.dim() == 4 and x.shape[0] != 1):
        wanted = "[tokens, H, P] or [1, tokens, H, P], as cu_seqlens asks for" if ragged else "[batch, T, H, P]"
        problems.append(f"x is {list(x.shape)}, not {wanted}")
        return {}
    if x.dim() == 3:
        views |= {n: named[n].unsqueeze(0) for n, axes in _PER_TOKEN.items() if n in named and named[n].dim() == axes - 1}
        x = views["x"]
    if "seq_idx" in views and views["seq_idx"].dim() == 1 and x.shape[0] == 1:
        views["seq_idx"] = views["seq_idx"].unsqueeze(0)
    if views["B"].dim() != 4:
        problems.append(f"B is {list(views['B'].shape)}, not […, G, N] as x {list(named['x'].shape)} asks for")
        return {}
    if not _shapes_fit(views, problems):
        return {}
    if views.get("D") is not None and views["D"].dim() == 1:
        views["D"] = views["D"].unsqueeze(1).expand(*x.shape[2:])
    prompts.check_layout(views, ROWS, WRITTEN, tuple(_PER_TOKEN), problems)
    return views


_PER_TOKEN = dict.fromkeys(ROWS, 4) | {"dt": 3, "g": 3, "seq_idx": 2}


def _sequences(views: Mapping[str, Tensor]) -> int:
    return prompts.sequences_of(views, "x")


def _shapes_fit(views: Mapping[str, Tensor], problems: list[str]) -> bool:
    x, B = views["x"], views["B"]
    (batch, length, H, P), (G, N) = x.shape, B.shape[2:]
    sequences = _sequences(views)
    if sequences < 0:
        problems.append("cu_seqlens is empty; it is [sequences + 1]")
        return False
    rows: checks.Shapes = {"[…, H, P]": (batch, length, H, P)}
    groups: checks.Shapes = {"[…, G, N]": (batch, length, G, N)}
    allowed: dict[str, checks.Shapes] = {
        **dict.fromkeys(("z", "out"), rows),
        **dict.fromkeys(("B", "C"), groups),
        "dt": {"[…, H]": (batch, length, H)},
        **dict.fromkeys(("A", "dt_bias"), {"[H]": (H,)}),
        "g": {"[…, H]": (batch, length, H), "[H]": (H,)},
        "D": {"[H]": (H,), "[H, P]": (H, P)},
        "cu_seqlens": {"[sequences + 1]": (sequences + 1,)},
        "seq_idx": {"[batch, T]": (batch, length)},
    }
    fits = [checks.check_shape(name, views[name], allowed[name], problems) for name in views if name in allowed]
    fits.append(prompts.states_fit(views, sequences, "H, P, N", (H, P, N), problems))
    if "seq_idx" in views and "cu_seqlens" in views:
        problems.append("seq_idx and cu_seqlens both divide the tokens into sequences: give one of them")
    if G < 1 or H % G:
        problems.append(f"x has {H} heads, which is not a multiple of the {G} groups of B")
        fits.append(False)
    return all(fits)


def _gate(views: Mapping[str, Tensor], options: Options) -> Gate:
    if "dt" in views:
        return Gate.DT
    if "g" not in views:
        return Gate.NONE
    return Gate.LOG if views["g"].dim() == 3 else Gate.SLOPE if options.slope else Gate.CONSTANT


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> ScanProblem:
    """The problem that checked operands pose, given where they lie."""
    states = [n for n in STATES if n in views]

    def dtype(name: str) -> Any:
        return DTYPES[views[name].dtype] if name in views else None

    def index(name: str) -> Any:
        return INDEX[views[name].dtype if name in views else None]

    more = {"state": dtype(states[0])} if states else {}
    problem = ScanProblem(
        headdim=views["x"].shape[3],
        d_state=views["B"].shape[3],
        x=dtype("x"),
        dt=dtype("dt"),
        A=dtype("A"),
        gate=_gate(views, options),
        g=dtype("g"),
        D=dtype("D"),
        D_rows="D" in views and views["D"].stride(1) != 0,
        dt_bias=dtype("dt_bias"),
        z="z" in views,
        dt_softplus=options.dt_softplus,
        dt_limit=options.dt_limit is not None,
        cu_seqlens=index("cu_seqlens"),
        initial="initial_states" in views,
        final="final_states" in views,
        pool="state" in views,
        started="has_initial_state" in views,
        index=index("state_indices"),
        seq_idx="seq_idx" in views,
        checkpoints=index("checkpoint_positions"),
        copy=prompts.together(views, pointers, ROWS),
        state_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], 2) for n in states) else Loads.ELEMENT,
        segments=options.segments or 0,
        **more,
    )
    batch, tokens, heads, _ = views["x"].shape
    return replace(problem, short=True) if many_short(problem, heads, _sequences(views), batch * tokens) else problem


_AXES = {
    **dict.fromkeys(_PER_TOKEN, {"batch": 0, "token": 1, "head": 2, "group": 2}),
    "g": {"batch": 0, "token": 1, "head": -1},
    "D": {"head": 0, "row": 1},
    **dict.fromkeys(("A", "dt_bias"), {"head": 0}),
    **dict.fromkeys(STATES, {"slot": 0, "head": 1}),
    **dict.fromkeys(("cu_seqlens", "state_indices", "has_initial_state"), {"sequence": 0}),
    "checkpoint_positions": {"position": 0},
}


def kernel_values(spec: ScanSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    """Every kernel argument that is not a pointer."""
    _, length, heads, _ = views["x"].shape
    values: dict[str, Value] = {"tokens": length, "heads": heads, "group_heads": heads // views["B"].shape[2]}
    values |= {"pad_slot_id": options.pad_slot_id, "slots": views["state"].shape[0] if "state" in views else 0}
    values |= {"positions": views["checkpoints"].shape[0] if "checkpoints" in views else 0}
    values |= {"scale": options.scale, "parts": _parts(spec, views), "items": grid_of(spec, views)}
    values |= dict(zip(("dt_low", "dt_high"), options.dt_limit or (), strict=False))
    values |= {f"{operand}_{axis}": views[operand].stride(_AXES[operand][axis]) for operand, axis in spec.strides()}
    values |= maps(views, spec.mapped, CHUNK)
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


def _parts(spec: ScanSpec, views: Mapping[str, Tensor]) -> int:
    """Blocks per sequence and tile. A cluster has them all; without one they are fewer where more sequences want blocks."""
    return spec.parts if spec.cluster_blocks > 1 else max(1, spec.parts // max(1, _sequences(views)))


def grid_of(spec: ScanSpec, views: Mapping[str, Tensor]) -> int:
    return _sequences(views) * views["x"].shape[2] * spec.tiles * _parts(spec, views)


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads; 0 if nothing is to be written."""
    writes = views["x"].numel() or any(n in views for n in ("final_states", "state"))
    return views["x"].shape[2] if _sequences(views) and writes else 0


FAMILY = Family(
    OPERATOR,
    written=WRITTEN,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=grid_of,
    values_of=kernel_values,
    in_place=(("final_states", "initial_states"),),
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    named: dict[str, Any] = dict(views)
    how = options._asdict()
    del how["segments"]  # token by token there are none
    reference(**named, **how, dtype=dtype)


_REQUIRED = ("x", "dt", "A", "B", "C", "out")
_OF_OPTIONS = ("dt_softplus", "dt_limit", "pad_slot_id", "segments")
(CALLER,) = callers(
    FAMILY, {OPERATOR: plain(NAMES, _REQUIRED, WRITTEN)}, Options, views_of, run_reference, of_options=_OF_OPTIONS,
    words={OPERATOR: WRITTEN_WORDS},
).values()  # fmt: skip
