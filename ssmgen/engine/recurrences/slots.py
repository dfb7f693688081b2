"""Checks of states and of the operands that locate them, for all decode steps. Each adds its errors to `problems`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...calls import checks

Views = Mapping[str, Tensor]


def slot_shapes(named: Views, batch: int, tokens: int | None, ragged: bool = False) -> dict[str, checks.Shapes]:
    """The shapes of the operands that locate states, in words: a slot per sequence, or a column per token.

    tokens: of each sequence; None if a call has one token per sequence. ragged: sequences have different lengths, and any columns.
    """
    source, target, parents = (named.get(name) for name in ("state_indices", "dst_state_indices", "parents"))
    plain: checks.Shapes = {"[batch]": (batch,)}
    allowed: dict[str, checks.Shapes] = {"state_indices": plain, "dst_state_indices": plain}
    if "num_accepted_tokens" in named:
        columns = source.shape[-1] if source is not None and source.dim() else 0
        allowed["state_indices"] = {"[batch, columns], of which num_accepted_tokens picks one,": (batch, columns)}
    if tokens is not None and target is not None and target.dim() == 2:
        allowed["dst_state_indices"] = {**plain, "[batch, tokens]": (batch, target.shape[1] if ragged else tokens)}
    if tokens is not None and parents is not None:
        allowed["parents"] = {"[batch, tokens]": (batch, parents.shape[1] if ragged and parents.dim() == 2 else tokens)}
    return allowed


def check_pool(name: str, pool: Tensor, problems: list[str]) -> None:
    """Whether the states [slots, heads, …] are dense, and do not overlap."""
    if checks.check_dense(name, pool, problems) and pool.shape[0] > 1 and pool.stride(0) < pool[0].numel():
        problems.append(f"{name} has slots {pool.stride(0)} elements apart, which overlap; expected {pool[0].numel()} or more")


def check_room(named: Views, batch: int, problems: list[str], slots: int | None = None) -> None:
    """Whether each sequence has a slot, if there are no indices. slots: of the pool, if not its first axis."""
    slots = named["state"].shape[0] if slots is None else slots
    if "state_indices" not in named and slots < batch:
        problems.append(f"state has {slots} slots; expected {batch}, one per sequence of the batch. Pass a larger state, or state_indices.")


def check_slots(views: Views, batch: int, problems: list[str], update_state: bool = True) -> None:
    """Whether the operands that say where states are read and written go together."""
    source, target = views.get("state_indices"), views.get("dst_state_indices")
    check_room(views, batch, problems)
    if source is None:
        problems += [
            f"{n} is given without state_indices; expected both. Pass state_indices, or leave out {n}."
            for n in ("dst_state_indices", "num_accepted_tokens")
            if n in views
        ]
    else:
        check_target(views, problems)
    if target is not None and not update_state:
        problems.append("dst_state_indices is given with update_state=False, which writes no state; expected one of them. Leave out one.")
    if "num_accepted_tokens" in views and source is not None and target is None and update_state and source.shape[-1] > 1:
        problems.append(
            f"num_accepted_tokens is given with {source.shape[-1]} columns of state_indices; expected a slot to write. "
            "Pass dst_state_indices, or update_state=False."
        )


def check_target(views: Views, problems: list[str]) -> None:
    """Whether the slots that are read and written have one dtype."""
    source, target = views.get("state_indices"), views.get("dst_state_indices")
    if target is not None and source is None:
        problems.append(
            "dst_state_indices is given without state_indices; expected both. Pass state_indices, or leave out dst_state_indices."
        )
    elif target is not None and source is not None and source.dtype != target.dtype:
        problems.append(f"state_indices is {source.dtype} and dst_state_indices is {target.dtype}; expected one dtype for both")


def check_tokens(views: Views, problems: list[str]) -> None:
    """Whether a call of several tokens has a buffer for the operands that locate kept states, and a dense cu_seqlens."""
    if "intermediate_states" not in views:
        problems += [
            f"{n} is given without intermediate_states; expected both. Pass intermediate_states, or leave out {n}."
            for n in ("parents", "intermediate_state_indices")
            if n in views
        ]
    if "cu_seqlens" in views and views["cu_seqlens"].stride(0) != 1:
        problems.append(f"cu_seqlens has stride {views['cu_seqlens'].stride(0)}; expected 1. Pass cu_seqlens.contiguous().")
