"""Decode steps of several tokens, of any recurrence: where sequences start and end, and the laws of their kernels in the emulator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from bits import all_same, same
from emulated_calls import SM80, SM90, chosen, emulate
from kernel_laws import edited, found_in_words
from rounding import Approx
from ssu_cases import F32, ulp
from torch import Tensor

I32, I64 = torch.int32, torch.int64
WRITTEN = ("state", "out", "intermediate_states")


@dataclass(frozen=True)
class Steps:
    """One point of a matrix of calls of several tokens; `id` is readable. A recurrence adds its operands."""

    id: str
    tokens: int | None = None  # None: no tokens axis
    lengths: tuple[int, ...] = ()  # ragged: packed as [tokens, …], or as [1, tokens, …] if `tokens` is 1
    batch: int = 5
    state: torch.dtype = F32
    weights: torch.dtype = F32
    out: torch.dtype | None = None  # None: the dtype of the operand whose shape it has
    index: torch.dtype | None = I32
    pad_slot_id: int = -1
    dst: str = ""  # row: one slot per sequence; token: one per token; own: the slots that the sequence may start from
    accepted: torch.dtype | None = None
    rows: torch.dtype | None = None  # of the rows of intermediate_states, which then are more; a sequence's may be none
    parents: torch.dtype | None = None  # of a draft tree
    update: bool = True
    packed: int | None = None  # several operands are slices of one tensor, from this element on
    slot_gap: int = 0  # elements between slots
    out_gap: bool = False  # out has its own strides

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens, by sequence."""
        return self.lengths or (self.tokens or 1,) * self.batch


@dataclass(frozen=True)
class Row:
    """The start and the outputs of one sequence. Its tokens are [row, start + i] of the operands."""

    row: int
    start: int
    tokens: int
    slot: int  # where it starts from; -1: it is padding
    targets: Mapping[int, int]  # {token: slot that receives the state after it}
    kept: int  # row of the intermediate states; -1: none
    parents: tuple[int, ...]  # of its tokens; -1: the token before


def rows_of(case: Any, g: torch.Generator, extra: int, kept: Sequence[int], listed: int) -> tuple[int, dict[str, Any], list[Row]]:
    """(size of the pool, index operands, sequences), of which 1, 2 and 4 of every five are padding; some destinations are invalid.

    extra: columns of intermediate states beyond the most tokens. kept: each sequence's row of them, -1 for none. listed: tokens of a tree.
    """
    B, longest = len(case.counts), max(case.counts)
    columns = longest if case.dst == "own" else 4
    slots = B + 1 if case.index is None else 2 * B * max(columns, longest) + 9
    invalid = (case.pad_slot_id, slots + 2, -5)
    order = iter([s for s in torch.randperm(slots, generator=g).tolist() if s != case.pad_slot_id])
    starts = [invalid[(1, 2, 4).index(b % 5)] if b % 5 in (1, 2, 4) else next(order) for b in range(B)]
    starts = list(range(B)) if case.index is None else starts
    indices: dict[str, Any] = {} if case.index is None else {"state_indices": starts}
    if case.accepted:  # every column counts once, and two of the padded sequences have a count out of range
        accepted = [{1: 0, 2: columns + 1}.get(b, 1 + b % columns) for b in range(B)]
        table = [[starts[b] if c + 1 == accepted[b] else next(order) for c in range(columns)] for b in range(B)]
        indices = {"state_indices": table, "num_accepted_tokens": accepted}
    if case.dst == "row":
        indices["dst_state_indices"] = [invalid[(3, 5, 8).index(b)] if b in (3, 5, 8) else next(order) for b in range(B)]
    elif case.dst:
        width = range(longest + min(extra, 0))
        fresh = [[invalid[(b + t) % 3] if (b + t) % 4 == 1 else next(order) for t in width] for b in range(B)]
        indices["dst_state_indices"] = table if case.dst == "own" else fresh
    trees: list[list[int]] = [[]] * B
    if case.parents:  # one back, two back, the first; and invalid: itself, a later one, far off, negative
        made = [lambda t: t - 1, lambda t: 0, lambda t: t - 2, lambda t: t, lambda t: t + 1, lambda t: 2**31 - 1, lambda t: -7]
        trees = [[made[(b + t * t) % 7](t) for t in range(listed)] for b in range(B)]
        indices["parents"] = trees
    sequences, edges = [], [sum(case.lengths[:b]) for b in range(B + 1)]
    for b, (n, to) in enumerate(zip(case.counts, indices.get("dst_state_indices", starts), strict=True)):
        slot = -1 if starts[b] in invalid or (case.parents and kept[b] < 0) else starts[b]
        targets = dict(enumerate(to[:n])) if isinstance(to, list) else {n - 1: to}
        targets = {t: s for t, s in targets.items() if case.update and n and slot >= 0 and s not in invalid}
        parents = tuple(p if 0 <= p < min(t, longest + extra) else -1 for t, p in enumerate([*trees[b], *[-1] * n][:n]))
        sequences.append(Row(0 if case.lengths else b, edges[b], n, slot, targets, kept[b], parents))
    indices |= {"cu_seqlens": edges} if case.lengths else {}
    return slots, indices, sequences


def rounding(call: Any, name: str, w: Approx) -> Tensor | float:
    """How far off a store may be: half an ulp, or with noise a whole one."""
    dtype = call.views[name].dtype
    if dtype is F32:
        return 0.0
    return ulp(w.size, dtype) / (1 if getattr(call.case, "seed", "") and name != "out" else 2)


def assert_matches(call: Any, want: dict[str, dict[Any, Approx]]) -> None:
    """Everything written is within its bounds, padded rows are zero, and nothing else in memory has changed."""
    views = {n: t.detach().cpu() for n, t in call.views.items()}
    views["out"] = views["out"] if views["out"].dim() == 4 else views["out"].unsqueeze(1)
    index = {n: torch.tensor(list(results), dtype=I64, device=call.memory.device) for n, results in want.items()}
    wrong = call.memory.untouched(index | {"intermediate_states": tuple(index["intermediate_states"].view(-1, 2).T), "out": None})
    assert not wrong, f"changed outside what the call may write: {wrong}"
    for name, results in want.items():
        for at, w in results.items():
            off = (views[name][at].double() - w.value).abs() / (w.error + rounding(call, name, w))
            assert off.max() <= 1, f"{name}[{at}] off by {float(off.max()):.2f} x its bound"
    padding = [views["out"][s.row, s.start : s.start + s.tokens] for s in call.sequences if s.slot < 0]
    assert not any(map(Tensor.any, padding)), "a padded row's output is not zero"


# Laws of kernels. `of` is the recurrence's module of cases: make_call, expected.


def is_within_rounding(of: ModuleType, case: Any, run: Callable[[Any], Any] = emulate, **how: Any) -> None:
    """Against float64."""
    call = of.make_call(case, "cpu")
    want = of.expected(call, **how)
    assert run(call) is call.kwargs["out"]
    assert_matches(call, want)


def prefetch_stays_within_the_pool(of: ModuleType, case: Any) -> None:
    """Blocks look at the slots of blocks to come, some of which are padding. Before sm_90 there is neither prefetch nor a wait."""
    for arch, ahead in ((SM90, 1), (SM90, 3), (SM80, 0)):
        is_within_rounding(of, case, lambda call, arch=arch, ahead=ahead: emulate(call, replace(chosen(call, arch), prefetch=ahead), arch))


def variants_are_equal(of: ModuleType, case: Any, specs: Sequence[Any]) -> None:
    """Bit for bit."""
    first: list[Tensor] = []
    assert len(specs) > 1
    for spec in specs:
        call = of.make_call(case, "cpu")
        emulate(call, spec)
        found = [call.kwargs[n].clone() for n in WRITTEN if n in call.kwargs]
        first = first or found
        assert all_same(found, first), spec


def tokens_equal_single_steps(
    of: ModuleType, case: Any, one_token: Callable[[Any, int], Any], device: str = "cpu", run: Callable[[Any], Any] = emulate
) -> None:
    """Bit for bit, across chunks of staged tokens; so do the states in between. A call that writes no state equals one that does.
    one_token: the call that does token t of another one alone, on the same state."""
    many, single = of.make_call(case, device), of.make_call(replace(case, update=True), device)
    run(many)
    for t in range(case.tokens):
        run(one_token(single, t))
        if case.update:
            kept = many.kwargs["intermediate_states"][: case.batch, t]
            assert same(kept, single.kwargs["state"][: case.batch]), f"state after token {t}"
        assert same(many.kwargs["out"][:, t], single.kwargs["out"][:, t]), f"output of token {t}"
    assert same(many.kwargs["state"], (single if case.update else of.make_call(case, device)).kwargs["state"])


def lane_maps(specs: Sequence[Any], count: int, seed: int = 1) -> list[Any]:
    """Some variants that differ in their lane maps; their other choices are drawn."""
    specs = list(specs)
    random.Random(seed).shuffle(specs)
    return [*{(s.lanes, s.vec): s for s in specs}.values(), *specs][:count]


def a_mistake_is_found(of: ModuleType, case: Any, edit: tuple[str, str, str], spec: Callable[[Any], Any] = chosen) -> None:
    """In the text of the chosen kernel, or of another one of the call. edit: text to replace, replacement, words of the finding."""
    old, new, words = edit
    with found_in_words(words):
        is_within_rounding(of, case, lambda call: emulate(call, spec(call), change=edited(old, new, count=1)))
