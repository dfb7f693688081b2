"""Laws of launches on a card, for every family whose tests make calls with guarded memory: variants, captures, repetition, plans that are
found again, and chains of dependent launches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from bits import all_same, bits
from card_calls import launch, prepare
from guarded_call import GuardedCall
from subjects import SUBJECTS
from torch import Tensor

import ssmgen
from ssmgen.errors import CaptureError


def some(specs: Iterable[Any], most: int) -> list[Any]:
    """Up to `most` variants, always the same ones."""
    specs = list(specs)
    return random.Random(0).sample(specs, min(most, len(specs)))


def variants_are_bit_equal(operator: str, case: Any, specs: Sequence[Any]) -> None:
    """All write the same bits, which are within their bounds of float64."""
    subject = SUBJECTS[operator]
    want, first = subject.expected(subject.make(case, "cuda")), list[Tensor]()
    prepare(specs)
    for spec in specs:
        call = subject.make(case, "cuda")
        launch(spec, call.family, call.views, call.options, call.operands)()
        torch.cuda.synchronize()
        first = first or call.results()
        assert all_same(call.results(), first), f"{spec} differs from {specs[0]}"
    subject.assert_matches(call, want)


def the_first_launch_may_be_in_a_graph(operator: str, case: Any) -> None:
    """Once the call is warm. Before, a capture raises and names the remedy. case: one that no other test has, so it is not loaded."""
    subject = SUBJECTS[operator]
    call, eager = subject.make(case, "cuda"), subject.make(case, "cuda")
    want, function, kwargs = subject.expected(call), call.function, call.kwargs
    assert not ssmgen.is_warm(function, **kwargs)
    with pytest.raises(CaptureError, match=rf"ssmgen.warm\(ssmgen.{call.operator}"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call.run()
    assert ssmgen.warm(function, **kwargs) >= 1 and ssmgen.warm(function, **kwargs) == 0 and ssmgen.is_warm(function, **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    graph.replay()
    torch.cuda.synchronize()
    subject.assert_matches(call, want)
    eager.run()
    for _ in range(3):
        graph.replay()
        eager.run()
    torch.cuda.synchronize()
    assert all_same(written(call), written(eager))


def a_call_like_one_before_is_looked_at_again(operator: str, case: Any, shifted: str = "") -> None:
    """A plan found by its pattern is used with the new tensors' pointers. shifted: an operand that then begins at an odd element."""
    subject = SUBJECTS[operator]
    for seed in (1, 2, 3):
        call = subject.make(case, "cuda", seed)
        want, more = subject.expected(call), {}
        if shifted and seed == 3:
            t = call.kwargs[shifted]
            odd = torch.empty(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 4, dtype=t.dtype, device="cuda")
            more[shifted] = odd[3:].as_strided(t.shape, t.stride()).copy_(t)
        call.function(**call.kwargs | more)
        torch.cuda.synchronize()
        subject.assert_matches(call, want)


def written(call: GuardedCall) -> list[Tensor]:
    found = call.results()
    return list(found.values()) if isinstance(found, dict) else found


def launches_write_the_same_bits(calls: Sequence[GuardedCall], launches: int) -> None:
    """A graph restores what the calls write, makes them, and counts the bits that differ from the first run. It counts errors, too."""
    kept, wrong = [[t.clone() for t in written(call)] for call in calls], torch.zeros((), dtype=torch.int64, device="cuda")

    def once() -> None:
        for call, before in zip(calls, kept, strict=True):
            for t, b in zip(written(call), before, strict=True):
                t.copy_(b)
            call.run()

    def compared() -> None:
        once()
        for call, results in zip(calls, want, strict=True):
            for t, w in zip(written(call), results, strict=True):
                wrong.add_((bits(t) != w).sum())

    once()
    want = [[bits(t).clone() for t in written(call)] for call in calls]
    compared()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compared()
    for _ in range(launches):
        graph.replay()
    assert wrong.item() == 0
    want[0][0].view(-1)[7] += 1
    graph.replay()
    assert wrong.item() == 1


def decode_chain(call: Any, pdl: bool, steps: int = 16) -> list[Tensor]:
    """The outputs of a decode step that is made again and again, and the last state."""
    outs = []
    for _ in range(steps):
        call.kwargs["out"] = torch.full_like(call.kwargs["out"], float("nan"))
        outs.append(call.run(pdl=pdl))
    torch.cuda.synchronize()
    return [call.results()[0].clone(), *outs]


def pdl_changes_no_bit(chain: Callable[[bool], Sequence[Tensor]]) -> None:
    """chain: all that a chain of launches computes, with programmatic dependent launch or without."""
    want = chain(False)
    for _ in range(5):
        assert all_same(chain(True), want)
