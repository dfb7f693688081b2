"""Laws of decode layers on a card, for every recurrence."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import cards_of_tests
import pytest
import torch
from card_calls import after_a_producer, arch, launch
from card_calls import prepare as load
from layer_calls import LayerCall, bits, differing, make
from layer_cases import Case
from torch import Tensor

import ssmgen
from ssmgen.errors import CaptureError
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.spec.kernel import KernelSpec, Problem

DEVICE = "cuda"


def problem_of(case: Case) -> Problem:
    return make(case, DEVICE).built().problem()[0]


def chosen(case: Case, pdl: bool | None = None) -> KernelSpec:
    """The choice of the rules and of this GPU's tables."""
    problem = problem_of(case)
    wanted = arch().number >= 90 if pdl is None else pdl
    name = runtime.device_name(torch.cuda.current_device())
    return registry.select(OPERATOR_OF[type(problem)], problem, case.batch, arch(), wanted, name)


def prepare(cases: Iterable[Case]) -> None:
    """Loads the layers' kernels and the kernels of the separate operators."""
    specs: list[KernelSpec] = []

    def collect(function: Any, kwargs: dict[str, Any]) -> None:
        problem, size, device, pdl = function.build(**kwargs).problem()
        wanted = arch().number >= 90 if pdl is None else pdl
        specs.append(registry.select(OPERATOR_OF[type(problem)], problem, size, arch(), wanted, runtime.device_name(device.index)))

    for case in cases:
        call = make(case, DEVICE)
        collect(call.function, call.kwargs)
        call.chain(collect)
        del call
        cards_of_tests.give_back()
    load(specs)


def assert_equals_the_operators(case: Case) -> None:
    call, chain = make(case, DEVICE), make(case, DEVICE)
    for _ in range(3):
        call.run()
        chain.chain()
    torch.cuda.synchronize()
    call.assert_unharmed()
    assert not differing(call, chain)
    assert call.kwargs["out"][call.live].isfinite().all()


def assert_variants_are_equal(case: Case, specs: Sequence[KernelSpec], count: int) -> None:
    """`count` variants and the separate operators give equal results."""
    specs = random.Random(0).sample(list(specs), min(count, len(specs)))
    assert specs
    load(specs)
    chain = make(case, DEVICE).chain().chain()
    for spec in specs:
        call = make(case, DEVICE)
        built = call.built()
        plan = built.launch_with(spec).at(built.pointers)
        plan()
        plan()
        torch.cuda.synchronize()
        call.assert_unharmed()
        assert not differing(call, chain), spec


class _Again:
    """A call whose states can be put back."""

    def __init__(self, call: LayerCall):
        self.call = call
        self.kept = {n: call.memory.buffers[n][0].clone() for n in ("state", "conv_state")}

    def reset(self) -> None:
        for name, kept in self.kept.items():
            self.call.memory.buffers[name][0].copy_(kept)


def assert_launches_are_equal(case: Case, count: int) -> None:
    """Repeats the call `count` times from the same states. The order in which blocks reach a window changes no result."""
    call = make(case, DEVICE)
    again = _Again(call)
    chain = make(case, DEVICE).chain().results()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(count):
        again.reset()
        call.run()
        for name in chain:
            wrong += (bits(call.kwargs[name]) != chain[name]).sum()
        wrong += call.kwargs["arrivals"].abs().sum()
    assert int(wrong) == 0
    call.assert_unharmed()


def assert_graphs_replay(case: Case) -> None:
    call, chain = make(case, DEVICE), make(case, DEVICE)
    again = _Again(call)
    ssmgen.warm(call.function, **call.kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call.run()
    again.reset()
    for _ in range(2):
        graph.replay()
    for _ in range(6):
        chain.chain()
    torch.cuda.synchronize()
    call.assert_unharmed()
    assert not differing(call, chain)


def assert_capture_needs_warm(case: Case) -> None:
    """`case` is one that no other test has."""
    call = make(case, DEVICE)
    assert not ssmgen.is_warm(call.function, **call.kwargs)
    with pytest.raises(CaptureError, match=rf"ssmgen.warm\(ssmgen.{call.function.__name__}"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call.run()


def assert_pdl_changes_nothing(case: Case) -> None:
    """Runs consecutive steps, each of which needs the results of the step before."""
    calls = {pdl: make(case, DEVICE) for pdl in (False, True)}
    for pdl, call in calls.items():
        for _ in range(50):
            call.run(pdl=pdl)
    torch.cuda.synchronize()
    assert not differing(calls[False], calls[True])
    calls[True].assert_unharmed()


def assert_waits_for_its_producer(case: Case, room: bool = True, **change: Any) -> None:
    """The kernel before still writes the projection when this one starts. Without its wait this kernel reads too early. change: fields that
    differ from the chosen variant   room: blocks of the layer's norm fit beside those of its first kernel, so that they can read too early
    """
    call = make(case, DEVICE)
    again = _Again(call)

    def produced(run: Any) -> list[tuple[Tensor, Tensor]]:
        again.reset()
        call.kwargs["arrivals"].zero_()
        state = call.kwargs["state"]
        found = after_a_producer(call.memory.buffers["proj"][0], state, call.kwargs["out"], state.clone(), run)
        return [(out[call.live], states[call.used]) for out, states in found]

    def equal(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
        return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))

    ssmgen.warm(call.function, **call.kwargs | {"pdl": True})
    ssmgen.warm(call.function, **call.kwargs | {"pdl": False})
    right = produced(lambda: call.run(pdl=False))
    assert equal(right, produced(lambda: call.run(pdl=True)))
    built, spec = call.built(), chosen(case, pdl=True)
    if change:
        spec = replace(cast(Any, spec), **change)
        assert equal(right, produced(built.launch_with(spec).at(built.pointers)))
        if room and any(getattr(part, "late", False) for part in spec.kernels):  # a norm that reads its gate before the wait has ended
            wrong = [replace(cast(Any, part), late=False) if getattr(part, "late", False) else part for part in spec.kernels]
            views = built.caller.checked(built.operands, built.options, None)
            early = launch(SimpleNamespace(kernels=wrong), built.caller.family, views, built.options, built.operands)
            assert not equal(right, produced(early))
    views = built.caller.checked(built.operands, built.options, None)
    hasty = launch(spec, built.caller.family, views, built.options, built.operands, hasty=spec.kernels[:1])
    assert not equal(right, produced(hasty))
