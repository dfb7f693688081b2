"""selective_state_update of several tokens without a GPU: the reference, the errors, the registration, and the kernels emulated."""

from __future__ import annotations

import pytest
import torch
from ssu_token_cases import Call, Case, assert_matches, expected, make_call, matrix, op

from ssmgen import emulator, registry
from ssmgen.arguments import Arguments
from ssmgen.emulator import run_source
from ssmgen.kernels import OPERATOR_OF
from ssmgen.render import render
from ssmgen.spec import Arch

SM90, SM80 = Arch.parse("sm_90a"), Arch.parse("sm_80")
emulated = pytest.mark.skipif(not emulator.available(), reason="needs g++")
WRITTEN = ("state", "out", "intermediate_states")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are small, and workers share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", matrix(), ids=lambda c: c.id)
def test_reference_is_within_rounding_of_float64(case):
    call = make_call(case, "cpu")
    want = expected(call, any_order=True)
    assert call.run() is call.kwargs["out"]
    assert_matches(call, want)


def select(call: Call, arch: Arch = SM90):
    return registry.select(OPERATOR_OF[type(call.problem)], call.problem, call.size, arch, arch is SM90)


def emulate(call: Call, spec=None, arch: Arch = SM90, change=lambda source: source) -> None:
    """One launch of a variant, through the same argument packing as on a card; `change` edits the text."""
    spec = spec or select(call, arch)
    assert list(call.operands) == spec.operands()
    family = call.caller.family
    packed = Arguments(spec, family.values_of(spec, call.views, call.options)).at([t.data_ptr() for t in call.operands.values()])
    run_source(change(render(spec, arch)), spec.name, family.grid_of(spec, call.views), spec.threads, packed, call.operands, WRITTEN)


@emulated
@pytest.mark.parametrize("case", matrix(), ids=lambda c: c.id)
def test_within_rounding_of_float64(case):
    call = make_call(case, "cpu")
    want = expected(call)
    emulate(call)
    assert_matches(call, want)
