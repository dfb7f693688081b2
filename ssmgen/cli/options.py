"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ..catalog import OPERATOR_OF, OPERATORS
from ..engine import short_conv
from ..errors import SsmgenError
from ..families.causal_conv1d import spec as causal_conv1d
from ..families.causal_conv1d_update import spec as causal_conv1d_update
from ..families.delta_layer import spec as delta_layer
from ..families.gated_rms_norm import spec as gated_rms_norm
from ..families.linear_attention.problem import Layout, Ring
from ..families.mamba2_layer import spec as mamba2_layer
from ..families.replay_selective_state_update import spec as replay_family
from ..spec import Arch, DType, Index, PoolMode

CONVOLUTIONS = (causal_conv1d.OPERATOR, causal_conv1d_update.OPERATOR)
MAX_LAYER_TOKENS = short_conv.MAX_TOKENS
REPLAY, MAX_TOKENS = replay_family.OPERATOR, replay_family.MAX_TOKENS
NORM = gated_rms_norm.OPERATOR
DELTA_LAYERS = ("gdn_layer", "kda_layer")
LAYERS = (mamba2_layer.OPERATOR, delta_layer.OPERATOR, *DELTA_LAYERS)
BUILT = [*OPERATORS, *DELTA_LAYERS]
EXIT_FAILURE, EXIT_DRIFT = 1, 3  # click itself exits with 2 for a wrong command line
EXIT_INTERRUPTED = 130  # as shells have it for Ctrl-C


class ArchType(click.ParamType):
    name = "arch"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return [Arch.parse(text) for text in value.split(",")] if isinstance(value, str) else value
        except SsmgenError as e:
            self.fail(str(e), param, ctx)


class Folder(click.Path):
    """A directory to write into, which need not exist yet. `~` is expanded: after `--out=`, a shell leaves it as it is."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not str(value).strip():
            self.fail("an empty name is no directory", param, ctx)
        try:
            return super().convert(Path(value).expanduser(), param, ctx)
        except (OSError, RuntimeError, ValueError) as e:  # a name too long, no such user, a null character
            self.fail(f"{str(value)!r} is no directory: {getattr(e, 'strerror', None) or e}", param, ctx)


def _names(enum: type) -> click.Choice:
    return click.Choice([member.value for member in enum])


arch_option = click.option("--arch", "archs", type=ArchType(), default="sm_90a", show_default=True, help="Targets, separated by commas.")
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
model_options = [
    click.option("--model", help="A model of `ssmgen models`."),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--state", "states", type=_names(DType), multiple=True, help="State dtype; may repeat. Default: the model's."),
    click.option("--io", type=_names(DType), default="bf16", show_default=True, help="Dtype of activations: not of state and f32 weights."),
    click.option("--index", "indices", type=_names(Index), multiple=True, help="Slot index type; may repeat. Default: none and i32."),
    click.option("--pool", "pools", type=_names(PoolMode), multiple=True, help="May repeat. Default: single."),
    click.option("--pdl/--no-pdl", default=None, help="Programmatic dependent launch. Default: both."),
    click.option("--tokens", type=click.IntRange(1), help="Per sequence and call; not of Mamba-1. Default: 1."),
    click.option("--intermediates", is_flag=True, help="Keep the state after each token."),
    click.option("--no-update", is_flag=True, help="Leave the pool's state as it is."),
    click.option("--layout", type=_names(Layout), help="Order of the state's last two axes. This to --layers: not of Mamba. Default: vk."),
    click.option("--ring", type=_names(Ring), help="store: keep the tokens' inputs; commit: replay them. Default: none."),
    click.option("--layers", is_flag=True, help="A commit of several layers at once."),
    click.option("--replay", type=click.IntRange(1, MAX_TOKENS), help="Of Mamba-2, also steps of so many tokens that are replayed."),
    click.option("--window", type=click.IntRange(1, MAX_TOKENS), help="With --replay: a ring for so many tokens. Default: of one step."),
]


def with_model(command: Any) -> Any:
    for option in reversed(model_options):
        command = option(command)
    return command


def _refuse(given: Iterable[str], taken: Iterable[str], operator: str, model: str) -> None:
    """Raises click.UsageError that names the options which an operator of a model does not take."""
    if refused := set(given) - set(taken):
        options = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(refused))
        raise click.UsageError(f"{operator} of {model} does not take {options}")


def problems_of(
    name: str, operator: str | None, tp: int, states: Any, io: str, indices: Any, pools: Any, replay: Any, window: Any, **more: Any
) -> list[Any]:
    """What a model asks of an operator, or of all that it uses, under the options of `with_model`."""
    from ..models import LinearAttention, find_model

    model = find_model(name).divided(tp)
    slots, activations = tuple(map(Index, indices)) or (Index.NONE, Index.I32), DType(io)
    if replay is None and (window or operator == REPLAY):
        raise click.UsageError("--window goes with --replay" if window else f"--replay says how many tokens a step of {REPLAY} has")
    replays = model.replays(tuple(map(DType, states)), slots, activations, replay, window) if replay else []
    if operator == REPLAY:
        return replays
    norms = model.norms(activations)
    if operator == NORM:
        return norms
    call = {option: value for option, value in more.items() if value}
    layout = {"layout": Layout(call["layout"])} if "layout" in call and model.layer_function in DELTA_LAYERS else {}
    several = ("tokens", "intermediates", "no_update") if model.layer_function else ()
    how = {"tokens": call.get("tokens", 1), "intermediates": "intermediates" in call, "update_state": "no_update" not in call}
    layers = model.layers(tuple(map(DType, states)), slots, activations, **(how if several else {}), **layout)
    if operator in LAYERS:
        split = ["pool"] if set(pools) - {PoolMode.SINGLE.value} else []
        _refuse([*call, *split], (*layout, *several), operator, name)
        return layers if operator in (model.layer_function, *(OPERATOR_OF[type(p)] for p in layers[:1])) else []
    if several and how["tokens"] > MAX_LAYER_TOKENS:
        layers = []  # these take the separate operators
    if operator not in (None, model.operator, *CONVOLUTIONS):
        return []
    several = () if model.kind == "mamba1" else ("tokens", "intermediates", "no_update")
    taken = more.keys() if isinstance(model, LinearAttention) else several
    _refuse(call, ("tokens",) if operator in CONVOLUTIONS else taken, operator or model.function, name)
    convolutions = model.convolutions(slots, activations, call.get("tokens", 1))
    found = [p for p in convolutions if operator in (None, OPERATOR_OF[type(p)])]
    if operator not in (None, model.operator):
        return found
    call |= {option: enum(call[option]) for option, enum in (("layout", Layout), ("ring", Ring)) if option in call}
    if call.pop("no_update", False):
        call["update_state"] = False
    pooled = tuple(map(PoolMode, pools)) or (PoolMode.SINGLE,)
    found += [] if operator else [*replays, *norms, *layers]
    return model.problems(states=tuple(map(DType, states)), indices=slots, pools=pooled, io=activations, **call) + found
