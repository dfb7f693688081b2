"""Public models by name: the shapes of their layers and the kernels that these need, so that kernels can be built by model name.

A row of models.toml states the shapes of one model; its `kind` names its class. A family's `models.py` has the classes of the kinds
that the family decodes, `KINDS = {kind: class}`, and the problems that models pose to its operators, `ASKS = {operator: Ask}`. Nothing
here names a family: a further one joins by its record alone.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ModelError
from ..spec.family import parts
from ..spec.kernel import DType, Index, Layout, PoolMode, Problem, Ring

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SLOTS = (Index.NONE, Index.I32)


class Client(Enum):
    """Code that calls ssmgen on a model's behalf. Each family's `models.py` says which problems its calls pose."""

    TRANSFORMERS = "transformers"  # ssmgen.compat.hf
    ENGINES = "engines"  # the plugins of vLLM and SGLang, and TensorRT-LLM's functions
    MAMBA_SSM = "mamba-ssm"  # functions of mamba-ssm and causal-conv1d, called as mamba-ssm's modules do

    @property
    def index(self) -> Index:
        """How it names slots."""
        return Index.I32 if self is Client.ENGINES else Index.NONE

    @property
    def layout(self) -> Layout:
        """The layout of linear attention's states."""
        return Layout.KV if self is Client.TRANSFORMERS else Layout.VK

    @property
    def left(self) -> str:
        """The kernels that `build` leaves out, so that a first request compiles them, in words."""
        return _LEFT[self]


_LEFT = {
    Client.TRANSFORMERS: (
        "norms between layers (of the hidden size), linear layers of attention and MLPs (without --rows: all), batches with padding, "
        "Mamba-1 prompts of one token or after a cached prefix"
    ),
    Client.ENGINES: (
        "norms between layers (of the hidden size), drafts (--tokens, --replay), caches of prefixes (--intermediates), Mamba-1 of SGLang"
    ),
    Client.MAMBA_SSM: "norms between layers (of the hidden size), packed sequences, Mamba-2 prompts that continue from a state",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The calls that kernels are wanted for, as the options of `ssmgen build` say. Each operator heeds what it takes (`Ask.takes`)."""

    states: tuple[Any, ...] = ()  # of recurrent states, DType or Narrow; each model's own if none is given
    indices: tuple[Index, ...] = SLOTS
    pools: tuple[PoolMode, ...] = (PoolMode.SINGLE,)
    io: DType = DType.BF16  # of activations
    tokens: int | None = None  # per sequence; None: one, and all tokens of prompts
    intermediates: bool = False  # the state after each token is kept
    update_state: bool = True
    layout: Layout = Layout.VK
    ring: Ring = Ring.NONE
    layers: bool = False  # a commit of several layers
    replay: int | None = None  # tokens of a step that is replayed
    window: int | None = None  # of a ring for such steps
    rows: int | None = None  # of products, at most
    caller: Client | None = None  # None: this package's own functions, in all their usual forms

    def of(self, caller: Client) -> Wanted:
        """The same, of a caller: with its slots and its layout."""
        return replace(self, caller=caller, indices=(caller.index,), layout=caller.layout)

    def by(self, *callers: Client) -> bool:
        """Whether one of these makes the calls, or no caller was named."""
        return self.caller is None or self.caller in callers

    @property
    def count(self) -> int:
        """Tokens per sequence of a decode step."""
        return self.tokens or 1


# Fields of `Wanted` that an operator may refuse; the others concern all of them, or one alone (`Ask.switch`).
SEVERAL = frozenset(("tokens", "intermediates", "update_state"))
OPTIONS = SEVERAL | {"pools", "layout", "ring", "layers"}


class Role(Enum):
    """An operator's part in a model. A model's problems are listed in this order."""

    STATE = "the recurrence's decode step"
    PROMPTS = "the short convolution over prompts"
    SCAN = "the recurrence over prompts"
    CONVOLUTION = "the short convolution's decode step"
    REPLAY = "the recurrence's decode step with replay of draft tokens"
    NORM = "the gated norm after the recurrence"
    LAYER = "a whole layer's decode step, between its projections"
    PRODUCT = "the recurrent layers' projections, for few rows"


class Ask:
    """The problems that models pose to one operator. A family derives from it in its `models.py`."""

    operator: str
    role: Role | None = None  # None: none of them
    options: frozenset[str] = OPTIONS  # that it takes; where it is asked for by name, others are an error
    switch: str = ""  # the field of `Wanted` without which it is not asked for: a number of tokens or rows, up to `most`
    most: int = 0
    narrow: bool = False  # whether its states may have fewer bits

    def used_by(self, model: Model) -> bool:
        """Whether a model, or one rank's share of it, has something for it to do."""
        raise NotImplementedError

    def problems(self, model: Model, wanted: Wanted) -> Sequence[Problem]:
        """The problems of a model that uses it; empty if needed slots are missing, or if the caller makes no such call."""
        raise NotImplementedError

    def called_by(self, model: Model, caller: Client) -> bool:
        """Whether a caller uses it for such a model at all."""
        return True

    def heeded(self, model: Model, wanted: Wanted) -> Wanted | None:
        """The part of `wanted` that it can serve next to other operators: without states in fewer bits if it takes none; None if empty.

        Raises ModelError where it decodes the model, and so would have to take them.
        """
        floats = tuple(state for state in wanted.states if isinstance(state, DType))
        if self.narrow or floats == wanted.states:
            return wanted
        if self.role is Role.STATE:
            raise ModelError(
                f"{model.name} is decoded by {model.function}, which has no states in fewer bits; expected f32, f16 or bf16. "
                "Change --state."
            )
        return replace(wanted, states=floats) if floats or self.role not in (Role.REPLAY, Role.LAYER) else None

    def absent(self, model: Model, asked: str) -> str:
        """Why a model does not use it, in words. asked: the operator, or the option that is for it."""
        return f"{model.name} has no layer that {asked} computes"

    def takes(self, model: Model) -> Collection[str]:
        """The options that it takes of a model that uses it."""
        return self.options

    def serves(self, wanted: Wanted) -> bool:
        """Whether such calls use it when it is not requested by name."""
        return not self.switch or bool(getattr(wanted, self.switch))

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        """The size that the selection rules use for a call of `batch` sequences (`registry.unit`)."""
        return batch


class StateAsk(Ask):
    """The problems that models pose to the operator that decodes them."""

    role = Role.STATE

    def used_by(self, model: Model) -> bool:
        return model.operator == self.operator

    def problems(self, model: Model, wanted: Wanted) -> list[Problem]:
        how = {name: getattr(wanted, name) for name in self.options - {"pools"}} | {"tokens": wanted.count}
        return model.problems(wanted.states, wanted.indices, wanted.pools, io=wanted.io, **how)

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is decoded by {model.function}, not by {asked}"


@functools.cache
def asks() -> dict[str, Ask]:
    """The `Ask` of each operator, by its name, in the order of their roles."""
    order = [*Role, None]
    return dict(sorted(parts("asks").items(), key=lambda found: order.index(found[1].role)))


def operators_of(role: Role) -> str:
    """Their names, for a message."""
    return " and ".join(operator for operator, ask in asks().items() if ask.role is role)


def ask_for(model: Model, function: str) -> Ask:
    """The `Ask` of a public function's operator. Raises ModelError if the model does not use it."""
    decoding = asks()[model.operator]
    if function == model.function:
        return decoding
    if function not in asks():  # it decodes models of another kind, or none
        raise ModelError(decoding.absent(model, function))
    if not (ask := asks()[function]).used_by(model):
        raise ModelError(ask.absent(model, function))
    return ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The fields of every row of models.toml."""

    operator: ClassVar[str]  # whose kernels decode it
    conv_bias: ClassVar[bool]  # of its short convolution

    name: str
    kind: str
    nheads: int  # of the state
    state: DType = DType.F32  # as its reference implementation keeps it
    conv_width: int = 4  # taps of its short convolution, if it has one
    hidden: int | None = None  # channels between layers, where known
    verified: bool
    source: str

    @staticmethod
    def read(row: dict[str, Any]) -> dict[str, Any]:
        """All fields except the name, from a row of models.toml."""
        return row | ({"state": DType(row["state"])} if "state" in row else {})

    @property
    def function(self) -> str:
        """The public function that decodes it."""
        return self.operator

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows per head, elements per row, groups of heads that share operands) of the state"""
        raise NotImplementedError

    @property
    def inner(self) -> int:
        """Channels of its recurrence's output, which a layer's last projection reads."""
        return self.nheads * self.shape[0]

    @property
    def conv_channels(self) -> int:
        """Channels of its short convolution, 0 if it has none."""
        raise NotImplementedError

    @property
    def layer_channels(self) -> int:
        """Channels that the decode step of a whole layer convolves."""
        return self.conv_channels

    @property
    def layer_function(self) -> str | None:
        """The public function that does the decode step of a whole layer, between its projections; None where there is none."""
        return next((operator for operator, ask in asks().items() if ask.role is Role.LAYER and ask.used_by(self)), None)

    @property
    def norm_shape(self) -> tuple[int, int] | None:
        """(groups, elements of each) of the gated norm after its state; None if there is none, or if several ranks share a group."""
        return None

    def divided(self, tp: int) -> Model:
        """One tensor-parallel rank's share. Raises ModelError when the heads (Mamba-1: channels) do not divide."""
        raise NotImplementedError

    def problem(self, state: Any, index: Index, pool: PoolMode, *_: Any, **call: Any) -> Problem:  # each kind has its own keywords
        """The problem of one kind of decode step, in the dtypes of transformers and the serving engines. state: a DType, of some Narrow."""
        raise NotImplementedError

    def problems(
        self,
        states: tuple[Any, ...] = (),
        indices: tuple[Index, ...] = SLOTS,
        pools: tuple[PoolMode, ...] = (PoolMode.SINGLE,),
        **call: Any,
    ) -> list[Problem]:
        """The problems of decoding the model; empty if needed slot indices are missing. call: further keywords of `problem`."""
        by_slot = call.get("ring") in (Ring.STORE, Ring.READY, Ring.REPLAY)
        kinds = [(i, pool) for i in indices for pool in pools if i is not Index.NONE or not (by_slot or pool is PoolMode.SPLIT)]
        return [self.problem(state, index, pool, **call) for state in states or (self.state,) for index, pool in kinds]

    def asked(self, wanted: Wanted, *of: Role) -> list[Problem]:
        """The problems that the model poses to all its operators, or to the operators with these roles."""
        found = [ask for ask in asks().values() if ask.used_by(self) and (ask.role in of if of else ask.serves(wanted))]
        found = [ask for ask in found if wanted.caller is None or ask.called_by(self, wanted.caller)]
        heeded = [(ask, ask.heeded(self, wanted)) for ask in found]
        return [problem for ask, own in heeded if own is not None for problem in ask.problems(self, own)]

    def convolutions(self, indices: tuple[Index, ...] = SLOTS, io: DType = DType.BF16, tokens: int = 1) -> list[Problem]:
        """The problems of its short convolution, over prompts and in decoding."""
        return self.asked(Wanted(indices=indices, io=io, tokens=tokens), Role.PROMPTS, Role.CONVOLUTION)

    def norms(self, io: DType = DType.BF16) -> list[Problem]:
        """The problems of the gated norm after its state."""
        return self.asked(Wanted(io=io), Role.NORM)

    def layers(self, states: tuple[DType, ...] = (), indices: tuple[Index, ...] = SLOTS, **wanted: Any) -> list[Problem]:
        """The problems of the decode step of a whole layer; empty if there is none. wanted: further fields of `Wanted`."""
        return self.asked(Wanted(states=states, indices=indices, **wanted), Role.LAYER)

    def _share(self, whole: int, of: str, tp: int) -> int:
        if tp < 1 or whole % tp:
            raise ModelError(f"{self.name} has {whole} {of} for {tp} ranks; expected a multiple of the ranks. Change --tp.")
        return whole // tp


@functools.cache
def models() -> dict[str, Model]:
    """All models, by name."""
    table, kinds = tomllib.loads((Path(__file__).parent / "models.toml").read_text()), parts("models")
    return {name: (kind := kinds[row["kind"]])(name=name, **kind.read(row)) for name, row in table.items()}


# Checkpoints add a maker before a model's name, and after it words that leave the layers' shapes as they are.
_AHEAD = r"(?:nvidia-|ai21-|ibm-)?"
_BEHIND = r"(?:-(?:base|pt|hf|it|chat|instruct|reasoning|thinking|preview|world|fp8|nvfp4|bf16|int4|int8|gptq|awq|\d+k|v\d[\d.]*|\d{4}))*"


def find_model(name: str) -> Model:
    """The model of a name, in any case; or of a checkpoint, such as nvidia/Nemotron-H-8B-Base-8K. Raises ModelError with names near it."""
    wanted = name.strip().rpartition("/")[2].lower().replace("_", "-")
    for known, model in sorted(models().items(), key=lambda row: -len(row[0])):
        if re.fullmatch(_AHEAD + re.escape(known) + _BEHIND, wanted):
            return model
    close = difflib.get_close_matches(wanted, models(), n=3, cutoff=0.5)
    close += [m for m in models() if wanted and wanted in m and m not in close][:3]
    raise ModelError(
        f"{name!r} is not a known model. " + (f"Did you mean {' or '.join(close)}? " if close else "") + "`ssmgen models` lists all."
    )
