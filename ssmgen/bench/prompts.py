"""Shared by the benchmarks of prompts: final states in new tensors or a pool, the checked heads, a multiplication as the ceiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spec.kernel import must
from . import axes
from .axes import At
from .case import Call, Case, Launch, cuts_of, sets_of

PROMPT = 2048  # tokens of a model's prompts
HOST_TOKENS = 2048  # host times are of cases up to this
HEADS = 4  # that are held against float64
PACKED = axes.switch("--packed", "packed", (False,), "Pack the sequences with cu_seqlens: equal lengths, zero initial states.", later=True)


def sequences_of(quick: bool) -> tuple[int, ...]:
    """How many prompts of a model are timed at once."""
    return (1,) if quick else (1, 4, 16)


def prompt_sets(set_bytes: float) -> int:
    return sets_of(set_bytes, least=2)


def moving(set_bytes: float, sets: int, device: torch.device) -> Launch:
    """torch's multiplication of dense tensors, out of place, that moves `set_bytes`."""
    source, target = (torch.empty(sets, int(set_bytes) // 8, device=device) for _ in range(2))
    return lambda i: torch.mul(source[i], 1.0, out=target[i])


def prompt_case(
    at: At, function: Any, moved: int, limit: float, rotating: Mapping[str, Tensor], shared: Mapping[str, Any],
    part: Callable[[Call], Call], outputs: tuple[str, ...] = ("out", "final_states_out"),
) -> Case:  # fmt: skip
    """The case of a benchmark whose shape ends with sequences and their tokens. moved: bytes of a call; limit: of the error of each result;
    part: of a call, which is held against float64."""
    *_, count, length = at.shape
    sets, device = len(rotating["out"]), rotating["out"].device
    return Case(
        function=function,
        sets=sets,
        bytes=moved,
        rotating=rotating,
        shared={**shared, **({"cu_seqlens": even_cuts(count, length, device)} if at.packed else {})},
        part=part,
        limits=dict.fromkeys(("out", "state", "final_states"), limit),
        outputs=outputs,
        beside={"mul": moving(moved, sets, device)},
        ratios=("mul",),
        host=count * length <= HOST_TOKENS,
    )


def normal(at: At, moved: int, flat: bool, device: torch.device) -> Callable[..., Tensor]:
    """A function (axes of a token) -> bf16 numbers [sets, sequences, tokens, …], or of flat sequences [sets, tokens, …]. moved: bytes of a
    call."""
    *_, count, length = at.shape
    lead = (prompt_sets(moved), *((count * length,) if flat else (count, length)))
    return lambda *inner: torch.randn(*lead, *inner, device=device, dtype=torch.bfloat16)


def ends(states: Tensor, packed: int) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """(rotating, shared, only written) arguments for final states: new tensors or, with a number of packed tokens, slots of a pool, from
    which the sequences go on. states: [sets, sequences, …]."""
    count, device = states.shape[1], states.device
    if not packed:
        return {"final_states_out": states}, {"return_final_states": True}, ("out", "final_states_out")
    slots, started = torch.randperm(count, device=device).int(), torch.ones(count, dtype=torch.bool, device=device)
    shared = {"cu_seqlens": cuts_of(packed, count, device), "state_indices": slots, "has_initial_state": started}
    return {"state": states.normal_()}, shared, ("out",)


def even_cuts(count: int, length: int, device: torch.device) -> Tensor:
    """Where packed sequences of one length start, and the last one ends: [count + 1]."""
    return torch.arange(count + 1, dtype=torch.int32, device=device) * length


def packed_words(row: Mapping[str, Any]) -> str:
    """The end of a row's name."""
    return ", packed" if row.get("packed") else ""


def pool_mistakes(forms: Sequence[Any] = (), packed: bool = False, **others: Any) -> list[str]:
    """Options that do not go together, of a benchmark with the form `pool`."""
    pooled = any(getattr(form, "value", form) == "pool" for form in forms)
    return must(
        not (packed and pooled), "--packed is given with --form pool, which packs sequences of different lengths; expected another form"
    )


def some_heads(call: Call, heads: int, groups: int, by_head: Sequence[str], by_group: Sequence[str], packed: bool) -> dict[str, Any]:
    """The call of the first heads, and the groups that these are of. Names of the head's own vectors are in by_head, too."""
    axis = 1 if packed else 2

    def first(name: str, t: Tensor) -> Tensor:
        count = groups if name in by_group else heads
        return t[:count] if t.dim() == 1 else t[:, :count] if "state" in name else t.narrow(axis, 0, count)

    states = ("state", "final_states_out")
    return {n: first(n, t) if n in (*by_head, *by_group, *states) else t for n, t in call.items()}
