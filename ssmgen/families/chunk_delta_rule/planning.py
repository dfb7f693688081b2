"""A call of chunk_delta_rule's functions: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...calls.prompts import STATES, WRITTEN_WORDS
from ...engine.chunks.kernels import Counts
from ...engine.chunks.problem import CHUNK
from ...engine.chunks.segments import asked
from ...engine.chunks.views import WRITTEN, axes_of, check_alignment, check_workspace, v_sizes, writes
from ...engine.recurrences.attention.problem import Beta
from ...engine.tiles import maps
from ...spec.arguments import Value
from ...spec.kernel import Layout, Loads
from ...spec.operands import plain
from .problem import OPERATOR, DeltaProblem, Gate, chunks_of
from .reference import chunk_delta_rule as reference
from .segments import workspace_for
from .spec import DeltaSpec

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", *prompts.CONTROL)
ROWS = ("v", "q", "k", "out")  # of one dtype, with channels behind heads
_PER_TOKEN = dict.fromkeys(ROWS, 4) | {"g": 3, "beta": 3}


class Options(NamedTuple):
    """What a call says beside its tensors: the gate and the form of beta by their names in problem.py; segments: None for the rule's."""

    gate: str = "none"
    beta: str = "plain"
    l2norm: bool = False
    scale: float = 1.0
    state_layout: str = "vk"
    pad_slot_id: int = -1
    segments: int | None = None


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, HK, K], [batch, T, HV, V], [batch, T, HV]; of packed sequences, the batch is 1.

    Adds to `problems`; what comes back is only usable if that is nothing.
    """
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common({n: t for n, t in named.items() if n != "workspace"}, "v", problems, "the delta rule of a prompt")
    views, v, ragged = dict(named), named["v"], "cu_seqlens" in named
    if v.dim() not in ((3, 4) if ragged else (4,)) or (ragged and v.dim() == 4 and v.shape[0] != 1):
        wanted = "[tokens, HV, V] or [1, tokens, HV, V], as cu_seqlens asks for" if ragged else "[batch, T, HV, V]"
        problems.append(f"v is {list(v.shape)}, not {wanted}")
        return {}
    if v.dim() == 3:
        views |= {n: named[n].unsqueeze(0) for n, axes in _PER_TOKEN.items() if n in named and named[n].dim() == axes - 1}
    if views["q"].dim() != 4:
        problems.append(f"q is {list(views['q'].shape)}, not […, HK, K] as v {list(named['v'].shape)} asks for")
        return {}
    if not _shapes_fit(views, options, problems):
        return {}
    prompts.check_layout({n: t for n, t in views.items() if n != "workspace"}, ROWS, WRITTEN, tuple(_PER_TOKEN), problems)
    sizes = *v_sizes(views), views["q"].shape[3], views["v"].shape[3]
    segments, length = options.segments, views["v"].shape[1]
    said = f"{OPERATOR}_workspace({', '.join(map(str, sizes))}{'' if segments is None else f', {segments}'})"
    check_workspace(views, workspace_for(*sizes, segments, length), said, problems)
    return views


def _shapes_fit(views: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    (batch, length, HV, V), (HK, K) = views["v"].shape, views["q"].shape[2:]
    sequences = prompts.sequences_of(views, "v")
    if sequences < 0:
        problems.append("cu_seqlens is empty; it is [sequences + 1]")
        return False
    allowed: dict[str, checks.Shapes] = {
        **dict.fromkeys(("q", "k"), {"[…, HK, K]": (batch, length, HK, K)}),
        "out": {"[…, HV, V]": (batch, length, HV, V)},
        **dict.fromkeys(("g", "beta"), {"[…, HV]": (batch, length, HV)}),
        **dict.fromkeys(("A_log", "dt_bias"), {"[HV]": (HV,)}),
        "cu_seqlens": {"[sequences + 1]": (sequences + 1,)},
    }
    fits = [checks.check_shape(name, views[name], allowed[name], problems) for name in views if name in allowed]
    axes, inner = ("HV, K, V", (HV, K, V)) if options.state_layout == "kv" else ("HV, V, K", (HV, V, K))
    fits.append(prompts.states_fit(views, sequences, axes, inner, problems))
    if HK < 1 or HV % HK:
        problems.append(f"v has {HV} heads, which is not a multiple of the {HK} heads of q")
        fits.append(False)
    return all(fits)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> DeltaProblem:
    """The problem that checked operands pose, given where they lie. Raises ArgumentError where the workspace cannot lie there."""
    check_alignment(OPERATOR, pointers)
    states = [n for n in STATES if n in views]

    def dtype(name: str) -> Any:
        return DTYPES[views[name].dtype] if name in views else None

    def index(name: str) -> Any:
        return INDEX[views[name].dtype if name in views else None]

    more = {"state": dtype(states[0])} if states else {}
    _, length, heads, head_v = views["v"].shape
    more |= asked(options.segments, heads, head_v, length)
    return DeltaProblem(
        head_k=views["q"].shape[3],
        head_v=views["v"].shape[3],
        x=dtype("v"),
        g=dtype("g"),
        gate=Gate(options.gate),
        A_log=dtype("A_log"),
        dt_bias=dtype("dt_bias"),
        beta=dtype("beta"),
        beta_form=Beta(options.beta),
        l2norm=options.l2norm,
        cu_seqlens=index("cu_seqlens"),
        layout=Layout(options.state_layout) if states else Layout.VK,
        initial="initial_states" in views,
        final="final_states" in views,
        pool="state" in views,
        started="has_initial_state" in views,
        index=index("state_indices"),
        checkpoints=index("checkpoint_positions"),
        copy=prompts.together(views, pointers, ROWS),
        state_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], 2) for n in states) else Loads.ELEMENT,
        **more,
    )


_AXES = axes_of(_PER_TOKEN)


def counts_of(views: Mapping[str, Tensor]) -> Counts:
    batch, length, heads, _ = views["v"].shape
    sequences = prompts.sequences_of(views, "v")
    return Counts(chunks_of(batch * length, sequences), sequences, heads, heads // views["q"].shape[2], batch * length)


def kernel_values(spec: DeltaSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    """Every kernel argument that is not a pointer."""
    counts = counts_of(views)
    values: dict[str, Value] = {"tokens": views["v"].shape[1], "sequences": counts.sequences, "heads": counts.heads}
    values |= {"group_heads": counts.group_heads, "scale": options.scale, "pad_slot_id": options.pad_slot_id}
    values |= spec.counted(counts)
    values |= {"slots": views["state"].shape[0] if "state" in views else 0}
    values |= {"positions": views["checkpoints"].shape[0] if "checkpoints" in views else 0}
    values |= {f"{operand}_{axis}": views[operand].stride(_AXES[operand][axis]) for operand, axis in spec.strides()}
    values |= maps(views, spec.mapped, CHUNK)
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads of v, of all sequences; 0 if nothing is to be written."""
    return views["v"].shape[2] * prompts.sequences_of(views, "v") if writes(views) else 0


FAMILY = Family(
    OPERATOR,
    written=WRITTEN,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=lambda spec, views: spec.blocks(counts_of(views)),
    values_of=kernel_values,
    in_place=(("final_states", "initial_states"),),
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    named: dict[str, Any] = {n: t for n, t in views.items() if n != "workspace"}
    how = options._asdict()
    del how["segments"]  # token by token there are none
    reference(**named, beta_form=how.pop("beta"), **how, dtype=dtype)


_REQUIRED = ("q", "k", "v", "beta", "workspace", "out")
_TABLES = {
    "chunk_gated_delta_rule": plain(NAMES, (*_REQUIRED, "g"), WRITTEN),
    "chunk_delta_rule": plain(NAMES, _REQUIRED, WRITTEN),
}
CALLERS = callers(FAMILY, _TABLES, Options, views_of, run_reference, words=dict.fromkeys(_TABLES, WRITTEN_WORDS))
