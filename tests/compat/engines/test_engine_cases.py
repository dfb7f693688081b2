"""The engines' functions on their families' cases, on CPU tensors; the same forms run on a card in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator, run_as_emulated
from engine_calls import no_call_goes_to_the_engine, sglang_functions, vllm_functions  # noqa: F401
from engine_cases import FORMS, SHARED, load, operands, padded_with
from selection import costly
from test_fast_path import launched  # noqa: F401

ONE_OF_EACH = [*{(f.arguments, f.relay): f for f in FORMS if "noisy" not in f.id}.values()]  # kind of arguments
named = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.id)


@costly(36)
@pytest.mark.parametrize(
    ("form", "mode"),
    [(f, mode) for f in FORMS for mode in (torch.no_grad, torch.inference_mode) if mode is torch.no_grad or f in ONE_OF_EACH],
    ids=lambda value: getattr(value, "id", None),
)
def test_results_are_within_the_families_bounds(request, form, mode):
    function = getattr(request.getfixturevalue(form.engine), form.name)
    with mode():
        call = form.make("cpu")
        want = form.expected(call)
        form.prepared(function, call)()
        form.check(call, want)


@costly(12)
@named
def test_a_call_on_other_operands_in_the_same_memory(request, form):
    """The same tensors with other numbers in them, as in a CUDA graph."""
    function = getattr(request.getfixturevalue(form.engine), form.name)
    first, second = form.make("cpu"), form.make("cpu", seed=1)
    run, want = form.prepared(function, first), form.expected(second)
    run()
    load(first, second)
    run()
    load(second, first)
    form.check(second, want)


@pytest.mark.parametrize("form", SHARED, ids=lambda f: f.id)
def test_padded_rows_that_share_slot_0_change_nothing_of_others(request, form):
    function = getattr(request.getfixturevalue(form.engine), form.name)
    results = []
    for slot in (-1, 0):
        call, padded, pool = padded_with(form, "cpu", slot)
        assert padded.sum() > 1
        form.prepared(function, call)()
        out = operands(call)["out"]
        results.append((out.flatten(0, 1) if out.shape[0] == 1 else out)[~padded].clone())
        results.append(pool[1:].nan_to_num(7.0))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@costly(16, 40)
@named
def test_the_second_call_finds_what_the_first_has_made(request, form, launched):  # noqa: F811
    """A call that makes its views again is not a new kind of call."""
    function, call = getattr(request.getfixturevalue(form.engine), form.name), form.make("cpu")
    for _ in range(3):
        function(**form.arguments(operands(call)))
    assert launched.made == 1 and len(launched) == 3
    given = [n for n in launched[0] if n not in ("out", "rand_seed", "num_accepted_tokens")]  # these may be new in each call
    assert all(step.keys() == launched[0].keys() and all(step[n] == launched[0][n] for n in given) for step in launched)


@costly(12)
@needs_emulator
@pytest.mark.parametrize("form", ONE_OF_EACH, ids=lambda f: f.id)
def test_kernels_of_what_the_engines_pass(request, form, monkeypatch):
    """The kernels that the registry chooses, as they stand."""
    run_as_emulated(monkeypatch)
    function = getattr(request.getfixturevalue(form.engine), form.name)
    with torch.no_grad():
        call = form.make("cpu")
        want = form.laws.expected(call)
        form.prepared(function, call)()
        form.check(call, want)
