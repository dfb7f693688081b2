"""Arguments of all calls over whole sequences: batched or packed sequences; dense states, states in a pool, states at positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec.operands import Table
from . import checks

STATES = ("initial_states", "final_states", "state", "checkpoints")
Views = Mapping[str, Tensor]
Operands = dict[str, "Tensor | None"]  # by name
_ASKED = ("return_final_states", "final_states_out", "checkpoints_out", "return_checkpoints")  # fields of States that are not operands


class States(NamedTuple):
    """A function's arguments for sequences, states and outputs."""

    cu_seqlens: Tensor | None
    initial_states: Tensor | None
    return_final_states: bool
    final_states_out: Tensor | None
    state: Tensor | None
    state_indices: Tensor | None
    has_initial_state: Tensor | None
    checkpoint_positions: Tensor | None
    checkpoints_out: Tensor | None
    return_checkpoints: bool
    out: Tensor | None
    workspace: Tensor | None = None

    def operands(self, v: Any, key: Any, layout: str = "vk", bytes_of: Callable[..., int] | None = None) -> Operands:
        """These tensors by operand, with new tensors for missing outputs. It makes none if v or key have wrong shapes: the checks report
        those.

        v: […, HV, V]; key: […, HK, K]; bytes_of: (tokens, sequences, HV, K, V, longest=tokens of the longest sequence) -> bytes of the
        workspace, for functions that need one.
        """
        final, checkpoints, workspace, out = self.final_states_out, self.checkpoints_out, self.workspace, self.out
        if isinstance(v, Tensor):
            out = v.new_empty(v.shape) if out is None else out
            size = 0
            if isinstance(key, Tensor) and v.dim() == key.dim() and v.dim() in (3, 4):
                *lead, longest, heads, head_v = v.shape
                count = v.shape[0] if not isinstance(self.cu_seqlens, Tensor) else max(self.cu_seqlens.numel() - 1, 0)
                if (self.return_final_states and final is None) or (self.return_checkpoints and checkpoints is None):
                    final, checkpoints = self._made(v, key.shape[-1], layout, count)
                if bytes_of is not None and workspace is None:
                    size = bytes_of(longest * lead[0] if lead else longest, count, heads, key.shape[-1], head_v, longest=longest)
            if bytes_of is not None and workspace is None:
                workspace = v.new_empty(size, dtype=torch.uint8)
        named = self._asdict() | {"final_states": final, "checkpoints": checkpoints, "out": out, "workspace": workspace}
        return {name: t for name, t in named.items() if name not in _ASKED and (bytes_of is not None or name != "workspace")}

    def _made(self, v: Tensor, head_k: int, layout: str, count: int) -> tuple[Tensor | None, Tensor | None]:
        """(final states, checkpoints): given ones, or new ones if they are requested. count: sequences."""
        final, checkpoints = self.final_states_out, self.checkpoints_out
        heads, head_v = v.shape[-2:]
        inner = (heads, head_k, head_v) if layout == "kv" else (heads, head_v, head_k)
        dtypes = [t.dtype for t in (self.initial_states, self.final_states_out, self.state) if isinstance(t, Tensor)]
        dtype = dtypes[0] if dtypes else torch.float32
        if self.return_final_states and final is None:
            final = v.new_empty((count, *inner), dtype=dtype)
        if self.return_checkpoints and checkpoints is None and isinstance(self.checkpoint_positions, Tensor):
            checkpoints = v.new_empty((self.checkpoint_positions.numel(), *inner), dtype=dtype)
        return final, checkpoints

    def returns(self, operands: Operands) -> tuple[str, ...]:
        """Names of the operands that the function returns."""
        asked = {"final_states": self.return_final_states, "checkpoints": self.return_checkpoints}
        return ("out", *[name for name, wanted in asked.items() if wanted and operands.get(name) is not None])

    @property
    def objections(self) -> tuple[str, ...]:
        if self.return_checkpoints and self.checkpoint_positions is None:
            return (
                "return_checkpoints is True and checkpoint_positions is None; expected the positions of the checkpoints. "
                "Pass checkpoint_positions.",
            )
        return ()


def sequences_of(views: Views, like: str) -> int:
    """The number of sequences; like: an operand [batch, …], which is read if there is no cu_seqlens."""
    return views["cu_seqlens"].numel() - 1 if "cu_seqlens" in views else views[like].shape[0]


def sizes_of(views: Views, sequences: int) -> dict[str, int]:
    """The sizes for the words of operand tables. sequences: the number of sequences."""
    slots, positions = views.get("state"), views.get("checkpoint_positions")
    found = {"sequences": sequences, "starts": sequences + 1, "position": 0 if positions is None else positions.numel()}
    return found if slots is None else found | {"slot": slots.shape[0] if slots.dim() else 0}


def states_go_together(views: Views, sequences: int, problems: list[str]) -> None:
    """Checks that the given combination of states, slots, flags and positions is valid."""
    if "state" in views:
        if "final_states" in views:
            problems.append(
                "final_states is given with state, which receives the final states; expected one of them. Leave out final_states."
            )
        if "initial_states" in views and "has_initial_state" in views:
            problems.append(
                "initial_states and has_initial_state are both given; expected one: each says where a sequence starts. Leave out one."
            )
        if "state_indices" not in views and views["state"].dim() and len(views["state"]) < sequences:
            problems.append(
                f"state has {len(views['state'])} slots; expected {sequences}, one per sequence. Pass a larger state, or state_indices."
            )
    else:
        problems += [
            f"{name} is given without state; expected both. Pass state, or leave out {name}."
            for name in ("state_indices", "has_initial_state")
            if name in views
        ]
    if "checkpoints" in views and "checkpoint_positions" not in views:
        problems.append("checkpoints_out is given without checkpoint_positions; expected both. Pass checkpoint_positions.")
    if "checkpoint_positions" in views and "checkpoints" not in views:
        problems.append("checkpoint_positions is given without a result; expected checkpoints_out or return_checkpoints=True with it")


def check_strides(table: Table, views: Views, like: str, problems: list[str]) -> None:
    """Checks the operands that must have one dtype, and all strides. like: the operand with the token axes."""
    for name in (like, "initial_states"):
        first, *others = [n for n in table.alike(name) if n in views] or [""]
        problems += unlike(views, first, others)
    for name, t in views.items():
        strides, taken = f"{name} has strides {list(t.stride())}", table.strided(name)
        if taken and not t[(slice(1),) * min(taken, t.dim())].is_contiguous():
            rest = (
                "expected contiguous rows. Pass a contiguous tensor."
                if t.dim() - taken == 1
                else "expected a dense state for each head. Pass a contiguous tensor."
            )
            problems.append(f"{strides}; {rest}")
        if name in table.written and checks.overlaps_itself(t):
            problems.append(f"{strides}, and two of its elements share memory; expected one address per element. Pass a contiguous tensor.")
        wide = table[name].strides.partition(" ")[0].partition("?")[0].endswith(":64")
        if any(s >= 2**32 for s in t.stride()[wide:]):
            problems.append(f"{strides}; expected strides below 2^32 elements")
    problems += [
        f"{name} is {list(views[name].shape)}; expected axes below 2^31"
        for name in (like, "checkpoints")
        if name in views and max(views[name].shape) >= 2**31
    ]


def unlike(views: Views, first: str, others: Sequence[str]) -> list[str]:
    """Errors for the operands whose dtype differs from the first one's."""
    return [
        f"{n} is {views[n].dtype}; expected {views[first].dtype}, the dtype of {first}".replace("torch.", "")
        for n in others
        if views[n].dtype != views[first].dtype
    ]


def fields_of(views: Views, pointers: Mapping[str, int], together: int) -> dict[str, Any]:
    """The fields of a problem for sequences and states. together: elements of a state that kernels load at once."""
    states = [n for n in STATES if n in views]

    found = {
        "cu_seqlens": checks.index_of(views, "cu_seqlens"),
        "initial": "initial_states" in views,
        "final": "final_states" in views,
        "pool": "state" in views,
        "started": "has_initial_state" in views,
        "index": checks.index_of(views, "state_indices"),
        "state_loads": checks.loads_of(views, pointers, states, together),
    }
    found |= {"checkpoints": checks.index_of(views, "checkpoint_positions")} if "checkpoint_positions" in views else {}
    return found | ({"state": checks.DTYPES[views[states[0]].dtype]} if states else {})


def values_of(views: Views) -> dict[str, int]:
    """The kernel arguments with the number of slots and of positions."""
    return {name: len(views[of]) if of in views else 0 for name, of in (("slots", "state"), ("positions", "checkpoints"))}


def together(views: Views, pointers: Mapping[str, int], rows: Sequence[str]) -> int:
    """The widest access in bytes, at most 16, that all of these operands of one dtype allow; 2 if 4-byte words are not possible."""
    copied = [n for n in rows if n in views]
    one = views[copied[0]].element_size()
    return next((size for size in (16, 8, 4) if all(checks.aligned(views[n], pointers[n], size // one) for n in copied)), 2)


Passed = Callable[[int, Tensor], None]  # receives the state after this number of a sequence's tokens
# (its initial state [HV, V, K], its row of the batch and its tokens, receiver of states) -> (its final state, its output [T, HV, V])
Walk = Callable[[Tensor, int, slice, Passed], tuple[Tensor, Tensor]]


def walked(views: Views, head_k: int, layout: str, pad_slot_id: int, chunk: int, walk: Walk, dtype: torch.dtype) -> None:
    """Writes outputs, states and checkpoints of all sequences of a call, for references in PyTorch. `walk` computes them; each is rounded
    once.

    views: v, out [B, T, HV, V] and the operands for sequences and states; chunk: tokens; checkpoints lie at its multiples and at the end
    """
    v, out, starts, slots = views["v"], views["out"], views.get("cu_seqlens"), views.get("state_indices")
    turned = {name: views[name].transpose(2, 3) if layout == "kv" else views[name] for name in STATES if name in views}
    initial, state, started = turned.get("initial_states"), turned.get("state"), views.get("has_initial_state")
    kept = turned.get("final_states", state)
    rows: dict[int, list[int]] = {}  # position -> rows of checkpoints
    for i, position in enumerate(views["checkpoint_positions"].tolist() if "checkpoint_positions" in views else ()):
        rows.setdefault(position, []).append(i)
    for s, (row, span) in enumerate(spans(v, starts)):
        slot = s if slots is None else int(slots[s])
        if state is not None and not (0 <= slot < state.shape[0] and (slots is None or slot != pad_slot_id)):
            out[row, span] = 0
            continue
        length, first = span.stop - span.start, span.start + row * v.shape[1]
        if state is not None and not length:
            continue
        S = v.new_zeros(v.shape[2], v.shape[3], head_k, dtype=dtype)
        if initial is not None:
            S = initial[s].to(dtype).contiguous()
        elif state is not None and started is not None and bool(started[s]):
            S = state[slot].to(dtype).contiguous()

        def passed(count: int, S: Tensor, first: int = first, length: int = length) -> None:
            if first + count in rows and (count % chunk == 0 or count == length):
                turned["checkpoints"][rows[first + count]] = S.to(turned["checkpoints"].dtype)

        S, y = walk(S, row, span, passed)
        out[row, span] = y.to(out.dtype)
        if kept is not None:
            kept[slot] = S.to(kept.dtype)


def spans(v: Tensor, starts: Tensor | None) -> list[tuple[int, slice]]:
    """(row of the batch, tokens) of each sequence. A sequence that ends before it begins, or lies outside of the tokens, has no tokens."""
    if starts is None:
        return [(b, slice(0, v.shape[1])) for b in range(v.shape[0])]
    return [(0, slice(a, b) if 0 <= a < b <= v.shape[1] else slice(0, 0)) for a, b in pairwise(starts.tolist())]
