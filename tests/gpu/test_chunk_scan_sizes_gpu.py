"""chunk_scan on a card, by warpgroups, at the sizes of models whose heads are not 64 x 64 or 64 x 128."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import scan_cases as laws
import torch
from repeats import others_in_graphs
from scan_cases import BF16, BOUNDS, F16, F32, SM90, Sizes, error, exact, make, same

import ssmgen
from ssmgen.families.chunk_scan.spec import OPERATOR, ScanProblem
from ssmgen.families.chunk_scan.warpgroups import WarpgroupScanSpec
from ssmgen.select.registry import select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

# {name: (sizes, parts)}
MODELS = {
    "falcon-h1-7b": (Sizes(heads=24, headdim=128, d_state=256, device="cuda"), 2),
    "falcon-h1-1.5b": (Sizes(heads=48, headdim=64, d_state=256, device="cuda"), 2),
    "nemotron-h-47b": (Sizes(heads=256, groups=8, headdim=64, d_state=256, device="cuda"), 1),
    "nemotron-nano-9b": (Sizes(heads=128, groups=8, headdim=80, d_state=128, device="cuda"), 1),
    "granite-350m": (Sizes(heads=48, headdim=32, d_state=128, device="cuda"), 2),
    "falcon-h1-tiny": (Sizes(heads=24, headdim=32, d_state=64, device="cuda"), 4),
    "four-of-144": (Sizes(heads=4, headdim=144, d_state=256, device="cuda"), 6),
}
LENGTHS = (1, 15, 63, 64, 65, 127, 129, 300, 512, 513, 768, 769, 1025, 1500)
of_models = pytest.mark.parametrize("model", MODELS)


def variant(model: str, problem: ScanProblem) -> WarpgroupScanSpec:
    sizes, parts = MODELS[model]
    spec = select(OPERATOR, problem, sizes.heads, SM90, True)
    assert isinstance(spec, WarpgroupScanSpec) and (spec.stays or spec.parts == parts)
    return spec


def by(model: str, **more: Any) -> laws.Scan:
    return partial(laws.launched, spec=partial(variant, model), **more)


@of_models
def test_lengths(model):
    laws.lengths_are_accurate(by(model), MODELS[model][0], LENGTHS)


@of_models
@pytest.mark.parametrize("decay", [1e-3, 16.0])
def test_long_and_short_memories(model, decay):
    laws.is_accurate(by(model), MODELS[model][0], 1500, decay, step=3.0 if decay > 1 else 0.0)


@of_models
def test_f16(model):
    laws.is_accurate(ssmgen.chunk_scan, replace(MODELS[model][0], x=F16), 700, 0.1)


@of_models
def test_packing_changes_no_bit(model):
    laws.packing_changes_no_bit(by(model), MODELS[model][0], (*laws.LENGTHS, 513, 1500))


@of_models
def test_neighbours_do_not_matter(model):
    laws.neighbours_do_not_matter(by(model), MODELS[model][0], (65, 0, 700, 1, 1500, 64))


@of_models
@pytest.mark.parametrize("state", [F32, BF16])
def test_a_pool_is_touched_where_it_should_be(model, state):
    laws.a_pool_is_touched_where_it_should_be(by(model), MODELS[model][0], state)


@of_models
def test_a_cut_changes_no_bit(model):
    laws.a_cut_changes_no_bit(partial(ssmgen.chunk_scan, segments=1), MODELS[model][0], 1500, 640)


@of_models
def test_many_short_sequences(model):
    """A dense batch of short sequences is served by blocks that stay, with the bits of others."""
    sizes, _ = MODELS[model]
    call = make(sizes, 40, 130)
    assert variant(model, laws.problem_of(**call)).stays
    out, states = ssmgen.chunk_scan(**call, return_final_states=True)
    for i in (0, 39):
        own = {n: t[i : i + 1] if n in ("x", "dt", "B", "C") else t for n, t in call.items()}
        one, last = by(model)(**own, return_final_states=True)
        assert same(one[0], out[i]) and same(last[0], states[i])


@of_models
def test_ids_and_checkpoints(model):
    tokens = 1500
    call = make(MODELS[model][0], 2, tokens, decay=0.02)
    call["seq_idx"] = (torch.arange(tokens, device="cuda") // 350).int().repeat(2, 1)
    listed = torch.tensor([1, 63, 350, 351, 512, 513, 700, 1499, 1500, 1501, 2200, 3000], device="cuda")
    more = {"return_final_states": True, "checkpoint_positions": listed, "return_checkpoints": True}
    wanted, found = exact(call, **more), by(model)(**call, **more)
    for name, own in zip(("out", "final_states", "checkpoints"), found, strict=True):
        assert error(own, wanted[name]) <= BOUNDS[BF16], name
    plain = by(model)(**call, return_final_states=True)
    assert all(same(a, b) for a, b in zip(found, plain, strict=False)) and same(found[2][-1], found[1][1])


@of_models
def test_the_same_bits_ten_thousand_times(model):
    assert not others_in_graphs(by(model), make(MODELS[model][0], 2, 1100))
