"""selective_scan on a card: the laws of its results at the sizes of models, offsets beyond 32 bits, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import repeats
import selective_cases as laws
import torch
from selective_cases import BF16, F16, F32, Sizes, make, same

import ssmgen
from ssmgen.families.selective_scan.problem import OPERATOR, SelectiveProblem
from ssmgen.families.selective_scan.roles import RolesSpec
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, changed, flat

pytestmark = pytest.mark.gpu

MODEL = Sizes(dim=1536, device="cuda")
FEW = replace(MODEL, dim=768)  # channels: the rule cuts long sequences of these
EXACT = replace(MODEL, dim=256, x=F32)
SIZE = {"few": 1, "roles": 8192, "many": 65536}  # channels of all sequences, as the rules count them


def served(size: int, **how: Any) -> Any:
    """A function that runs a call by the rule for `size` channels, or as a variant of that choice."""

    def spec(problem: SelectiveProblem) -> Any:
        arch = runtime.device_arch(torch.cuda.current_device())
        return changed(registry.select(OPERATOR, problem, size, arch, arch >= Arch(90)), **how)

    return partial(laws.launched, function=ssmgen.selective_scan, spec=spec)


by_rules = pytest.mark.parametrize("run", [ssmgen.selective_scan, *(served(n) for n in SIZE.values())], ids=["served", *SIZE])


@by_rules
@pytest.mark.parametrize(
    ("sizes", "tokens", "kind"),
    [
        (EXACT, 1000, {}),
        (EXACT, 1000, {"step": 3.0, "decay": 4.0}),
        (EXACT, 4096, {"step": 0.01, "decay": 1e-3}),
        (MODEL, 300, {"z": False}),
        (replace(MODEL, dim=264, groups=2, x=F16), 300, {}),
        (replace(EXACT, d_state=64), 300, {}),
        (replace(EXACT, dim=100, d_state=256), 70, {}),
        (replace(EXACT, dim=101, d_state=5), 70, {}),
    ],
    ids=["f32", "strong-decay", "long-memory", "bf16", "f16-groups", "n64", "n256", "n5"],
)
def test_results_are_those_of_float64(run, sizes, tokens, kind):
    laws.is_accurate(run, sizes, tokens, **kind)


LAWS: dict[str, Callable[[laws.Scan], None]] = {
    "lengths": partial(laws.lengths_are_accurate, sizes=EXACT),
    "packing": partial(laws.packing_changes_no_bit, case=MODEL, lengths=(*laws.LENGTHS, 1000)),
    "pool-f32": partial(laws.a_pool_is_touched_where_it_should_be, case=MODEL, state=F32),
    "pool-bf16": partial(laws.a_pool_is_touched_where_it_should_be, case=MODEL, state=BF16),
    "layout-bf16": partial(laws.layout_changes_no_bit, sizes=MODEL, tokens=150),
    "layout-f32": partial(laws.layout_changes_no_bit, sizes=EXACT, tokens=150),
    "layout-f16-groups": partial(laws.layout_changes_no_bit, sizes=replace(MODEL, dim=1540, groups=2, x=F16), tokens=150),
    "decoding": partial(laws.decoding_goes_on, case=MODEL, tokens=100),
}


@by_rules
@pytest.mark.parametrize("law", LAWS)
def test_laws(run, law):
    LAWS[law](run)


@by_rules
@pytest.mark.parametrize("cut", [4, 64, 1000])
def test_a_cut_changes_no_bit(run, cut):
    laws.a_cut_changes_no_bit(partial(run, segments=1), MODEL, 2048, cut)


in_parts = pytest.mark.parametrize("segments", [None, 3, 8])


@in_parts
@pytest.mark.parametrize(
    "sizes", [FEW, EXACT, replace(EXACT, d_state=64), replace(EXACT, dim=101, d_state=5)], ids=["bf16", "f32", "n64", "n5"]
)
@pytest.mark.parametrize("kind", [{}, {"step": 0.01, "decay": 1e-3}, {"step": 3.0, "decay": 4.0}], ids=["trained", "memory", "decay"])
def test_segments_are_accurate(segments, sizes, kind):
    laws.is_accurate(partial(ssmgen.selective_scan, segments=segments), sizes, 2100, **kind)


@in_parts
@pytest.mark.parametrize("sizes", [FEW, replace(EXACT, groups=2)], ids=["bf16", "f32-groups"])
def test_segments_hang_on_nothing_but_the_sequence(segments, sizes):
    run = partial(ssmgen.selective_scan, segments=segments)
    laws.packing_changes_no_bit(run, sizes, (2100, 0, 1024, 5, 384, 1500))
    laws.neighbours_do_not_matter(run, sizes, (1100, 9, 1024))
    laws.layout_changes_no_bit(run, sizes, 1100)
    laws.a_pool_is_touched_where_it_should_be(run, sizes, F32)


@pytest.mark.parametrize("first", [False, True])
def test_variants_of_segments_are_bit_equal(first):
    call: dict[str, Any] = make(replace(MODEL, dim=768), 2, 1500) | {"return_final_states": True}
    call = laws.channels_first(call, True) if first else call
    wanted = ssmgen.selective_scan(**call)
    assert not same(ssmgen.selective_scan(**call, segments=1)[1], wanted[1]), "nothing was cut"
    for how in ({"lanes": 2, "tile": 16}, {"tile": 8}, {"warps": 2}):
        assert all(same(a, b) for a, b in zip(served(1, **how)(**call), wanted, strict=True)), how
    assert all(same(t, wanted[1]) for t in (ssmgen.selective_scan(**call)[1] for _ in range(50)))


@pytest.mark.parametrize("x", [BF16, F32])
@pytest.mark.parametrize("first", [False, True])
def test_variants_are_bit_equal(x, first):
    call: dict[str, Any] = make(replace(MODEL, x=x), 2, 333) | {"return_final_states": True}
    call = laws.channels_first(call, True) if first else call
    wanted = ssmgen.selective_scan(**call)
    plain = {"min_blocks": 1}
    for how in (
        {"lanes": 1, "tile": 16},
        {"lanes": 2, "tile": 32},
        {"lanes": 4, "warps": 2},
        {"tile": 8},
        {"lanes": 2, "tile": 8, "warps": 8},
    ):
        found = served(1, **plain | how)(**call)
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True)), how


@pytest.mark.parametrize("x", [BF16, F32])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("tokens", [1, 31, 333, 1024])
def test_roles_change_no_bit(x, first, tokens):
    """They are equal in a hundred launches of each."""
    call: dict[str, Any] = make(replace(MODEL, x=x), 2, tokens) | {"return_final_states": True}
    call = laws.channels_first(call, True) if first else call
    wanted = ssmgen.selective_scan(**call, segments=1)
    small = {"warps": 4, "tile": 16}
    for how in (small, small | {"abreast": 1, "lead": 2}, small | {"aides": 8, "apart": True}, {"warps": 8, "abreast": 1, "tile": 8}):

        def spec(problem: SelectiveProblem, how: dict[str, Any] = how) -> RolesSpec:
            arch = runtime.device_arch(torch.cuda.current_device())
            plain = registry.select(OPERATOR, problem, 1, arch, arch >= Arch(90))
            return changed(RolesSpec(**flat(plain)), **{"min_blocks": 1, "lanes": 4} | how)

        run = partial(laws.launched, function=ssmgen.selective_scan, spec=spec, segments=1)
        for _ in range(100):
            assert all(same(a, b) for a, b in zip(run(**call), wanted, strict=True)), how


def test_the_same_bits_every_time():
    call = make(MODEL, 4, 300) | {"return_final_states": True}
    assert repeats.are_alike(partial(ssmgen.selective_scan, **call), 300)


def test_programmatic_launches_change_no_bit():
    repeats.programmatic_launches_change_no_bit(ssmgen.selective_scan, MODEL, 700)


def test_in_a_graph():
    repeats.a_graph_follows_its_lengths(ssmgen.selective_scan, MODEL)


@pytest.mark.usefixtures("room")
def test_offsets_beyond_32_bits():
    repeats.offsets_may_exceed_32_bits(ssmgen.selective_scan, Sizes(dim=64, device="cuda"))
