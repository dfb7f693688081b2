"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import click

from ..errors import SsmgenError
from ..select.catalog import OPERATORS
from ..select.models import OPTIONS, Ask, Client, Wanted, asks, find_model
from ..spec.family import public_names
from ..spec.kernel import Arch, DType, Index, Layout, Narrow, PoolMode, Problem, Ring, stored_type

BUILT = [*asks(), *(name for name in OPERATORS if name in public_names() and name not in asks())]
SWITCHES: dict[str, Ask] = {ask.switch: ask for ask in asks().values() if ask.switch}  # by the option that asks for them
EXIT_FAILURE, EXIT_DRIFT = 1, 3  # click itself exits with 2 for a wrong command line
EXIT_INTERRUPTED = 130  # as shells have it for Ctrl-C


# Compute capabilities of cards, by their common names.
CARDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("a100", "a800", "a30"), (8, 0)),
    **dict.fromkeys(("a2", "a10", "a10g", "a16", "a40", "a6000", "rtx3090"), (8, 6)),
    **dict.fromkeys(("l4", "l20", "l40", "l40s", "rtx4090"), (8, 9)),
    **dict.fromkeys(("h20", "h100", "h200", "h800", "gh200"), (9, 0)),
    **dict.fromkeys(("b100", "b200", "gb200"), (10, 0)),
    **dict.fromkeys(("b300", "gb300"), (10, 3)),
    "rtx5090": (12, 0),
}


class ArchType(click.ParamType):
    """Names of architectures or of cards, separated by commas.

    looked_up: a device looks kernels up under this architecture. Each capability has one: sm_90 becomes sm_90a, with a note.
    """

    name = "arch"

    def __init__(self, looked_up: bool = False):
        self.looked_up = looked_up

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return list(dict.fromkeys(map(self._one, value.split(",")))) if isinstance(value, str) else value

    def _one(self, text: str) -> Arch:
        if capability := CARDS.get(re.sub(r"[\s_-]|nvidia|geforce", "", text.lower())):
            return Arch.of_capability(*capability)
        try:
            arch = Arch.parse(text.strip())
        except SsmgenError:
            self.fail(f"{text!r} is unknown; expected an architecture (sm_80, sm_90a, sm_100a, sm_120, …) or a card: {', '.join(CARDS)}")
        there = Arch.of_capability(*divmod(arch.number, 10))
        if self.looked_up and arch != there:
            click.echo(f"{arch} becomes {there}: GPUs of compute capability {arch.number / 10} load kernels of {there}.", err=True)
            return there
        return arch


class Folder(click.Path):
    """A directory to write into, which need not exist yet. `~` is expanded: after `--out=`, a shell leaves it as it is."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not str(value).strip():
            self.fail("the name is empty; expected a directory", param, ctx)
        try:
            return super().convert(Path(value).expanduser(), param, ctx)
        except (OSError, RuntimeError, ValueError) as e:  # a name too long, no such user, a null character
            self.fail(f"{str(value)!r} is not a directory: {getattr(e, 'strerror', None) or e}", param, ctx)


def _names(*enums: type[Enum]) -> click.Choice:
    return click.Choice([member.value for enum in enums for member in enum])


_ARCHS = "Architectures or cards (h100, b200, l40s, …), separated by commas."
arch_option = click.option("--arch", "archs", type=ArchType(), default="sm_90a", show_default=True, help=_ARCHS)
device_arch_option = click.option("--arch", "archs", type=ArchType(looked_up=True), default="sm_90a", show_default=True, help=_ARCHS)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
model_options = [
    click.option("--model", help="A model of `ssmgen models`, or a checkpoint of it on Hugging Face (org/Name)."),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Number of tensor-parallel ranks."),
    click.option("--state", "states", type=_names(DType, Narrow), multiple=True, help="State dtype; may repeat. Default: the model's."),
    click.option(
        "--io", type=_names(DType), default="bf16", show_default=True, help="Dtype of activations; the state and f32 weights keep theirs."
    ),
    click.option("--index", "indices", type=_names(Index), multiple=True, help="Slot index type; may repeat. Default: none and i32."),
    click.option(
        "--pool",
        "pools",
        type=_names(PoolMode),
        multiple=True,
        help="Pool of states: in place (single) or to other slots (split); may repeat. Default: single.",
    ),
    click.option(
        "--pdl",
        type=click.Choice(("on", "off", "both")),
        is_flag=False,
        flag_value="on",
        default="on",
        show_default=True,
        help="Programmatic dependent launch, from sm_90 on.",
    ),
    click.option("--no-pdl", is_flag=True, help="The same as --pdl off."),
    click.option("--tokens", type=click.IntRange(1), help="Tokens per sequence and call; not for Mamba-1. Default: 1."),
    click.option("--intermediates", is_flag=True, help="Keep the state after each token."),
    click.option("--no-update", is_flag=True, help="Do not write the pool's states."),
    click.option("--layout", type=_names(Layout), help="Order of the state's last two axes; not for Mamba. Default: vk."),
    click.option(
        "--ring",
        type=_names(Ring),
        help="Ring of tokens: store keeps a draft's inputs, ready computes gates first, commit replays them; replay reads states through "
        "the tokens that they lack. Not for Mamba. Default: none.",
    ),
    click.option("--layers", is_flag=True, help="Commit several layers at once; not for Mamba."),
    click.option(
        "--replay", type=click.IntRange(1, SWITCHES["replay"].most), help="Mamba-2: also the replay kernels, for steps of this many tokens."
    ),
    click.option(
        "--window",
        type=click.IntRange(1, SWITCHES["replay"].most),
        help="With --replay: use a ring of this many tokens. Default: the history of one step.",
    ),
    click.option(
        "--rows",
        type=click.IntRange(1, SWITCHES["rows"].most),
        help="Also the products of the recurrent layers' projections, for batches of up to this size.",
    ),
]


def with_model(command: Any) -> Any:
    for option in reversed(model_options):
        command = option(command)
    return command


# Fields of `Wanted` whose options read otherwise.
_FLAGS = {"update_state": "no-update", "pools": "pool", "indices": "index"}


def refuse_others(name: str, given: Mapping[str, Any]) -> None:
    """Raises click.UsageError for an option that is for an operator which the model does not use."""
    for switch, ask in SWITCHES.items():
        if given[switch] and not ask.used_by(model := find_model(name)):
            raise click.UsageError(ask.absent(model, f"--{switch}"))


def wanted_of(states: Any, io: str, indices: Any, pools: Any, no_update: bool, **more: Any) -> tuple[Wanted, set[str]]:
    """(the request of the options of `with_model`, the fields that were given). Raises click.UsageError."""
    if more["window"] and not more["replay"]:
        raise click.UsageError("--window is given without --replay; expected both")
    enums = {name: enum(more[name]) for name, enum in (("layout", Layout), ("ring", Ring)) if more[name]}
    repeated = {"states": tuple(map(stored_type, states)), "indices": tuple(map(Index, indices)), "pools": tuple(map(PoolMode, pools))}
    said = {name: value for name, value in (more | enums | repeated).items() if value}
    wanted = Wanted(**said, io=DType(io), update_state=not no_update)
    given = said.keys() | ({"update_state"} if no_update else set())
    return wanted, given - ({"pools"} if set(wanted.pools) == {PoolMode.SINGLE} else set())


def pdl_choices(pdl: str, no_pdl: bool) -> tuple[bool, ...]:
    """The values of PDL to build, from --pdl and --no-pdl: True where a kernel overlaps the one launched before it."""
    return {"on": (True,), "off": (False,), "both": (True, False)}["off" if no_pdl else pdl]


_ORDINARY = {"states", "indices", "layout"}  # fields that a caller's usual calls may have


def _by_callers(wanted: Wanted, given: set[str], callers: Sequence[Client | None]) -> list[Wanted]:
    """The calls of each caller; None: this package's own functions. One caller alone chooses its slots and layout.

    If several callers are built for, a caller whose calls have other slots, another layout or fewer tokens adds nothing.
    """
    if len(callers) == 1 and (only := callers[0]) is not None:
        if refused := sorted(given & {"indices", "layout"}):
            flags = " and ".join(f"--{_FLAGS.get(option, option)}" for option in refused)
            raise click.UsageError(f"--caller {only.value} fixes slots and layout. Leave out {flags}.")
        return [wanted.of(only)]
    found = [wanted] if None in callers else []
    for caller in filter(None, callers):
        if given <= _ORDINARY and caller.index in wanted.indices and ("layout" not in given or caller.layout is wanted.layout):
            found.append(wanted.of(caller))
    return found


def problems_of(name: str, operator: str | None, tp: int, callers: Sequence[Client | None] = (None,), **options: Any) -> list[Problem]:
    """A model's problems for one operator, or for all that it uses, under the options of `with_model`.

    callers: who calls; None among them stands for this package's own functions.
    """
    model = find_model(name).divided(tp)
    wanted, given = wanted_of(**options)
    ask = asks().get(operator or model.operator)
    if operator and ask and not ask.serves(wanted) and ask.switch:
        raise click.UsageError(f"--tokens does not apply to {operator}. Pass --{ask.switch}.")
    if ask is None or not ask.used_by(model):
        return []
    if refused := given & OPTIONS - set(ask.takes(model)):
        flags = sorted(_FLAGS.get(option, option) for option in refused)
        raise click.UsageError(f"{operator or model.function} of {name} does not take {', '.join(f'--{flag}' for flag in flags)}")
    if operator and not ask.narrow and any(isinstance(state, Narrow) for state in wanted.states):
        raise click.UsageError(f"{operator} has no states in fewer bits; expected --state {', '.join(t.value for t in DType)}")
    found: dict[Problem, None] = {}
    for one in _by_callers(wanted, given, callers):
        if not operator:
            found |= dict.fromkeys(model.asked(one))
        elif one.caller is None or ask.called_by(model, one.caller):
            found |= dict.fromkeys(ask.problems(model, one))
    return list(found)
