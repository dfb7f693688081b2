"""Rotating inputs of decode layers, the chain of operators that a layer is, and what both are checked against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import ssmgen

from ..accuracy import norm_error
from ..errors import SsmgenError
from ..models import Model, Role, operators_of
from . import report as reports
from . import timing
from .report import GATE, MAX_SETS

CHECKED = 4  # rows that the gate looks at
COPIED = 2048  # bytes that a block of the slot copy moves
EPS = 1e-6
KEPT_BYTES = 640e6  # of the buffers of what is kept after each token, which rotate too
BF16 = torch.bfloat16
BETWEEN = 1e-3  # norm error of a state, of convolved inputs that fall on another side when they are rounded


def window_bytes(model: Model, more: int = 0) -> int:
    """Bytes of one sequence's window, which holds so many inputs more than the taps need."""
    return model.layer_channels * (model.conv_width - 1 + more) * BF16.itemsize


def copied_bytes(model: Model, state_bytes: int) -> int:
    """Bytes of a state and its window, up to what the slot copy can divide among its blocks."""
    return -(-(state_bytes + window_bytes(model)) // COPIED) * COPIED


class Step(NamedTuple):
    """A call of one of the chain's operators."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


@dataclass
class Case:
    """Rotating inputs of one model's layers at one batch size, on the device of the state.

    A family of layers derives from it, and says what its recurrence takes of a call and of a chain.
    """

    inputs: ClassVar[str]  # the operand that is convolved
    norm_first: ClassVar[bool] = False  # the norm goes ahead of its gate
    norm_how: ClassVar[dict[str, Any]] = {}  # of the norm by itself: what it is told besides

    op: str
    model: Model  # that uses it
    state: Tensor  # the pool: [slots, heads, rows, elements]
    batch: int
    tokens: int = 1  # of a sequence; of several, inputs and outputs have an axis
    intermediates: bool = False  # state and window after each token are kept, and the pools are as they were
    by_slot: bool = False  # each token's state has a slot, and a call starts where the last one's accepted tokens end
    layout: str = "vk"  # of states; "kv" has keys first
    sets: int = field(init=False)

    def __post_init__(self) -> None:
        slots, device, B = len(self.state), self.state.device, self.batch
        channels, width = self.model.layer_channels, self.model.conv_width
        pieces = self.state.nbytes // copied_bytes(self.model, self.state[0].nbytes)
        each = self.tokens if self.by_slot else 1  # slots of a sequence
        self.sets = max(1, min(MAX_SETS, pieces // (B * each)))
        drawn = torch.randperm(slots, device=device)[: self.sets * B * each].to(torch.int32)
        # Every row starts at a multiple of 32 bytes, as FlashInfer assumes, which has no slots of tokens.
        self.slots = drawn.view(self.sets, B, each) if self.by_slot else pad(drawn.view(self.sets, B), (0, -B % 8))[:, :B]
        self.accepted = torch.randint(1, self.tokens + 1, (self.sets, B), device=device, dtype=torch.int32)

        def rand(*shape: int) -> Tensor:
            return torch.randn(self.sets, *shape, device=device, dtype=BF16)

        self.conv_state = reports.normal_pool(slots, (channels, width - 1 + self.rolled), torch.bfloat16, device)
        self.arrivals = torch.zeros(slots, self.model.shape[2], device=device, dtype=torch.int32)
        self.conv_weight = rand(channels, width) / width**0.5
        self.conv_bias = rand(channels) if self.model.conv_bias else None
        self.mixed, self.z = rand(*self.lead, channels), rand(*self.lead, self.inner)
        self.out = torch.empty_like(self.z)
        self.norm_weight = rand(*self.norm_weights) if self.model.norm_shape else None
        self.by_head = self.made_by_head(rand)
        self.kept: dict[str, Tensor] = {}
        if self.intermediates:
            count = max(1, min(self.sets, int(KEPT_BYTES) // (B * self.tokens * self.piece_bytes)))
            self.kept["intermediate_states"] = torch.empty(count, *self.lead, *self.state.shape[1:], device=device, dtype=self.state.dtype)
            windows = (count, *self.lead, channels, width - 1)
            self.kept["intermediate_conv_window"] = torch.empty(windows, device=device, dtype=BF16)

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes ahead of the channels."""
        return (self.batch,) if self.tokens == 1 else (self.batch, self.tokens)

    @property
    def rolled(self) -> int:
        """Inputs that a window holds beyond those that the taps need: it is put on by all tokens, of which some count."""
        return self.tokens - 1 if self.by_slot else 0

    def made_by_head(self, rand: Callable[..., Tensor]) -> dict[str, Tensor]:
        """What the recurrence takes by head. rand: of a shape, normally distributed for each set."""
        raise NotImplementedError

    def update(self, i: int, convolved: Tensor, out: Tensor) -> Step:
        """The recurrence, on what the convolution leaves; `out`: [batch(, tokens), heads, rows]."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """Further keywords of the layer's call."""
        return {}

    @property
    def gate_alone(self) -> bool:
        """Whether z gates the recurrence where there is no norm."""
        return False

    @property
    def norm_weights(self) -> tuple[int, ...]:
        """Shape of the norm's weight, as the layer takes it; only asked for where there is a norm that it can compute by itself."""
        return self.model.norm_shape[1:]

    @property
    def inner(self) -> int:
        """Channels of a row of the output."""
        return self.model.nheads * self.model.shape[0]

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(ssmgen, self.op)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a sequence's state and window."""
        return self.state[0].nbytes + window_bytes(self.model)

    @property
    def bytes_moved(self) -> int:
        if self.by_slot:
            return self.batch * ((1 + self.tokens) * self.state[0].nbytes + 2 * window_bytes(self.model, self.rolled))
        return (1 + self.tokens if self.intermediates else 2) * self.batch * self.piece_bytes

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        pools = {"state": self.state, "conv_state": self.conv_state, "arrivals": self.arrivals, **self.places(i)}
        call = pools | {name: t[i] for name, t in self.by_head.items()} | self._norm(i) | {"out": self.out[i]}
        call |= {"conv_weight": self.conv_weight[i], "conv_bias": None if self.conv_bias is None else self.conv_bias[i]}
        call |= self._kept(i) | ({"update_state": False} if self.intermediates else {})
        return call | self.options | {self.inputs: self.mixed[i]}

    def places(self, i: int) -> dict[str, Tensor]:
        """Where the i-th call's states are, and where each token's go."""
        if not self.by_slot:
            return {"state_indices": self.slots[i]}
        return {"state_indices": self.slots[i], "dst_state_indices": self.slots[i], "num_accepted_tokens": self.accepted[i]}

    def _kept(self, i: int) -> dict[str, Tensor]:
        return {name: t[i % len(t)] for name, t in self.kept.items()}

    def _norm(self, i: int) -> dict[str, Any]:
        if self.norm_weight is None:
            return {"z": self.z[i] if self.gate_alone else None}
        return {"z": self.z[i], "norm_weight": self.norm_weight[i], "norm_eps": EPS}

    @cached_property
    def between(self) -> tuple[Tensor, Tensor]:
        """What passes between the chain's operators, by set: the convolution's results, and the recurrence's where a norm follows."""
        return torch.empty_like(self.mixed), torch.empty_like(self.out)

    def chain(self, i: int) -> list[Step]:
        """The layer's operators, one after the other."""
        convolved, y = (t[i] for t in self.between)
        x, out = (t if self.tokens == 1 else t.transpose(1, 2) for t in (self.mixed[i], convolved))
        conv = {"x": x, "conv_state": self.conv_state, "weight": self.conv_weight[i], "activation": "silu"}
        conv |= {"bias": None if self.conv_bias is None else self.conv_bias[i], "out": out}
        conv |= {"conv_state_indices": self.slots[i][:, 0] if self.by_slot else self.slots[i]}
        conv |= {"num_accepted_tokens": self.accepted[i]} if self.by_slot else {}
        kept = self._kept(i)
        conv |= {"intermediate_conv_window": kept["intermediate_conv_window"]} if kept else {}
        steps = [Step(getattr(ssmgen, operators_of(Role.CONVOLUTION)), conv)]
        rows = self.out[i] if self.norm_weight is None else y
        update = self.update(i, convolved, rows.view(*self.lead, self.model.nheads, -1))
        if kept:
            update.arguments.update(intermediate_states=kept["intermediate_states"], update_state=False)
        steps.append(update)
        if self.norm_weight is not None:
            groups, size = self.model.norm_shape
            shape = (self.batch * self.tokens, groups, size)
            norm = {"x": y.view(shape), "gate": self.z[i].view(shape), "out": self.out[i].view(shape), "eps": EPS}
            weight = self.norm_weight[i]
            norm |= {
                "weight": weight.view(groups, size) if weight.numel() == groups * size else weight,
                "norm_before_gate": self.norm_first,
            }
            steps.append(Step(getattr(ssmgen, operators_of(Role.NORM)), norm | self.norm_how))
        return steps

    def bound(self, pdl: bool) -> timing.Launch:
        """Our kernels, with the host's part of every call done beforehand."""
        calls = [ssmgen.bind(self.function, **self.arguments(i), pdl=pdl) for i in range(self.sets)]
        return lambda i: calls[i]()

    def bound_chain(self, pdl: bool) -> timing.Launch:
        """The same of the chain."""
        calls = [[ssmgen.bind(f, **call, pdl=pdl) for f, call in self.chain(i)] for i in range(self.sets)]
        return lambda i: [call() for call in calls[i]]

    def eager_chain(self, i: int) -> None:
        for function, call in self.chain(i):
            function(**call)

    def copies(self, pdls: Sequence[bool]) -> dict[str, timing.Launch]:
        """The ceiling: copies of a state and its window in one piece each, in the states' memory."""
        words = copied_bytes(self.model, self.state[0].nbytes) // 4
        flat = self.state.view(-1).view(torch.int32)
        pieces = flat[: flat.numel() // words * words].view(-1, words)
        drawn = torch.randperm(len(pieces), device=flat.device)[: self.sets * self.batch]
        return reports.slot_copies(pieces, drawn.to(torch.int32).view(self.sets, self.batch), pdls)

    def expected(self, rows: Tensor) -> dict[str, Tensor]:
        """What the first call makes of these rows, in float64."""
        call = self.arguments(0)
        touched = call["state_indices"][rows].long()
        by_sequence = ("xBC", "mixed_qkv", "dt", "a", "b", "g", "beta", "z", "out", "num_accepted_tokens", *self.kept)
        small = call | {n: call[n][rows] for n in by_sequence if call.get(n) is not None}
        small |= {n: call[n][touched.flatten()] for n in ("state", "conv_state", "arrivals")}
        own = torch.arange(touched.numel(), device=rows.device).view(touched.shape)
        small |= {n: own for n in ("state_indices", "dst_state_indices") if n in call}
        built = self.function.build(**small)
        views = built.caller.views_of(built.operands, built.options, [])
        written = ("state", "conv_state", "out", *self.kept)
        views |= {n: views[n].double() for n in written}
        built.caller.reference(views, built.options, torch.float64)
        turned = ("state", "intermediate_states") if self.layout == "kv" else ()  # which the reference has with keys last
        return {n: views[n].mT if n in turned else views[n] for n in written}

    @contextlib.contextmanager
    def restored(self) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
        """Gives what tells the first set's states, windows, outputs and what is kept; afterwards, states and windows are as they were."""
        touched = self.slots[0].long()
        before = self.state[touched], self.conv_state[touched]
        self.out[0].fill_(float("nan"))
        for t in self._kept(0).values():
            t.fill_(float("nan"))
        kept = self._kept(0).values()
        yield lambda: (self.state[touched], self.conv_state[touched], self.out[0].clone(), *(t.clone() for t in kept))
        self.state[touched], self.conv_state[touched] = before

    def rows(self) -> Tensor:
        """The rows of the batch that are checked."""
        return torch.linspace(0, self.batch - 1, min(self.batch, CHECKED), device=self.state.device).long()

    def gate(self, pdl: bool | None = None) -> tuple[float, float]:
        """Norm errors of the states that one call leaves and of its output, against float64, on a few rows.

        Raises SsmgenError when one is more than its rounding, when a window or a count of arrivals is not what it should be, or when the
        chain has other bits.
        """
        rows = self.rows()
        expected = self.expected(rows)
        with self.restored() as results:
            self.function(**self.arguments(0), pdl=pdl)
            ours = results()
        with self.restored() as results:
            for function, call in self.chain(0):
                function(**call, pdl=pdl)
            theirs = results()
        names = ("state", "conv_state", "out", *self.kept)
        # The convolution by itself moves its window, whatever is kept.
        same = all(torch.equal(a, b) for n, a, b in zip(names, ours, theirs, strict=True) if n != "conv_state" or not self.kept)
        found = {name: t[rows] for name, t in zip(names, ours, strict=True)}
        expected = {name: t.reshape(found[name].shape) for name, t in expected.items()}
        copies = [name for name in found if "conv" in name]
        errors = {n: norm_error(t, expected[n]) for n, t in found.items() if n not in copies}
        moved = all(torch.equal(found[n].double(), expected[n]) for n in copies) and not self.arrivals.any()
        limits = dict.fromkeys(("state", "intermediate_states"), GATE[self.state.dtype] + self.tokens * BETWEEN) | {
            "out": 2 * GATE[BF16]
        }  # out is rounded ahead of its norm, too
        if not (all(errors[name] < limits[name] for name in errors) and moved and same):
            said = [f"{name} error {error:.1e}" for name, error in errors.items()]
            said += [] if moved else ["windows or arrivals are wrong"]
            said += [] if same else ["the chain has other bits"]
            raise SsmgenError(f"{self.op} of {self.model.name}, batch {self.batch}: {', '.join(said)}; not timed")
        return max(e for n, e in errors.items() if n != "out"), errors["out"]
