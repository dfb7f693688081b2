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

from .. import runtime
from ..errors import ArgumentError
from ..kernels.linear_attention import OPERATOR, LinearAttentionSpec
from ..kernels.linear_attention_problem import KEY_VECTORS, Beta, Delta, Gate, Layout, LinearAttentionProblem, Ring, Tokens, Update
from ..reference.linear_attention import linear_attention as reference
from ..spec import Index, Loads, PoolMode
from . import checks
from . import linear_attention_commit as commit
from .checks import DTYPES, INDEX
from .linear_attention_views import CONTROL, NAMES, RINGS, Form, Options, RawInputs, token_views
from .planning import Family, check_overlap, new_signature


class Call(NamedTuple):
    """What a public function makes of its arguments."""

    name: str
    given: tuple[Tensor | None, ...]  # by NAMES
    options: Options
    required: tuple[str, ...] = ()  # operands that this function cannot do without
    objections: tuple[str, ...] = ()  # to what is not a tensor


_signatures = runtime.Signatures()
_find = _signatures.find
_TENSOR_TYPES = frozenset((Tensor, Parameter))
_PLAIN_TYPES = frozenset((type(None), bool, int, float, str))


def operator(build: Callable[..., Call]) -> Callable[..., Tensor]:
    """The public function of a builder: makes the call and returns its output.

    A call like one seen before never reaches the builder: its arguments as they came say which plan is its.
    """
    parameters = list(signature(build).parameters)
    v = parameters.index("v") if "v" in parameters else None  # the output is like v; a commit has none, and a ring for its second

    @wraps(build)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if is_compiling():
            call = build(*args, **kwargs)
            _dispatch(call)
            return output_of(call)
        out = kwargs.get("out")
        try:
            if v is None:
                values = (*args, *kwargs.values(), *(args[1] if len(args) > 1 else kwargs["ring"]))
                shape = None
            else:
                if out is None:
                    out = kwargs["out"] = torch.empty_like(args[v] if len(args) > v else kwargs["v"], memory_format=torch.contiguous_format)
                ring = kwargs.get("ring")
                values = (*args, *kwargs.values()) if ring is None else (*args, *kwargs.values(), *ring)
                shape = values[1].shape
            key = build, shape, tuple(kwargs), tuple(map(type, values))
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
    """The plan of a call that is not known yet. The next one with arguments like these finds it, if nothing else is among them."""
    kinds = [type(x) for x in values]
    tensors = [i for i, kind in enumerate(kinds) if kind in _TENSOR_TYPES]
    plain = [i for i, kind in enumerate(kinds) if kind in _PLAIN_TYPES]
    places = {id(values[i]): i for i in tensors}
    known = len(places) + len(plain) + kinds.count(RawInputs) == len(values)  # each tensor once, and what is compared below
    if key is None or not known or not _on_card(call):
        return plan(call)
    named = named_operands(call)
    found = _new_signature(call, checked_views(call, named), named, values, [places[id(t)] for t in named.values()], plain)
    made = found.add(tuple(t.data_ptr() for t in named.values()))
    _signatures.add(key, found)
    return made


def _on_card(call: Call) -> bool:
    return isinstance(call.given[0], Tensor) and call.given[0].is_cuda


def output_of(call: Call) -> Any:
    return call.given[0] if call.options.commit else call.given[15]


def plan(call: Call) -> Callable[[], None]:
    """What runs a call."""
    given, options = call.given, call.options
    try:
        key = (call.name, given[2].shape, tuple([t is None for t in given]), options)
        found = None if call.objections else _find(key, given)  # what is objected to need not show in the key
    except (AttributeError, TypeError):  # not tensors, or options that cannot be hashed: the checks say which
        key = found = None
    if found is not None:
        return found
    if any(isinstance(t, Tensor) and type(t) not in (Tensor, Parameter) for t in given):  # fake, distributed, wrapped: theirs to say
        return partial(_dispatch, call)
    named = named_operands(call)
    views = checked_views(call, named)
    if not _on_card(call):
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
    if not isinstance(options.scale, (int, float)):
        problems.append(f"scale is {options.scale!r}, not a number")
    problems += call.objections
    if options.layout not in ("vk", "kv"):
        views = {}
    elif options.commit:
        views = commit.views_of(named, options.layout, problems)
    else:
        views = token_views(named, options, problems)
    checks.check_pdl(options.pdl, views, problems)
    if problems:
        raise ArgumentError(call.name, problems)
    return views


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

    along = -1 if options.layout == "vk" else -2
    states = [("state", state), *([("intermediate_states", kept)] if kept is not None else [])]
    wide = lane if options.layout == "vk" else min(16 // state.element_size(), V & -V)
    vectors = [n for n in (*KEY_VECTORS, "ring_k", "ring_gk") if n in views] + (["dt_bias"] if "gk" in views and "dt_bias" in views else [])
    present = {n: DTYPES[t.dtype] for n, t in views.items() if n not in (*CONTROL, "intermediate_states", *RINGS)}

    def index(name: str) -> Index:
        return INDEX[views[name].dtype if name in views else None]

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
        state_loads=Loads.VECTOR if all(checks.aligned(t, pointers[n], wide, along) for n, t in states) else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], lane) for n in vectors) else Loads.ELEMENT,
    ).for_tokens(views["q"].shape[1])


_AXES = {
    "state": {"slot": 0},
    "A_log": {"head": 0},
    "dt_bias": {"head": 0, "n": 1},
    "state_indices": {"batch": 0, "column": 1},
    "dst_state_indices": {"batch": 0, "token": 1},
    "num_accepted_tokens": {"batch": 0},
    "intermediate_states": {"batch": 0, "token": 1},
    **dict.fromkeys(RINGS, {"slot": 0, "token": 1, "head": 2}),
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


FAMILY = Family(
    OPERATOR,
    written=("out", "state", "intermediate_states", *RINGS),
    problem_of=lambda views, pointers, options: problem_of(views, pointers, options),
    size_of=lambda views: batch_of(views) if views["v"].numel() else 0,
    grid_of=lambda spec, views: grid_of(spec, views),
    values_of=lambda spec, views, options: kernel_values(spec, views, options),
)


def _new_signature(
    call: Call, views: Mapping[str, Tensor], named: Mapping[str, Tensor], given: tuple[Any, ...], places: Sequence[int],
    constants: Sequence[int] = (),
) -> runtime.Signature:  # fmt: skip
    """Of the calls like this one, whose operands are `given` at these places, and whose other arguments at those."""
    return new_signature(FAMILY, call.name, views, named, call.options, call.options.pdl, given, places, constants)


def _reference_plan(call: Call, views: Mapping[str, Tensor]) -> Callable[[], None]:
    """For CPU tensors; made for each call, since it holds them."""
    check_overlap(FAMILY, call.name, views, {name: t.data_ptr() for name, t in views.items()})
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
