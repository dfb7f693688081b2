"""A call of chunk_linear_attention's functions: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...calls.prompts import STATES, WRITTEN_WORDS
from ...engine.chunks.kernels import Counts
from ...engine.chunks.views import WRITTEN, axes_of, check_alignment, check_workspace, v_sizes, writes
from ...engine.recurrences.attention.problem import Beta, Gate
from ...engine.tiles import maps
from ...spec.arguments import Value
from ...spec.kernel import Layout, Loads
from ...spec.operands import plain
from .operands import ALIKE, CHANNELS, FUNCTIONS, OF_KEYS, OPERANDS, PER_TOKEN
from .problem import OPERATOR, LinearPromptProblem, Rule, chunks_of
from .reference import chunk_linear_attention as reference
from .segments import cut_by, workspace_for
from .spec import LinearSpec

NAMES = (*OPERANDS, *prompts.CONTROL)
WHAT = "linear attention over a prompt"


class Options(NamedTuple):
    """What a call says beside its tensors: rule, gate and the form of beta by their names in problem.py."""

    rule: str
    gate: str = "log"
    beta: str = "plain"
    l2norm: bool = False
    scale: float = 1.0
    lower_bound: float = 0.0
    state_layout: str = "vk"
    pad_slot_id: int = -1
    segments: int | None = None  # None for the rule's


def views_of(words: Mapping[str, str], named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, HK, K], [batch, T, HV, K], [batch, T, HV, V], [batch, T, HV], and a dt_bias of gk as [HV, K]; of packed
    sequences, the batch is 1.

    words: what the function calls its operands, where not by their roles. Adds to `problems`, in these words; what comes back is only
    usable if that is nothing.
    """
    found: list[str] = []
    views = _checked(named, options, found)
    said = re.compile(rf"^({'|'.join(words)})(?= (?:is|has|requires) )")
    problems += [said.sub(lambda m: words[m[0]], problem) for problem in found] if words else found
    return views


def _checked(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common({n: t for n, t in named.items() if n != "workspace"}, "v", problems, WHAT)
    views, v, ragged = dict(named), named["v"], "cu_seqlens" in named
    if v.dim() not in ((3, 4) if ragged else (4,)) or (ragged and v.dim() == 4 and v.shape[0] != 1):
        wanted = "[tokens, HV, V] or [1, tokens, HV, V], as cu_seqlens asks for" if ragged else "[batch, T, HV, V]"
        problems.append(f"v is {list(v.shape)}, not {wanted}")
        return {}
    if "beta" in views and views["beta"].shape == v.shape:
        problems.append(_BETA.format(list(views.pop("beta").shape)))
    if v.dim() == 3:
        views |= {n: t.unsqueeze(0) for n, t in views.items() if t.dim() == PER_TOKEN.get(n, 0) - 1}
    if views["q"].dim() != 4:
        problems.append(f"q is {list(views['q'].shape)}, not […, HK, K] as v {list(named['v'].shape)} asks for")
        return {}
    if not _shapes_fit(views, options, problems):
        return {}
    if "gk" in views and "dt_bias" in views and views["dt_bias"].dim() == 1:
        views["dt_bias"] = views["dt_bias"].unflatten(0, views["gk"].shape[2:])
    prompts.check_layout({n: t for n, t in views.items() if n != "workspace"}, ALIKE, WRITTEN, tuple(PER_TOKEN), problems)
    for name in CHANNELS:
        if name in views and views[name].dim() > 1 and views[name].stride(-1) != 1 and views[name].shape[-1] > 1:
            problems.append(f"{name} has strides {list(views[name].stride())}; its rows must be contiguous")
    v = views["v"]
    sizes = *v_sizes(views), views["q"].shape[3]
    rule, segments = Rule(options.rule), options.segments
    cut = f", {v.shape[3]}{'' if segments is None else f', {segments}'}" if rule.weighs else ""
    said = f"{OPERATOR}_workspace({', '.join(map(str, sizes))}, {options.rule!r}{cut})"
    check_workspace(views, workspace_for(*sizes, v.shape[3], rule, segments, v.shape[1]), said, problems)
    return views


_BETA = (
    "beta is {}, one per value channel, which has no form in chunks: each of them would have a triangular inverse of its own. "
    "The decode steps take it, token by token"
)


def _shapes_fit(views: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    (batch, length, HV, V), (HK, K) = views["v"].shape, views["q"].shape[2:]
    sequences = prompts.sequences_of(views, "v")
    if sequences < 0:
        problems.append("cu_seqlens is empty; it is [sequences + 1]")
        return False
    allowed: dict[str, checks.Shapes] = {
        **dict.fromkeys(OF_KEYS, {"[…, HK, K]": (batch, length, HK, K)}),
        **dict.fromkeys(("gk", "erase"), {"[…, HV, K]": (batch, length, HV, K)}),
        "out": {"[…, HV, V]": (batch, length, HV, V)},
        **dict.fromkeys(("g", "beta"), {"[…, HV]": (batch, length, HV)}),
        "A_log": {"[HV]": (HV,)},
        "dt_bias": {"[HV, K]": (HV, K), "[HV K]": (HV * K,)} if "gk" in views else {"[HV]": (HV,)},
        "cu_seqlens": {"[sequences + 1]": (sequences + 1,)},
    }
    fits = [checks.check_shape(name, views[name], allowed[name], problems) for name in views if name in allowed]
    axes, inner = ("HV, K, V", (HV, K, V)) if options.state_layout == "kv" else ("HV, V, K", (HV, V, K))
    fits.append(prompts.states_fit(views, sequences, axes, inner, problems))
    if HK < 1 or HV % HK:
        problems.append(f"v has {HV} heads, which is not a multiple of the {HK} key heads")
        fits.append(False)
    return all(fits)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> LinearPromptProblem:
    """The problem that checked operands pose, given where they lie. Raises ArgumentError where the workspace cannot lie there."""
    check_alignment(OPERATOR, pointers)
    states = [n for n in STATES if n in views]

    def dtype(name: str) -> Any:
        return DTYPES[views[name].dtype] if name in views else None

    def index(name: str) -> Any:
        return INDEX[views[name].dtype if name in views else None]

    wide = [n for n in CHANNELS if n in views and views[n].dim() > 1]
    more = {"state": dtype(states[0])} if states else {}
    _, length, heads, head_v = views["v"].shape
    more |= cut_by(Rule(options.rule), options.segments, heads, head_v, length)
    return LinearPromptProblem(
        head_k=views["q"].shape[3],
        head_v=views["v"].shape[3],
        rule=Rule(options.rule),
        x=dtype("v"),
        **{name: dtype(name) for name in ("g", "gk", "A_log", "dt_bias", "beta", "erase", "alpha")},
        gate=Gate(options.gate),
        beta_form=Beta(options.beta),
        read="read" in views,
        write="write" in views,
        l2norm=options.l2norm,
        cu_seqlens=index("cu_seqlens"),
        layout=Layout(options.state_layout) if states else Layout.VK,
        initial="initial_states" in views,
        final="final_states" in views,
        pool="state" in views,
        started="has_initial_state" in views,
        index=index("state_indices"),
        checkpoints=index("checkpoint_positions"),
        copy=prompts.together(views, pointers, ALIKE),
        loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], 8) for n in wide) else Loads.ELEMENT,
        state_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], 2) for n in states) else Loads.ELEMENT,
        **more,
    )


_AXES = axes_of(PER_TOKEN)


def counts_of(views: Mapping[str, Tensor], rule: Rule) -> Counts:
    batch, length, heads, _ = views["v"].shape
    sequences = prompts.sequences_of(views, "v")
    return Counts(chunks_of(batch * length, sequences, rule), sequences, heads, heads // views["q"].shape[2], batch * length)


def kernel_values(spec: LinearSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    """Every kernel argument that is not a pointer."""
    counts = counts_of(views, spec.rule)
    values: dict[str, Value] = {"tokens": views["v"].shape[1], "sequences": counts.sequences, "heads": counts.heads}
    values |= {"group_heads": counts.group_heads, "scale": options.scale, "lower_bound": options.lower_bound}
    values |= {"pad_slot_id": options.pad_slot_id, "slots": views["state"].shape[0] if "state" in views else 0}
    values |= {"positions": views["checkpoints"].shape[0] if "checkpoints" in views else 0}
    values |= spec.counted(counts)
    values |= {f"{operand}_{axis}": views[operand].stride(_AXES[operand][axis]) for operand, axis in spec.strides()}
    values |= maps(views, spec.mapped, spec.rule.tokens)
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads of v; 0 if nothing is to be written."""
    return views["v"].shape[2] if writes(views) else 0


FAMILY = Family(
    OPERATOR,
    written=WRITTEN,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=lambda spec, views: spec.blocks(counts_of(views, spec.rule)),
    values_of=kernel_values,
    in_place=(("final_states", "initial_states"),),
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    named: dict[str, Any] = {n: t for n, t in views.items() if n != "workspace"}
    how = options._asdict()
    del how["segments"]  # token by token there are none
    reference(**named, beta_form=how.pop("beta"), **how, dtype=dtype)


_REQUIRED = ("q", "k", "v", "workspace", "out")
CALLERS = callers(
    FAMILY, {name: plain(NAMES, (*_REQUIRED, *required), FAMILY.written) for name, (required, _) in FUNCTIONS.items()}, Options,
    {name: partial(views_of, words) for name, (_, words) in FUNCTIONS.items()}, run_reference,
    words={name: {**WRITTEN_WORDS, **words} for name, (_, words) in FUNCTIONS.items()},
)  # fmt: skip
