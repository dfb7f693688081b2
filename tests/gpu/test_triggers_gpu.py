"""Kernels that let their dependents start before their own wait: late producers, memory that is written two kernels earlier, chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from card_calls import after_a_producer, launch, needs_pdl, pairs_equal
from layer_card_cases import KIMI, MAMBA2, NEMOTRON, QWEN35_35B, WINDOWED, named_of
from layer_cases import F32, named
from layer_laws import assert_waits_for_its_producer

import ssmgen
from ssmgen.calls.operator import call_of
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.spec.kernel import Pdl
from tools.chain import FORMS, Chain, checked

pytestmark = [pytest.mark.gpu, needs_pdl]

BF16, DEVICE, FIRST = torch.bfloat16, "cuda", Pdl.TRIGGER_FIRST


def early(function: Any, hasty: bool = False, **kwargs: Any) -> Callable[[], None]:
    """The call's launches, which let dependents start before their wait if they may. hasty: without any wait."""
    call = call_of(function, pdl=True, **kwargs)
    problem, size, device, _ = call.problem()
    arch, gpu = runtime.device_arch(device.index), runtime.device_name(device.index)
    spec: Any = registry.select(OPERATOR_OF[type(problem)], problem, size, arch, True, gpu)
    spec = replace(spec, pdl=FIRST) if spec.triggers_first else spec
    views = call.caller.checked(call.operands, call.options, None)
    return launch(spec, call.caller.family, views, call.options, call.operands, hasty=spec.kernels if hasty else ())


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(BF16)


def norm_of(rows: int, size: int = 4096) -> dict[str, torch.Tensor]:
    x = randn(rows, size)
    return {"x": x, "weight": randn(size), "out": torch.empty_like(x)}


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_norm_waits_for_a_late_producer(rows):
    given = norm_of(rows)
    x, out = given["x"], given["out"]
    right = after_a_producer(x, out, out, out.clone(), lambda: ssmgen.rms_norm(**given, pdl=False))
    assert pairs_equal(right, after_a_producer(x, out, out, out.clone(), early(ssmgen.rms_norm, **given)))
    assert not pairs_equal(right, after_a_producer(x, out, out, out.clone(), early(ssmgen.rms_norm, hasty=True, **given)))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("last", ["skinny_linear", "rms_norm", "selective_state_update"])
def test_memory_of_the_kernel_before_the_previous_one(last, rows):
    """The first kernel writes late, the second does not access that memory, and the third one reads it. Its wait covers the first kernel,
    because the second one waits before it ends. Without the third one's wait the results are wrong. (Without the second one's they were
    right on an H200, so that is no control.)"""
    torch.manual_seed(0)
    between = norm_of(rows)
    if last == "skinny_linear":
        given = {"x": randn(rows, 2048), "weight": randn(4096, 2048), "out": randn(rows, 4096)}
        written = given["x"]
    elif last == "rms_norm":
        given = norm_of(rows, 2048)
        written = given["x"]
    else:
        heads = {
            "x": randn(rows, 8, 64),
            "dt": randn(rows, 8),
            "B": randn(rows, 2, 128),
            "C": randn(rows, 2, 128),
            "out": randn(rows, 8, 64),
        }
        given = {"state": torch.zeros(rows, 8, 64, 128, device=DEVICE), "A": -torch.rand(8, device=DEVICE), "dt_softplus": True, **heads}
        written = given["x"]
    function, out = getattr(ssmgen, last), given["out"]
    state = given.get("state", out)

    def chain(hasty: bool = False) -> Callable[[], None]:
        middle, third = early(ssmgen.rms_norm, **between), early(function, hasty=hasty, **given)
        return lambda: (middle(), third())[0]

    def produced(run: Callable[[], Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return after_a_producer(written, state, out, torch.zeros_like(state), run)

    right = produced(lambda: (ssmgen.rms_norm(**between, pdl=False), function(**given, pdl=False)))
    assert pairs_equal(right, produced(chain()))
    assert not pairs_equal(right, produced(chain(hasty=True)))


LAYERS = [named_of(NEMOTRON, batch=2), named_of(MAMBA2, batch=8, state=F32), named_of(WINDOWED, tokens=4, batch=2)]


@named(LAYERS)
@pytest.mark.parametrize("first", [{"norm_pdl": FIRST}, {"pdl": FIRST}, {"pdl": FIRST, "norm_pdl": FIRST}], ids=["norm", "layer", "both"])
def test_a_layer_waits_for_a_late_producer(case, first):
    """A norm after a first kernel that triggers before its wait must not read the gate early: the same chain with such a norm fails, if the
    first kernel leaves room for it. On an H200, eight sequences with states of f32 do not."""
    assert_waits_for_its_producer(case, room=case.batch < 8, **first)


@named([named_of(QWEN35_35B, batch=2), named_of(QWEN35_35B, batch=40), named_of(KIMI, batch=1)])
def test_a_delta_layer_waits_for_a_late_producer(case):
    assert_waits_for_its_producer(case, pdl=FIRST)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_chain_has_the_same_bits_wherever_it_triggers(rows):
    torch.manual_seed(rows)
    chain = Chain(DEVICE, rows, 3, hidden=1024, heads=32, headdim=64, groups=4)
    steps = {name: chain.step(form) for name, form in FORMS.items()}
    for _ in range(20):
        checked(chain, steps)


def test_replays_of_a_captured_chain_have_the_same_bits():
    """A thousand steps, many of which are in flight at once."""
    torch.manual_seed(0)
    chain = Chain(DEVICE, 1, 4, hidden=1024, heads=32, headdim=64, groups=4)
    step, late = chain.step(FORMS["all first"]), chain.step(FORMS["no pdl"])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step()
    chain.restart()
    for _ in range(50):
        graph.replay()
    found = chain.results()
    chain.restart()
    for _ in range(1000):
        late()
    assert all(map(torch.equal, found, chain.results()))
