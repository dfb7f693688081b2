"""A linear-attention call: its operands checked, turned into a problem, and planned. `ops/linear_attention.py` has the public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from .. import registry, runtime
from ..errors import ArgumentError
from ..kernels.linear_attention import (
    KEY_VECTORS,
    OF_KEY_HEADS,
    OPERATOR,
    Beta,
    Delta,
    Gate,
    Layout,
    LinearAttentionProblem,
    LinearAttentionSpec,
    Ring,
    Tokens,
    Update,
)
from ..reference.linear_attention import linear_attention as reference
from ..spec import SM90, Index, Loads, PoolMode
from . import checks
from . import linear_attention_commit as commit
from .checks import DTYPES

# A call's tensors, in the order of the kernels' arguments. The first four and `out` are always there.
NAMES = (
    "state", "q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", "read", "erase", "w", "write", "alpha", "out",
    "state_indices", "dst_state_indices", "num_accepted_tokens", "cu_seqlens", "intermediate_states",
    "ring_k", "ring_v", "ring_g", "ring_gk", "ring_beta",
)  # fmt: skip
_RINGS = NAMES[21:]
_CONTROL = NAMES[16:20]
_INDEX = {None: Index.NONE, torch.int32: Index.I32, torch.int64: Index.I64}


class Form(NamedTuple):
    """Which recurrence, in the words of kernels/linear_attention.py."""

    delta: str = "decayed"
    gate: str = "log"
    beta: str = "plain"
    l2norm: bool = False


class Options(NamedTuple):
    """What a call says beside its tensors."""

    form: Form
    scale: float
    lower_bound: float = 0.0
    layout: str = "vk"
    pad_slot_id: int = -1
    update_state: bool = True
    pdl: bool | None = None
    commit: bool = False  # k, v, g and beta are a ring's, and there is no q and no output


class Call(NamedTuple):
    """What a public function makes of its arguments."""

    name: str
    given: tuple[Tensor | None, ...]  # by NAMES
    options: Options
    required: tuple[str, ...] = ()  # operands that this function cannot do without
    objections: tuple[str, ...] = ()  # to what is not a tensor


_signatures = runtime.Signatures()
_find = _signatures.find
_TENSOR = object()  # stands for one in a key
_TENSOR_TYPES = frozenset((Tensor, Parameter))
_PLAIN_TYPES = frozenset((type(None), bool, int, float, str))


def operator(build: Callable[..., Call]) -> Callable[..., Tensor]:
    """The public function of a builder: makes the call and returns its output.

    A call like one seen before never reaches the builder: its arguments as they came, with tensors left out, are the key to its plan.
    """
    parameters = list(signature(build).parameters)
    v = parameters.index("v") if "v" in parameters else None  # the output is like v; a commit has none

    @wraps(build)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if is_compiling():
            call = build(*args, **kwargs)
            _dispatch(call)
            return output_of(call)
        out = kwargs.get("out")
        try:
            if out is None and v is not None:
                out = kwargs["out"] = torch.empty_like(args[v] if len(args) > v else kwargs["v"], memory_format=torch.contiguous_format)
            values = (*args, *kwargs.values())
            key = build, values[1].shape, tuple(kwargs), tuple([_TENSOR if type(x) in _TENSOR_TYPES else x for x in values])
            found = _find(key, values)
        except (AttributeError, IndexError, KeyError, TypeError):  # something is missing or wrong: the checks say what
            values, key, found = (), None, None
        if found is None:
            call = build(*args, **kwargs)
            _plan_as_given(call, key, values)()
            return output_of(call)
        found()
        return values[0] if v is None else out

    run.build = build  # for warm(), bind() and explain()
    return run


def _plan_as_given(call: Call, key: Any, values: tuple[Any, ...]) -> Callable[[], None]:
    """The plan of a call that is not known yet. The next one with arguments like these finds it, if the key says all about them."""
    places = {id(x): i for i, x in enumerate(values) if type(x) in _TENSOR_TYPES}
    others = [x for x in values if type(x) not in _TENSOR_TYPES]
    if len(places) + len(others) < len(values) or any(type(x) not in _PLAIN_TYPES for x in others) or not call.given[0].is_cuda:
        return plan(call)
    named = named_operands(call)
    found = _new_signature(call, checked_views(call, named), named, values, [places[id(t)] for t in named.values()])
    made = found.add(tuple(t.data_ptr() for t in named.values()))
    _signatures.add(key, found)
    return made


def output_of(call: Call) -> Any:
    return call.given[0] if call.options.commit else call.given[15]


def plan(call: Call) -> Callable[[], None]:
    """What runs a call."""
    given, options = call.given, call.options
    try:
        key = (given[2].shape, tuple([t is None for t in given]), options)
        found = _find(key, given)
    except (AttributeError, TypeError):  # not tensors, or options that cannot be hashed: the checks say which
        key = found = None
    if found is not None:
        return found
    if any(isinstance(t, Tensor) and type(t) not in (Tensor, Parameter) for t in given):  # fake, distributed, wrapped: theirs to say
        return partial(_dispatch, call)
    named = named_operands(call)
    views = checked_views(call, named)
    if not views["state"].is_cuda:
        return _reference_plan(call, views)
    found = _new_signature(call, views, named, given, [i for i, name in enumerate(NAMES) if name in named])
    made = found.add(tuple(t.data_ptr() for t in named.values()))
    _signatures.add(key, found)
    return made


def plan_call(call: Call) -> tuple[Callable[[], None], Tensor]:
    """(plan, out) of a call, without running it."""
    return plan(call), output_of(call)


def problem_of_call(call: Call) -> tuple[LinearAttentionProblem, int, torch.device, bool | None]:
    """(problem, batch, device, pdl as asked for) of a call. Raises ArgumentError."""
    named = named_operands(call)
    views = checked_views(call, named)
    problem = problem_of(views, {n: t.data_ptr() for n, t in named.items()}, call.options)
    return problem, batch_of(views), views["state"].device, call.options.pdl


def named_operands(call: Call) -> dict[str, Any]:
    """The operands by name, without those that are absent and may be."""
    required = ("state", "k", "v", "num_accepted_tokens") if call.options.commit else ("state", "q", "k", "v", "out")
    return {name: t for name, t in zip(NAMES, call.given, strict=True) if t is not None or name in (*required, *call.required)}


def batch_of(views: Mapping[str, Tensor]) -> int:
    if "out" not in views:
        return views["num_accepted_tokens"].shape[0]
    return views["out"].shape[0] if "cu_seqlens" not in views else views["cu_seqlens"].shape[0] - 1


def checked_views(call: Call, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The operands in token form (see reference/linear_attention.py). Raises ArgumentError with all that is wrong but where they lie."""
    problems: list[str] = []
    options = call.options
    if options.layout not in ("vk", "kv"):
        problems.append(f"state_layout is {options.layout!r}, not 'vk' or 'kv'")
    if options.pdl not in (None, True, False):
        problems.append(f"pdl is {options.pdl!r}, not True, False or None")
    if not isinstance(options.scale, (int, float)):
        problems.append(f"scale is {options.scale!r}, not a number")
    problems += call.objections
    if options.layout not in ("vk", "kv"):
        views = {}
    elif options.commit:
        views = commit.views_of(named, options.layout, problems)
    else:
        views = token_views(named, options, problems)
    if options.pdl and not problems and views["state"].is_cuda and (arch := runtime.device_arch(views["state"].device.index)) < SM90:
        problems.append(f"pdl needs sm_90 or later; {views['state'].device} is {arch}")
    if problems:
        raise ArgumentError(call.name, problems)
    return views


def token_views(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """Views of the operands in token form. Adds to `problems`; what comes back is only usable if that is nothing."""
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "state", problems)
    before = len(problems)
    state, q, v = named["state"], named["q"], named["v"]
    ragged = "cu_seqlens" in named
    if state.dim() != 4:
        problems.append(f"state is {list(state.shape)}, not [slots, heads, {'V, K' if options.layout == 'vk' else 'K, V'}]")
    if q.dim() not in (3, 4):
        problems.append(f"q is {list(q.shape)}, not [batch, heads, K] or [batch, tokens, heads, K]")
    if v.dim() != q.dim():
        problems.append(f"v is {list(v.shape)} and q is {list(q.shape)}: both with a tokens axis, or neither")
    if len(problems) > before:
        return {}
    views = dict(named)
    if options.layout == "kv":
        views["state"] = state = state.transpose(2, 3)
        if "intermediate_states" in named and named["intermediate_states"].dim() == 5:
            views["intermediate_states"] = named["intermediate_states"].transpose(3, 4)
    tokenwise = [n for n in NAMES[1:16] if n in named and n not in ("A_log", "dt_bias")]
    if q.dim() == 3:
        views |= {n: named[n].unsqueeze(0 if ragged else 1) for n in tokenwise if n != "g" or named[n].dim() > 1}
    B, T, H, K = views["q"].shape
    slots, HV, V, state_k = state.shape
    batch = max(named["cu_seqlens"].numel() - 1, 0) if ragged else B
    if ragged and B != 1:
        problems.append(f"q is {list(q.shape)} with cu_seqlens: sequences are packed, as [tokens, …] or [1, tokens, …]")
    if state_k != K:
        problems.append(f"state is {list(named['state'].shape)} in layout {options.layout!r}, whose K is {state_k}; q has K = {K}")
    if H == 0 or HV % H:
        problems.append(f"state has {HV} heads, not a multiple of the {H} of q and k")
    lead = (B, T)
    words = "[1, tokens" if ragged else "[batch, tokens"
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        **{n: {f"{words}, key heads, K]": (*lead, H, K)} for n in OF_KEY_HEADS},
        **{n: {f"{words}, heads, K]": (*lead, HV, K)} for n in ("gk", "erase")},
        **{n: {f"{words}, heads, V]": (*lead, HV, V)} for n in ("v", "gv", "w", "out")},
        "g": {f"{words}, heads]": (*lead, HV), "[heads]": (HV,)},
        "beta": {f"{words}, heads]": (*lead, HV), f"{words}, heads, V]": (*lead, HV, V)},
        "A_log": {"[heads]": (HV,)},
        "dt_bias": {"[heads, K]": (HV, K), "[heads * K]": (HV * K,)} if "gk" in named else {"[heads]": (HV,)},
        "num_accepted_tokens": {"[batch]": (batch,)},
        "state_indices": {"[batch]": (batch,)},
        "dst_state_indices": {"[batch]": (batch,)},
        "cu_seqlens": {"[batch + 1]": (batch + 1,)},
    }
    if "num_accepted_tokens" in named:
        columns = named["state_indices"].shape[-1] if "state_indices" in named else 0
        allowed["state_indices"] = {"[batch, columns], of which num_accepted_tokens picks one,": (batch, columns)}
    if "dst_state_indices" in named and named["dst_state_indices"].dim() == 2:
        allowed["dst_state_indices"] |= {"[batch, tokens]": (batch, named["dst_state_indices"].shape[1] if ragged else T)}
    if "intermediate_states" in views:
        kept = views["intermediate_states"]
        at_least = kept.shape[1] if kept.dim() == 5 and (ragged or kept.shape[1] >= T) else T
        allowed["intermediate_states"] = {"[batch, tokens or more, heads, V, K]": (batch, at_least, HV, V, K)}
    if any(n in views for n in _RINGS):
        allowed |= _ring_shapes(views, T, ragged, problems)
    fits = [checks.check_shape(n, t, allowed[n], problems) for n, t in views.items() if n in allowed]
    if len(problems) > before or not all(fits):
        return {}
    if "dt_bias" in views and "gk" in views and views["dt_bias"].dim() == 1:
        views["dt_bias"] = views["dt_bias"].unflatten(0, (HV, K))
    if "g" in views and views["g"].dim() == 1:
        views["g"] = views["g"].expand(*lead, HV)
    _check_layout(views, options, batch, problems)
    return views


def _ring_shapes(views: Mapping[str, Tensor], T: int, ragged: bool, problems: list[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """What the tensors of a ring must be: [slots, tokens or more, …] of what they keep."""
    if ragged:
        problems.append("a ring takes the same number of tokens of every sequence: not with cu_seqlens")
    if "state_indices" not in views:
        problems.append("a ring goes by slots: give state_indices")
    kept = [n for n in ("k", "v", "g", "gk", "beta") if n in views]
    if missing := [n for n in kept if f"ring_{n}" not in views]:
        problems.append(f"the ring does not keep {', '.join(missing)}")
    shapes = {}
    for name in kept:
        ring = views.get(f"ring_{name}")
        if ring is None:
            continue
        tokens = ring.shape[1] if ring.dim() > 1 and ring.shape[1] >= T else T
        shapes[f"ring_{name}"] = {"[slots, tokens or more, …]": (views["state"].shape[0], tokens, *views[name].shape[2:])}
        if ring.dtype != views[name].dtype:
            problems.append(f"ring.{name} is {ring.dtype}, and {name} is {views[name].dtype}")
        if ring.dim() == views[name].dim() > 3 and ring.stride(-1) != 1:
            problems.append(f"ring.{name} has strides {list(ring.stride())}; its last axis must be dense")
        if checks.overlaps_itself(ring):
            problems.append(f"ring.{name} has strides {list(ring.stride())}: two of its elements share memory")
    problems += [
        f"the ring keeps {n}, which the call does not have" for n in ("g", "gk", "beta") if f"ring_{n}" in views and n not in views
    ]
    return shapes


def _check_layout(views: Mapping[str, Tensor], options: Options, batch: int, problems: list[str]) -> None:
    state, out, kept = views["state"], views["out"], views.get("intermediate_states")
    slots, HV, V, K = state.shape
    dense = (V * K, K, 1) if options.layout == "vk" else (V * K, 1, V)
    for name, t in (("state", state), ("intermediate_states", kept)):
        if t is not None and any(n > 1 and have != want for n, have, want in zip((HV, V, K), t.stride()[-3:], dense, strict=True)):
            problems.append(f"{name} has strides {list(t.stride())}; its last three axes must be dense")
    if slots > 1 and state.stride(0) < HV * V * K:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap")
    if kept is not None:
        if kept.dtype != state.dtype:
            problems.append(f"intermediate_states is {kept.dtype}, not the state's {state.dtype}")
        if checks.overlaps_itself(kept):
            problems.append(f"intermediate_states has strides {list(kept.stride())}: two of its states share memory")
    if checks.overlaps_itself(out):
        problems.append(f"out has strides {list(out.stride())}: two of its elements share memory")
    source, target = views.get("state_indices"), views.get("dst_state_indices")
    if source is None:
        if slots < batch:
            problems.append(f"state has {slots} slots for a batch of {batch}, and there are no state_indices")
        problems += [f"{n} is given without state_indices" for n in ("dst_state_indices", "num_accepted_tokens") if n in views]
    elif target is not None and source.dtype != target.dtype:
        problems.append(f"state_indices is {source.dtype} and dst_state_indices is {target.dtype}")
    if target is not None and not options.update_state:
        problems.append("dst_state_indices is given, and update_state is False")
    if "num_accepted_tokens" in views and target is None and options.update_state and views["state_indices"].shape[1] > 1:
        problems.append(
            "num_accepted_tokens picks where to start; say with dst_state_indices where the new state goes, or update_state=False"
        )
    if "cu_seqlens" in views and views["cu_seqlens"].stride(0) != 1:
        problems.append("cu_seqlens is not contiguous")
    for name, t in views.items():
        if name not in ("state", "intermediate_states", "cu_seqlens", *_RINGS):
            # Offsets over batch and token are 64-bit products of 32-bit strides.
            first = 0 if name in ("A_log", "dt_bias", *_CONTROL) else 2
            checks.check_strides_fit(name, t, first, problems)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> LinearAttentionProblem:
    """The problem that checked operands pose, given where they lie."""
    if options.commit:
        return commit.problem_of(views, pointers, options)
    state, form = views["state"], options.form
    _, HV, V, K = state.shape
    ragged = "cu_seqlens" in views
    kept, target = views.get("intermediate_states"), views.get("dst_state_indices")
    each = target is not None and target.dim() == 2
    ring = "ring_k" in views
    several = ragged or each or ring or kept is not None or views["q"].shape[1] != 1
    lane = min(16 // state.element_size(), K & -K)  # elements of a vector that a lane owns

    def aligned(name: str, t: Tensor, along: int = -1, count: int = lane) -> bool:
        size = t.element_size()
        width = min(16, count * size)
        strides = [s * size for a, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if n > 1 and a != along % t.dim()]
        return (t.stride(along) == 1 or t.shape[along] == 1) and all(x % width == 0 for x in (pointers[name], *strides))

    along = -1 if options.layout == "vk" else -2
    states = [("state", state), *([("intermediate_states", kept)] if kept is not None else [])]
    wide = lane if options.layout == "vk" else min(16 // state.element_size(), V & -V)
    vectors = [n for n in (*KEY_VECTORS, "ring_k", "ring_gk") if n in views] + (["dt_bias"] if "gk" in views and "dt_bias" in views else [])
    present = {n: DTYPES[t.dtype] for n, t in views.items() if n not in (*_CONTROL, "intermediate_states", *_RINGS)}

    def index(name: str) -> Index:
        return _INDEX[views[name].dtype if name in views else None]

    return LinearAttentionProblem(
        dim_k=K,
        dim_v=V,
        nheads=HV,
        key_heads=views["q"].shape[2],
        delta=Delta(form.delta),
        layout=Layout(options.layout),
        tokens=Tokens.RAGGED if ragged else Tokens.MANY if several else Tokens.ONE,
        **present,
        gate=Gate(form.gate),
        beta_form=Beta(form.beta),
        beta_rows="beta" in views and views["beta"].dim() == 4,
        l2norm=form.l2norm,
        index=index("state_indices"),
        accepted=index("num_accepted_tokens"),
        cu_seqlens=index("cu_seqlens"),
        update=Update.NONE if not options.update_state else Update.EACH if each else Update.FINAL,
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        ring=Ring.STORE if ring else Ring.NONE,
        intermediates=kept is not None,
        state_loads=Loads.VECTOR if all(aligned(n, t, along, wide) for n, t in states) else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if all(aligned(n, views[n]) for n in vectors) else Loads.ELEMENT,
    ).for_tokens(views["q"].shape[1])


_AXES = {
    "state": {"slot": 0},
    "A_log": {"head": 0},
    "dt_bias": {"head": 0, "n": 1},
    "state_indices": {"batch": 0, "column": 1},
    "dst_state_indices": {"batch": 0, "token": 1},
    "num_accepted_tokens": {"batch": 0},
    "intermediate_states": {"batch": 0, "token": 1},
    **dict.fromkeys(_RINGS, {"slot": 0, "token": 1, "head": 2}),
}


def kernel_values(spec: LinearAttentionSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {
        "slots": views["state"].shape[1 if options.commit else 0],
        "pad_slot_id": options.pad_slot_id,
        "scale": float(options.scale),
        "lower_bound": float(options.lower_bound),
    }
    if options.commit:
        values |= {"most_tokens": views["k"].shape[2], "sequences": batch_of(views)}
        values |= {f"{operand}_{axis}": commit.stride(views, operand, axis) for operand, axis, _ in spec.strides()}
    else:
        values |= dict.fromkeys(("tokens", "total_tokens"), views["out"].shape[1])
        for name, operand in (("columns", "state_indices"), ("dst_columns", "dst_state_indices"), ("rows_kept", "intermediate_states")):
            if operand in views and views[operand].dim() > 1:
                values[name] = views[operand].shape[1]
        token_axes = {"batch": 0, "token": 1, "head": 2, "row": 3, "n": 3}
        for operand, axis, _ in spec.strides():
            values[f"{operand}_{axis}"] = views[operand].stride(_AXES.get(operand, token_axes)[axis])
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


def grid_of(spec: LinearAttentionSpec, views: Mapping[str, Tensor]) -> int:
    layers = views["state"].shape[0] if spec.commit else 1
    return layers * batch_of(views) * spec.nheads * spec.tiles


def _check_overlap(name: str, layout: Mapping[str, Tensor], where: Mapping[str, int]) -> None:
    ranges = {n: (p, p + checks.extent(layout[n])) for n, p in where.items()}
    written = [n for n in ("out", "state", "intermediate_states", *_RINGS) if n in ranges]
    problems: list[str] = []
    checks.check_overlap({n: ranges[n] for n in written}, {n: r for n, r in ranges.items() if n not in written}, problems)
    if problems:
        raise ArgumentError(name, problems)


def _new_signature(
    call: Call, views: Mapping[str, Tensor], named: Mapping[str, Tensor], given: tuple[Any, ...], places: Sequence[int]
) -> runtime.Signature:
    """Of the calls like this one, whose operands are `given` at these places."""
    options = call.options
    device = views["state"].device.index
    arch = runtime.device_arch(device)
    pdl = arch >= SM90 if options.pdl is None else options.pdl
    batch = batch_of(views)
    layout = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for name, t in views.items()}
    names = tuple(named)
    launches: dict[LinearAttentionProblem, runtime.Launch] = {}  # alignment is part of the problem

    def resolve(pointers: tuple[int, ...]) -> runtime.Launch | None:
        where = dict(zip(names, pointers, strict=True))
        _check_overlap(call.name, layout, where)
        if batch == 0 or layout["v"].numel() == 0:
            return None
        problem = problem_of(layout, where, options)
        if problem not in launches:
            spec = registry.select(OPERATOR, problem, batch, arch, pdl)
            kernel = runtime.load(spec, device, call.name)
            grid = grid_of(spec, layout)
            if grid >= 2**31:
                raise ArgumentError(call.name, [f"batch {batch} needs {grid} blocks; a launch has fewer than 2^31"])
            launches[problem] = runtime.Launch(kernel, device, grid, kernel_values(spec, layout, options))
            registry.count_plan(spec)
        return launches[problem]

    return runtime.Signature(given, resolve, places)


def _reference_plan(call: Call, views: Mapping[str, Tensor]) -> Callable[[], None]:
    """For CPU tensors; made for each call, since it holds them."""
    _check_overlap(call.name, views, {name: t.data_ptr() for name, t in views.items()})
    form, scale, lower_bound, _, pad_slot_id, update_state, *_ = call.options
    if call.options.commit:
        return partial(commit.reference, views, form, pad_slot_id, lower_bound)
    return partial(reference, views, form, scale=scale, lower_bound=lower_bound, pad_slot_id=pad_slot_id, update_state=update_state)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "linear_attention(str name, Tensor(a!) state, Tensor? q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? gv, Tensor? beta, "
    "Tensor? A_log, Tensor? dt_bias, Tensor? read, Tensor? erase, Tensor? w, Tensor? write, Tensor? alpha, Tensor(b!)? out, "
    "Tensor? state_indices, Tensor? dst_state_indices, Tensor? num_accepted_tokens, Tensor? cu_seqlens, "
    "Tensor(c!)? intermediate_states, Tensor(d!)? ring_k, Tensor(e!)? ring_v, Tensor(f!)? ring_g, Tensor(g!)? ring_gk, "
    "Tensor(h!)? ring_beta, str delta, str gate, str beta_form, bool l2norm, float scale, float lower_bound, str layout, "
    "int pad_slot_id, bool update_state, bool? pdl, bool commit) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(call: Call) -> None:
    """The call through torch's dispatcher, which comes back below with plain tensors, or traces it."""
    form, *rest = call.options
    torch.ops.ssmgen.linear_attention(call.name, *call.given, *form, *rest)


@torch.library.impl(_library, "linear_attention", "CUDA")
@torch.library.impl(_library, "linear_attention", "CPU")
def _op(name: str, *args: Any) -> None:
    given, form, rest = args[: len(NAMES)], args[len(NAMES) : len(NAMES) + 4], args[len(NAMES) + 4 :]
    plan(Call(name, tuple(given), Options(Form(*form), *rest)))()


@torch.library.register_fake("ssmgen::linear_attention", lib=_library)
def _fake(*args: Any) -> None:
    return None
