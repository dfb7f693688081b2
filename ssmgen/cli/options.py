"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import click

from ..catalog import OPERATORS
from ..errors import SsmgenError
from ..family import public_names
from ..models import OPTIONS, Ask, Wanted, asks, find_model
from ..spec import Arch, DType, Index, Layout, Narrow, PoolMode, Problem, Ring, stored_type

BUILT = [*asks(), *(name for name in OPERATORS if name in public_names() and name not in asks())]
SWITCHES: dict[str, Ask] = {ask.switch: ask for ask in asks().values() if ask.switch}  # by the option that asks for them
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


def _names(*enums: type[Enum]) -> click.Choice:
    return click.Choice([member.value for enum in enums for member in enum])


arch_option = click.option("--arch", "archs", type=ArchType(), default="sm_90a", show_default=True, help="Targets, separated by commas.")
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
model_options = [
    click.option("--model", help="A model of `ssmgen models`."),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--state", "states", type=_names(DType, Narrow), multiple=True, help="State dtype; may repeat. Default: the model's."),
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
    click.option(
        "--replay", type=click.IntRange(1, SWITCHES["replay"].most), help="Of Mamba-2, also steps of so many tokens that are replayed."
    ),
    click.option(
        "--window", type=click.IntRange(1, SWITCHES["replay"].most), help="With --replay: a ring for so many tokens. Default: of one step."
    ),
]


def with_model(command: Any) -> Any:
    for option in reversed(model_options):
        command = option(command)
    return command


# Fields of `Wanted` whose options read otherwise.
_FLAGS = {"update_state": "no-update", "pools": "pool"}


def refuse_others(name: str, given: Mapping[str, Any]) -> None:
    """Raises click.UsageError for an option that is for an operator which the model does not use."""
    for switch, ask in SWITCHES.items():
        if given[switch] and not ask.used_by(model := find_model(name)):
            raise click.UsageError(ask.absent(model, f"--{switch}"))


def wanted_of(states: Any, io: str, indices: Any, pools: Any, no_update: bool, **more: Any) -> tuple[Wanted, set[str]]:
    """What the options of `with_model` say, and the fields among it that somebody gave. Raises click.UsageError."""
    if more["window"] and not more["replay"]:
        raise click.UsageError("--window goes with --replay")
    enums = {name: enum(more[name]) for name, enum in (("layout", Layout), ("ring", Ring)) if more[name]}
    repeated = {"states": tuple(map(stored_type, states)), "indices": tuple(map(Index, indices)), "pools": tuple(map(PoolMode, pools))}
    said = {name: value for name, value in (more | enums | repeated).items() if value}
    wanted = Wanted(**said, io=DType(io), update_state=not no_update)
    given = said.keys() | ({"update_state"} if no_update else set())
    return wanted, given - ({"pools"} if set(wanted.pools) == {PoolMode.SINGLE} else set())


def problems_of(name: str, operator: str | None, tp: int, **options: Any) -> list[Problem]:
    """What a model asks of an operator, or of all that it uses, under the options of `with_model`."""
    model = find_model(name).divided(tp)
    wanted, given = wanted_of(**options)
    ask = asks().get(operator or model.operator)
    if operator and ask and not ask.serves(wanted) and ask.switch:
        raise click.UsageError(f"--{ask.switch} says how many tokens a step of {operator} has")
    if ask is None or not ask.used_by(model):
        return []
    if refused := given & OPTIONS - set(ask.takes(model)):
        flags = sorted(_FLAGS.get(option, option) for option in refused)
        raise click.UsageError(f"{operator or model.function} of {name} does not take {', '.join(f'--{flag}' for flag in flags)}")
    if operator and not ask.narrow and any(isinstance(state, Narrow) for state in wanted.states):
        raise click.UsageError(f"{operator} has no states in fewer bits; --state takes {', '.join(t.value for t in DType)} of it")
    return list(ask.problems(model, wanted)) if operator else model.asked(wanted)
