"""selective_scan: its reference, and the laws of its kernel in the emulator; checks and choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import selective_cases as laws
import torch
from emulated_calls import needs_emulator
from kernel_laws import edited
from selection import costly
from selective_cases import BF16, F16, F32, SM90, Sizes, emulated, make, same, variant
from torch import Tensor

import ssmgen
from ssmgen import emulator
from ssmgen.emulator.check import check
from ssmgen.errors import ArgumentError, SpecError
from ssmgen.families.selective_scan.problem import OPERATOR, Order, SelectiveProblem
from ssmgen.families.selective_scan.problem import asked as segments_asked
from ssmgen.families.selective_scan.roles import RolesSpec
from ssmgen.families.selective_scan.rules import candidates, space
from ssmgen.families.selective_scan.spec import EXPONENTIAL, TURNS, SelectiveSpec
from ssmgen.select.models import Wanted, asks, find_model, models
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, Loads, parse_spec

SMALL = Sizes()
EXACT = replace(SMALL, x=F32)
by_both = pytest.mark.parametrize(
    "run", [ssmgen.selective_scan, pytest.param(emulated, marks=needs_emulator)], ids=["reference", "emulated"]
)


def polynomial_of(d: Tensor, a: Tensor) -> Tensor:
    """In f32, operation by operation, as in the kernel: an fma rounds once a value that float64 holds exactly, or to 2^-53."""

    def fma(x: Tensor, y: Tensor, z: Tensor | float) -> Tensor:
        return (x.double() * y.double() + z).float()

    shifted = fma(d, a, 12582912.0)
    f = fma(d, a, -(shifted.double() - 12582912.0))
    p = torch.full_like(f, float(EXPONENTIAL[0]))
    for c in EXPONENTIAL[1:]:
        p = fma(p, f, float(torch.tensor(float(c))))
    return (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def test_exponentials_of_the_polynomial_are_accurate():
    """Down to 2^-126: of any number, and of products of steps with trained-like A, which are not rounded on their way."""
    x = torch.cat([-torch.linspace(0, 126, 2_000_001), -torch.logspace(-40, 0, 200_001), -torch.arange(127.0), -torch.arange(126.0) - 0.5])
    A, g = make(replace(SMALL, dim=4096))["A"].flatten() * math.log2(math.e), torch.Generator().manual_seed(2)
    steps = torch.exp(torch.rand(8, A.numel(), generator=g) * math.log(1e5) + math.log(1e-4))
    parts = [(part, torch.ones_like(part)) for part in x.split(1 << 18)]  # all at once, a worker would hold 80 MiB more
    for d, a in (*parts, (torch.minimum(steps, 125.999 / -A), A.expand_as(steps))):
        wanted = torch.exp2(d.double() * a.double())
        found = polynomial_of(d, a).double()
        assert ((found - wanted) / wanted).abs().max() <= 1.0e-7
        assert bool((found[d * a == 0] == 1).all()) and bool((found <= 1).all())


KINDS: dict[str, dict[str, Any]] = {
    "trained": {},
    "no gate": {"z": False},
    "strong decay": {"step": 3.0, "decay": 4.0},
    "long memory": {"step": 0.01, "decay": 1e-3},
}


@costly(1)
@needs_emulator
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("x", [F32, BF16])
def test_results_are_those_of_float64(kind, x):
    laws.is_accurate(emulated, replace(SMALL, x=x), 150, **kind)


@needs_emulator
@pytest.mark.parametrize("polynomial", [0, 16])
def test_either_exponential_is_accurate(polynomial):
    """This includes states that decay to nothing and states that lose nothing."""
    run = partial(emulated, spec=variant(polynomial=polynomial))
    laws.is_accurate(run, EXACT, 20)
    laws.is_accurate(run, EXACT, 20, step=100.0, decay=1e6)
    call = make(EXACT, 1, 9) | {"delta": torch.zeros(1, 9, SMALL.dim), "delta_bias": None, "delta_softplus": False}
    before = laws.states(EXACT, 1)
    assert same(run(**call, initial_states=before, return_final_states=True)[1], before)


@needs_emulator
def test_decays_of_f32_operands_are_off_to_neither_side():
    """Special function units may be off by 2 units of the last place, and always to the same side; 300 tokens of long memory keep that."""
    power = "exp2_approx(step.low * a[s])"
    change = edited(power, f"__uint_as_float(__float_as_uint({power}) - 2)")
    call = make(EXACT, 1, 300, **KINDS["long memory"]) | {"initial_states": laws.states(EXACT, 1), "return_final_states": True}
    wanted = laws.exact(call)
    out, last = emulated(**call, change=change)
    assert laws.error(out, wanted["out"]) <= 1e-6 and laws.error(last, wanted["final_states"]) <= 1e-6
    _, last = emulated(**call, change=change, spec=variant(polynomial=1))
    assert laws.error(last, wanted["final_states"]) > 1e-5


@by_both
def test_lengths_are_accurate(run):
    laws.lengths_are_accurate(run, EXACT)


LAWS: dict[str, Callable[[Any, Sizes], None]] = {
    "packing": partial(laws.packing_changes_no_bit, lengths=(65, 0, 7, 1, 32)),
    **{f"cut at {n}": partial(laws.a_cut_changes_no_bit, tokens=75, at=n) for n in (4, 64)},
    "neighbours": partial(laws.neighbours_do_not_matter, lengths=(5, 16, 21)),
    "decoding": partial(laws.decoding_goes_on, tokens=37),
    "without tokens": partial(laws.sequences_without_tokens_keep_states, state=F32),
    "boundaries": laws.boundaries_that_make_no_sense_are_sequences_without_tokens,
}


@by_both
@pytest.mark.parametrize("law", LAWS)
def test_laws(run, law):
    LAWS[law](run, SMALL)


@costly(1)
@by_both
@pytest.mark.parametrize("state", [F32, BF16, F16])
def test_a_pool_is_touched_where_it_should_be(run, state):
    laws.a_pool_is_touched_where_it_should_be(run, SMALL, state)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("sizes", [EXACT, replace(SMALL, x=F16, groups=2), replace(SMALL, dim=21, d_state=6)], ids=["f32", "groups", "odd"])
def test_layout_changes_no_bit(sizes):
    laws.layout_changes_no_bit(emulated, sizes, 22)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("d_state", [16, 36])
def test_variants_are_bit_equal(first, d_state):
    call: dict[str, Any] = make(replace(SMALL, d_state=d_state), 2, 37) | {"return_final_states": True}
    if first:
        call = laws.channels_first(call, True)
    hows: list[dict[str, Any]] = [
        {"lanes": 2},
        {"tile": 32},
        {"warps": 2},
        {"lanes": 8, "warps": 4} if d_state > 16 else {"lanes": 1},
    ]
    wanted = emulated(**call)
    for how in hows:
        assert all(same(a, b) for a, b in zip(emulated(**call, spec=variant(**how)), wanted, strict=True)), how


@costly(1)
@needs_emulator
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("__syncthreads();  // all threads see tile n", "// all threads see tile n"),
        ("if (token < rows && channel < int(width)) store", "store"),
        ("has_channel && n < kState ? kLog2E", "n < kState ? kLog2E"),
    ],
    ids=["barrier", "bounds", "channels"],
)
def test_mistakes_are_found(old, new):
    with pytest.raises((emulator.EmulatorError, AssertionError), match=r"^(?!the edit)"):
        laws.is_accurate(partial(emulated, change=edited(old, new)), replace(SMALL, dim=21), 21)


PROBLEMS = [
    SelectiveProblem(d_state=16, z=True, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, state=DType.BF16),
    SelectiveProblem(d_state=5, x=DType.F32, layout=Order.FIRST, key_copy=4, initial=True, final=True, state_loads=Loads.ELEMENT),
    SelectiveProblem(d_state=64, copy=0, key_copy=0, key_layout=Order.FIRST, D=DType.BF16, delta_bias=DType.F16, x=DType.F16),
]


@costly(1)
@needs_emulator
@pytest.mark.parametrize("problem", PROBLEMS, ids=["pool", "few-states", "any-strides"])
def test_checks_of_variants(problem):
    assert check(variant()(problem), SM90, 4).passed


# Checks and choices.


def operands(**changes: Any) -> dict[str, Any]:
    return make(SMALL, 2, 5) | changes


@costly(1)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"u": torch.zeros(2, 24)}, "u is [2, 24]; expected [batch, T, dim]"),
        ({"u": torch.zeros(24, 2), "channels_first": True}, "u is [24, 2]; expected [batch, dim, T]"),
        ({"cu_seqlens": torch.zeros(3).int()}, "u is [2, 5, 24]; expected [tokens, dim] or [1, tokens, dim], as cu_seqlens is given"),
        ({"delta": torch.zeros(2, 5, 23).bfloat16()}, "delta is [2, 5, 23]; expected [2, 5, 24], the shape of u [..., T, dim]"),
        ({"A": torch.zeros(24)}, "A is [24]; expected [dim, N]"),
        ({"A": torch.zeros(24, 16).bfloat16()}, "A is bfloat16; expected float32"),
        ({"A": torch.zeros(24, 16, dtype=torch.complex64)}, "A is complex64; expected float32"),
        ({"C": torch.zeros(2, 5, 15).bfloat16()}, "], as u is [2, 5, 24] and N is 16"),
        ({"B": torch.zeros(2, 5, 5, 16).bfloat16()}, "u has 24 channels; expected a multiple of the 5 groups of B"),
        ({"z": torch.zeros(2, 5, 24)}, "z is float32; expected bfloat16, the dtype of u"),
        ({"D": torch.zeros(2)}, "D is [2]; expected [dim] = [24]"),
        ({"state": torch.zeros(2, 24, 8)}, "state is [2, 24, 8]; expected [slots, dim, N] = [2, 24, 16]"),
        ({"state": torch.zeros(2, 24, 16), "return_final_states": True}, "final_states_out is given with state"),
        ({"initial_states": torch.zeros(2, 24, 32)[..., ::2]}, "initial_states has strides [768, 32, 2]; expected contiguous rows"),
        ({"state_indices": torch.zeros(2).int()}, "state_indices is given without state"),
        ({"out": torch.zeros(1, 5, 24).bfloat16().expand(2, 5, 24)}, "two of its elements share memory"),
        (
            {"u": torch.zeros(2, 5, 24, requires_grad=True)},
            "u requires grad; expected no gradients, since the scan of a prompt has no backward",
        ),
    ],
)
def test_mistakes_of_calls_are_named(changes, words):
    with pytest.raises(ArgumentError) as caught:
        ssmgen.selective_scan(**operands(**changes))
    assert words in str(caught.value)


def test_the_output_lies_as_u_does():
    call = laws.channels_first(make(SMALL, 2, 5), False)
    assert ssmgen.selective_scan(**call).stride() == call["u"].stride()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120"])
def test_every_size_has_a_variant(arch):
    target = Arch.parse(arch)
    for d_state in (1, 4, 5, 16, 24, 64, 100, 128, 256):
        for x in DType:
            for layout, copy in ((Order.LAST, 16), (Order.FIRST, 16), (Order.FIRST, 0)):
                problem = SelectiveProblem(d_state=d_state, x=x, layout=layout, copy=copy, key_layout=layout, z=True, final=True)
                for size in (1, 8192, 24576, 65536):
                    spec = select(OPERATOR, problem, size, target, target >= SM90)
                    assert parse_spec(str(spec), {OPERATOR: SelectiveSpec, RolesSpec.family: RolesSpec}) == spec


def test_variants_that_cannot_be_say_why():
    spec = variant()(SelectiveProblem(d_state=16))
    for how, words in (
        ({"lanes": 3}, "lanes is 3; expected 1, 2, 4"),
        ({"lanes": 8}, "lanes is 8 with 16 states; expected 4 or more states per lane"),
        ({"tile": 12}, "tile is 12; expected 8, 16"),
        ({"polynomial": 17}, f"polynomial is 17; expected 0 … {len(TURNS)}"),
        ({"d_state": 257}, "d_state is 257; expected 1 … 256"),
    ):
        with pytest.raises(SpecError, match=words):
            replace(spec, **how).check(SM90)
    assert len(list(space(SelectiveProblem(d_state=16, z=True), SM90))) > 50


def test_the_rules_take_fewer_lanes_where_there_are_many_channels():
    def lanes(size: int) -> int:
        problem = SelectiveProblem(d_state=16, z=True)
        return next(spec.lanes for _, spec, _ in candidates(problem, size, SM90, True) if spec is not None)

    assert lanes(8192) == 4 and lanes(65536) == 2


def test_models_ask_for_the_layouts_that_callers_have():
    asked = asks()[OPERATOR]
    assert {m.name for m in models().values() if asked.used_by(m)} == {m.name for m in models().values() if m.kind == "mamba1"}
    call = make(SMALL, 2, 8) | {"return_final_states": True}
    first = laws.channels_first(call, True)
    packed = make(SMALL, 16) | {"cu_seqlens": torch.tensor([0, 16]).int(), "state": laws.states(SMALL, 1)}
    packed |= {"state_indices": torch.zeros(1).int(), "has_initial_state": torch.zeros(1, dtype=torch.bool)}
    forms = [call, first, first | {n: laws.channels_first(call, False)[n] for n in "BC"}, packed]
    few = segments_asked(None, 1536, SMALL.d_state, 4096)
    assert not few and segments_asked(None, 768, SMALL.d_state, 4096), "the model has too many channels for that, and half of it has not"
    built = {p for index in (Index.NONE, Index.I32) for p in asked.problems(find_model("mamba-130m"), Wanted(indices=(index,)))}
    found = {ssmgen.selective_scan.build(**form).problem()[0] for form in forms}
    assert found | {replace(problem, **few) for problem in found} == built
