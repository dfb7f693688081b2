"""Rotating inputs of decode layers, and the chain of operators that a layer is, which must have the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import ssmgen

from ..engine.accuracy import norm_error
from ..select.models import Role, operators_of
from .axes import At
from .case import COLD, EXACT, GATE, HOST_BATCH, MAX_SETS, Call, Case, drawn, kept, normal_pool, slots_of, some_of
from .timing import Launch

CHECKED = 4  # rows that the gate looks at
COPIED = 2048  # bytes that a block of the slot copy moves
EPS = 1e-6
BF16 = torch.bfloat16
BETWEEN = 1e-3  # norm error of a state, of convolved inputs that fall on another side when they are rounded
PEER_LIMIT = 2e-2  # norm error of a peer's output, which rounds in other places
STATES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
BY_SEQUENCE = (
    "xBC", "mixed_qkv", "dt", "a", "b", "g", "beta", "z", "out", "num_accepted_tokens", "intermediate_states", "intermediate_conv_window",
)  # fmt: skip


class Step(NamedTuple):
    """A call of one of the chain's operators."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


class Layer(Case):
    """The inputs of one model's layers. A family derives from it and adds its recurrence."""

    inputs: ClassVar[str]  # the operand that is convolved
    norm_first: ClassVar[bool] = False  # the norm is applied before its gate
    norm_how: ClassVar[dict[str, Any]] = {}  # further arguments of the separate norm

    def __init__(self, at: At, device: torch.device, op: str):
        self.at, self.model, self.op = at, at.share, op
        self.batch, self.tokens, self.by_slot, model = at.batch, at.tokens, at.by_slot, at.share
        rows, elements, _ = model.shape
        B, width, channels, dtype = self.batch, model.conv_width, model.layer_channels, STATES[at.state.value]
        shape = (model.nheads, *((rows, elements) if at.layout == "vk" else (elements, rows)))
        state_bytes = torch.Size(shape).numel() * dtype.itemsize
        piece = -(-(state_bytes + self.window_bytes()) // COPIED) * COPIED  # the slot copy divides it among its blocks
        each = self.tokens if self.by_slot else 1  # slots of a sequence
        slots = slots_of(state_bytes, -(-B * each * piece // state_bytes))
        self.state = normal_pool(slots, shape, dtype, device)
        sets = max(1, min(MAX_SETS, self.state.nbytes // piece // (B * each)))
        self.slots = drawn(slots, sets, B * each, device)
        self.slots = self.slots.reshape(sets, B, each) if self.by_slot else self.slots

        def rand(*shape: int) -> Tensor:
            return torch.randn(sets, *shape, device=device, dtype=BF16)

        self.mixed, self.z = rand(*self.lead, channels), rand(*self.lead, self.inner)
        self.out, self.by_head = torch.empty_like(self.z), self.made_by_head(rand)
        self.norm_weight = rand(*self.norm_weights) if model.norm_shape else None
        self.between = torch.empty_like(self.mixed), torch.empty_like(self.out)  # tensors that pass between the chain's operators
        rotating = {self.inputs: self.mixed, "out": self.out, "conv_weight": rand(channels, width) / width**0.5, **self.by_head}
        rotating |= {"state_indices": self.slots} | ({"conv_bias": rand(channels)} if model.conv_bias else {})
        if self.norm_weight is not None:
            rotating |= {"z": self.z, "norm_weight": self.norm_weight}
        elif self.gate_alone:
            rotating |= {"z": self.z}
        if self.by_slot:
            accepted = torch.randint(1, self.tokens + 1, (sets, B), device=device, dtype=torch.int32)
            rotating |= {"dst_state_indices": self.slots, "num_accepted_tokens": accepted}
        self.kept: dict[str, Tensor] = {}
        if at.intermediates:
            count = max(1, min(sets, int(COLD) // (B * self.tokens * (state_bytes + self.window_bytes()))))
            self.kept["intermediate_states"] = torch.empty(count, *self.lead, *shape, device=device, dtype=dtype)
            self.kept["intermediate_conv_window"] = torch.empty(count, *self.lead, channels, width - 1, device=device, dtype=BF16)
        self.conv_state = normal_pool(slots, (channels, width - 1 + self.rolled), BF16, device)
        arrivals = torch.zeros(slots, model.shape[2], device=device, dtype=torch.int32)
        shared = {"state": self.state, "conv_state": self.conv_state, "arrivals": arrivals, "conv_bias": None, "z": None, **self.options}
        shared |= {"norm_eps": EPS} if self.norm_weight is not None else {}
        shared |= {"update_state": False} if at.intermediates else {}
        self.piece_bytes = state_bytes + self.window_bytes()
        moved = (1 + self.tokens if at.intermediates else 2) * self.piece_bytes
        if self.by_slot:
            moved = (1 + self.tokens) * state_bytes + 2 * self.window_bytes(self.rolled)
        limit = GATE[dtype] + self.tokens * BETWEEN
        limits = {"state": limit, "intermediate_states": limit, "out": 2 * GATE[BF16]}  # out is also rounded before its norm
        exact = dict.fromkeys(("conv_state", "intermediate_conv_window", "arrivals"), EXACT)
        super().__init__(
            function=getattr(ssmgen, op), sets=sets, bytes=B * moved, rotating=rotating | self.kept, shared=shared, part=self.some,
            limits=limits | exact, outputs=("out", *self.kept), rivals={"chain": self.eager_chain}, host=B <= HOST_BATCH, at=at,
            copied=None if at.intermediates or self.by_slot else self.pieces(piece, sets), peer_limits={"out": PEER_LIMIT},
        )  # fmt: skip

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes before the channels."""
        return (self.batch,) if self.tokens == 1 else (self.batch, self.tokens)

    @property
    def rolled(self) -> int:
        """Inputs that a window holds in addition to the taps' inputs: all tokens are appended to it, and only some count."""
        return self.tokens - 1 if self.by_slot else 0

    @property
    def inner(self) -> int:
        """Channels of a row of the output."""
        return int(self.model.nheads * self.model.shape[0])

    def window_bytes(self, more: int = 0) -> int:
        """Bytes of one sequence's window with `more` inputs in addition to the taps' inputs."""
        return int(self.model.layer_channels * (self.model.conv_width - 1 + more) * BF16.itemsize)

    # A family's part.

    def made_by_head(self, rand: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The recurrence's operands by head. rand: of a shape, normally distributed for each set."""
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
        """Whether z gates the recurrence if the layer lacks a norm."""
        return False

    @property
    def norm_weights(self) -> tuple[int, ...]:
        """Shape of the norm's weight, as the layer takes it; only asked for where there is a norm that it can compute by itself."""
        return tuple(self.model.norm_shape[1:])

    # The chain.

    def places(self, i: int) -> dict[str, Tensor]:
        """Where the i-th call's states are, and where each token's go."""
        names = ("state_indices", "dst_state_indices", "num_accepted_tokens")
        return {name: self.rotating[name][i] for name in names if name in self.rotating}

    def chain(self, i: int) -> list[Step]:
        """The layer's operators, one after the other."""
        convolved, y = (t[i] for t in self.between)
        call, several = self.arguments(i), self.tokens > 1
        x, out = (t.transpose(1, 2) if several else t for t in (self.mixed[i], convolved))
        conv = {"x": x, "conv_state": self.conv_state, "weight": call["conv_weight"], "bias": call.get("conv_bias"), "out": out}
        conv |= {"activation": "silu", "conv_state_indices": self.slots[i][:, 0] if self.by_slot else self.slots[i]}
        conv |= {n: call[n] for n in ("num_accepted_tokens", "intermediate_conv_window") if n in call}
        steps = [Step(getattr(ssmgen, operators_of(Role.CONVOLUTION)), conv)]
        rows = self.out[i] if self.norm_weight is None else y
        update = self.update(i, convolved, rows.view(*self.lead, self.model.nheads, -1))
        update.arguments.update({n: call[n] for n in ("intermediate_states", "update_state") if n in call})
        steps.append(update)
        if self.norm_weight is not None:
            groups, size = self.model.norm_shape
            shape = (self.batch * self.tokens, groups, size)
            weight = self.norm_weight[i]
            norm = {"x": y.view(shape), "gate": self.z[i].view(shape), "out": self.out[i].view(shape), "eps": EPS}
            norm |= {"weight": weight.view(groups, size) if weight.numel() == groups * size else weight}
            norm |= {"norm_before_gate": self.norm_first, **self.norm_how}
            steps.append(Step(getattr(ssmgen, operators_of(Role.NORM)), norm))
        return steps

    def contenders(self) -> dict[str, Launch]:
        calls = [[ssmgen.bind(f, **call) for f, call in self.chain(i)] for i in range(self.sets)]
        return {"chain": lambda i: [call() for call in calls[i]]}

    def eager_chain(self, i: int, **how: Any) -> None:
        for function, call in self.chain(i):
            function(**call, **how)

    def pieces(self, size: int, sets: int) -> tuple[Tensor, Tensor]:
        """(pieces, pieces of each set) of the slot copy, in the states' memory. A piece holds a state and its window."""
        flat = self.state.view(-1).view(torch.int32)
        found = flat[: flat.numel() // (size // 4) * (size // 4)].view(-1, size // 4)
        return found, drawn(len(found), sets, self.batch, flat.device)

    # The check against float64.

    @property
    def rows(self) -> Tensor:
        """The rows of the batch that are checked."""
        return some_of(self.batch, CHECKED, self.state.device)

    def some(self, call: Call) -> Call:
        """The call of these rows."""
        rows = self.rows
        touched = call["state_indices"][rows].long()
        small = {**call, **{n: call[n][rows] for n in BY_SEQUENCE if call.get(n) is not None}}
        small |= {n: call[n][touched.flatten()] for n in ("state", "conv_state", "arrivals")}
        own = torch.arange(touched.numel(), device=rows.device).view(touched.shape)
        return small | {n: own for n in ("state_indices", "dst_state_indices") if n in call}

    def expected(self) -> dict[str, Tensor]:
        return self.written(self.some(self.arguments(0)), exact=True)

    @contextlib.contextmanager
    def restored(self) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Yields a getter of the first set's states, windows, outputs and kept tensors; then restores states and windows."""
        touched, call = self.slots[0].long(), self.arguments(0)
        before = self.state[touched], self.conv_state[touched]
        for name in self.outputs:
            call[name].fill_(float("nan"))
        yield lambda: {"state": self.state[touched], "conv_state": self.conv_state[touched]} | {n: call[n].clone() for n in self.outputs}
        self.state[touched], self.conv_state[touched] = before

    def gate(self, **how: Any) -> dict[str, float]:
        """Norm errors of one call, by operand; states and windows are left as they were. Raises SsmgenError also where the chain has other
        bits."""
        call, expected = self.arguments(0), self.expected()
        with self.restored() as results:
            self.function(**call, **how)
            ours, errors = results(), self.errors(call, expected)
        with self.restored() as results:
            self.eager_chain(0, **how)
            theirs = results()
        # The convolution by itself moves its window, whatever is kept.
        same = all(torch.equal(t, theirs[n]) for n, t in ours.items() if n != "conv_state" or not self.kept)
        self.check(errors, self.limits, "" if same else "the chain has other bits")
        return {name: error for name, error in errors.items() if self.limits[name] != EXACT}

    def peer_errors(self, name: str, call: Launch) -> dict[str, float]:
        expected, rows = self.expected()["out"], self.rows
        with self.restored():
            result: Any = call(0)
            return {"out": norm_error(result[rows], expected.reshape(len(rows), -1))}


# Parts of peers' chains.


def ours_of(case: Layer, step: int) -> Launch:
    """One operator of our chain."""
    calls = [ssmgen.bind(f, **call) for f, call in (case.chain(i)[step] for i in range(case.sets))]
    return lambda i: calls[i]()


def convolution(case: Layer, theirs: Callable[..., Tensor] | None) -> Callable[[int], Tensor]:
    """The chain's convolution of the i-th inputs, by another package's function, or by ours where there is none."""
    calls = [case.chain(i)[0].arguments for i in range(case.sets)]
    if theirs is not None:
        given = [{name: value for name, value in call.items() if name != "out"} for call in calls]
        return lambda i: theirs(**given[i])
    ours = ours_of(case, 0)

    def run(i: int) -> Tensor:
        ours(i)
        out: Tensor = calls[i]["out"]
        return out

    return run


def between_ours(case: Layer, call: Launch) -> Launch:
    """A peer's update of the state, instead of ours, between our convolution and our norm."""
    ahead, behind = ours_of(case, 0), ours_of(case, 2) if case.norm_weight is not None else None

    def run(i: int) -> Tensor:
        ahead(i)
        call(i)
        if behind is not None:
            behind(i)
        return case.out[i]

    return kept(run)
