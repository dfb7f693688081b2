"""What calls over whole sequences have in common: sequences of a batch or packed, and states that are dense, of a pool, or at positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from . import checks

STATES = ("initial_states", "final_states", "state", "checkpoints")
Views = Mapping[str, Tensor]


def sequences_of(views: Views, like: str) -> int:
    """How many there are; like: an operand [batch, …], where cu_seqlens does not say it."""
    return views["cu_seqlens"].numel() - 1 if "cu_seqlens" in views else views[like].shape[0]


def states_fit(views: Views, sequences: int, axes: str, inner: tuple[int, ...], problems: list[str]) -> bool:
    """Whether states have the shapes that go with so many sequences, and what belongs to them is there. axes, inner: of one state, in
    words such as "H, P, N" and in numbers."""
    per_sequence: checks.Shapes = {"[sequences]": (sequences,)}
    states: checks.Shapes = {f"[sequences, {axes}]": (sequences, *inner)}
    allowed = dict.fromkeys(("initial_states", "final_states"), states)
    allowed |= dict.fromkeys(("state_indices", "has_initial_state"), per_sequence)
    fits = [checks.check_shape(name, views[name], shapes, problems) for name, shapes in allowed.items() if name in views]
    if "state" in views:
        fits.append(_pool_fits(views, sequences, axes, inner, problems))
    else:
        problems += [f"{name} is given without state" for name in ("state_indices", "has_initial_state") if name in views]
    fits.append(_checkpoints_fit(views, axes, inner, problems))
    return all(fits)


def _pool_fits(views: Views, sequences: int, axes: str, inner: tuple[int, ...], problems: list[str]) -> bool:
    state = views["state"]
    if "final_states" in views:
        problems.append("final_states is given together with state, which takes its place")
    if "initial_states" in views and "has_initial_state" in views:
        problems.append("initial_states and has_initial_state are both given: each says what a sequence starts from")
    if state.dim() != 1 + len(inner) or tuple(state.shape[1:]) != inner:
        problems.append(f"state is {list(state.shape)}, not [slots, {axes}] = [slots, {', '.join(map(str, inner))}]")
        return False
    if "state_indices" not in views and state.shape[0] < sequences:
        problems.append(f"state has {state.shape[0]} slots for {sequences} sequences, and there are no state_indices")
    return True


def _checkpoints_fit(views: Views, axes: str, inner: tuple[int, ...], problems: list[str]) -> bool:
    positions, states = views.get("checkpoint_positions"), views.get("checkpoints")
    if positions is None:
        problems += ["checkpoints_out is given without checkpoint_positions"] if states is not None else []
        return states is None
    if positions.dim() != 1:
        problems.append(f"checkpoint_positions is {list(positions.shape)}, not [count]")
        return False
    if states is None:
        problems.append("checkpoint_positions is given, but neither checkpoints_out nor return_checkpoints")
        return False
    return checks.check_shape("checkpoints", states, {f"[count, {axes}]": (positions.shape[0], *inner)}, problems)


def check_layout(views: Views, rows: Sequence[str], written: Sequence[str], narrow_from_one: Sequence[str], problems: list[str]) -> None:
    """Dtypes that go together, and strides. rows: operands of one dtype, that of the first, whose last axis is contiguous; narrow_from_one:
    those whose first axis may have a stride of 64 bits, beside states."""
    like, *others = [n for n in rows if n in views]
    problems += unlike(views, like, others)
    first, *others = [n for n in STATES if n in views] or [""]
    problems += unlike(views, first, others)
    for name in rows:
        if name in views and views[name].stride(-1) != 1 and views[name].shape[-1] > 1:
            problems.append(f"{name} has strides {list(views[name].stride())}; its rows must be contiguous")
    for name in STATES:
        if name in views and not views[name][:1, :1].is_contiguous():
            problems.append(f"{name} has strides {list(views[name].stride())}; the state of each head must be dense")
    for name in written:
        if name in views and checks.overlaps_itself(views[name]):
            problems.append(f"{name} has strides {list(views[name].stride())}: two of its elements share memory")
    for name, t in views.items():
        narrow = t.stride()[1:] if name in narrow_from_one or name in STATES else t.stride()
        if any(s >= 2**32 for s in narrow):
            problems.append(f"{name} has strides {list(t.stride())}; kernels take strides below 2^32 elements")
    problems += [
        f"{name} is {list(views[name].shape)}; kernels take axes below 2^31"
        for name in (like, "checkpoints")
        if name in views and max(views[name].shape) >= 2**31
    ]


def unlike(views: Views, first: str, others: Sequence[str]) -> list[str]:
    """Which of the others are of another dtype than the first."""
    return [
        f"{n} is {views[n].dtype}, {first} is {views[first].dtype}".replace("torch.", "")
        for n in others
        if views[n].dtype != views[first].dtype
    ]


def together(views: Views, pointers: Mapping[str, int], rows: Sequence[str]) -> int:
    """Bytes of all of these operands, of one dtype, that can be moved at once, 16 at most; 2 where words cannot be."""
    copied = [n for n in rows if n in views]
    one = views[copied[0]].element_size()
    return next((size for size in (16, 8, 4) if all(checks.aligned(views[n], pointers[n], size // one) for n in copied)), 2)
