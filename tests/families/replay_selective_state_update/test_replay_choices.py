"""Which replay kernels are chosen for how many heads, and that these compile without spills."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from compiled import compiled
from test_replay_kernels import BF, F32, NOISE, RUNG, SM80, SM90

from ssmgen.families.replay_selective_state_update import planning as op
from ssmgen.families.replay_selective_state_update.spec import ReplayProblem, ReplaySpec
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, DType, Index

# Machine code of the rules' choices, at the shapes of models: (heads, headdim, d_state, groups).

SHAPES = {
    "small": (16, 64, 128, 1),
    "large": (128, 64, 128, 8),
    "medium": (32, 64, 128, 2),
    "p80": (24, 80, 128, 1),
    "n256": (24, 128, 256, 1),
}
CHOSEN: dict[str, list[tuple[str, int, dict[str, Any]]]] = {  # shape, batch, the rest of the problem
    "sm_80": [("small", 256, {"state": BF, "z": BF}), ("medium", 8, {"state": F32, "tokens": 16, "window": 16})],
    "sm_90a": [
        ("small", 1, {"state": BF, "D": F32, "dt_bias": F32, "after_conv": True}),
        ("small", 8, {"state": F32}),
        ("small", 256, {"state": BF, "D": F32, "z": BF}),
        ("small", 64, {"state": BF, "D": F32, "z": BF, **NOISE}),
        ("p80", 64, {"state": BF, "advance": True, "cu_seqlens": Index.I32, **NOISE}),
        ("large", 32, {"state": DType.F16, "philox_rounds": 10, "advance": True, "cu_seqlens": Index.I32}),
        ("small", 64, {"state": BF, "D": F32, **RUNG, "window": 16}),
        ("p80", 64, {"state": BF, "z": BF, "advance": True, "cu_seqlens": Index.I32, **RUNG, "window": 16}),
        ("medium", 64, {"state": F32, **RUNG, "window": 16}),
        ("p80", 64, {"state": BF, "tokens": 16, "window": 16}),
        ("n256", 32, {"state": BF}),
        ("small", 256, {"state": BF, "two_kernels": True, "after_conv": True, "tokens": 16, "window": 16}),
    ],
    "sm_100a": [("small", 64, {"state": DType.F16, "philox_rounds": 10})],
    "sm_120": [("p80", 8, {"state": BF, "after_conv": True})],
}


@pytest.mark.parametrize(
    ("more", "batch", "how"),
    [
        (NOISE, 48, (4, 4)),
        (NOISE | {"nheads": 1, "headdim": 96}, 1000, (6, 1)),
        (NOISE | {"nheads": 12, "ngroups": 2, "headdim": 80, "out": DType.F16, "z": BF}, 1000, (5, 2)),
        (NOISE, 256, (4, 8)),
        (NOISE | {"state": DType.F16}, 256, (4, 4)),
        (RUNG | {"window": 16}, 16, (4, 1)),
        (RUNG | {"window": 16}, 64, (4, 2)),
        (RUNG | {"window": 16, "state": F32}, 64, (4, 1)),
        (RUNG | {"window": 16, "state": F32}, 256, (4, 4)),
        (NOISE | RUNG | {"window": 16}, 256, (4, 2)),
        (NOISE, 47, None),
        (RUNG | {"window": 16}, 15, None),
        ({}, 1000, None),
        (NOISE | RUNG | {"window": 16}, 255, None),
        (NOISE | {"state": DType.F16}, 255, None),
        (RUNG | {"window": 16, "state": F32}, 63, None),
        (RUNG | {"window": 16, "state": DType.F16}, 1000, None),
        (RUNG | {"window": 16, "tokens": 16}, 1000, None),
        (NOISE | {"tokens": 16, "window": 16}, 1000, None),
        (NOISE | {"out": F32}, 1000, None),
        (RUNG | {"window": 16, "headdim": 24}, 1000, None),
        (RUNG | {"window": 16, "headdim": 32}, 1000, None),
        (NOISE | {"two_kernels": True}, 1000, None),
    ],
)
def test_many_states_that_are_rounded_or_rest_get_blocks_of_several_heads(more, batch, how):
    """(warps, heads) of a block; None for blocks of one head's rows."""
    given: dict[str, Any] = {"d_state": 128, "headdim": 64, "nheads": 16, "ngroups": 1, "index": Index.I32, "state": BF} | more
    for arch in (SM90, SM80):
        spec = registry.select(op.OPERATOR, ReplayProblem(**given), batch, arch, False)
        assert ((spec.warps, spec.group_heads) if spec.by_group else None) == how


def chosen(shape: str, batch: int, more: dict[str, Any], arch: Arch) -> tuple[ReplaySpec, ...]:
    heads, headdim, d_state, groups = SHAPES[shape]
    problem = ReplayProblem(d_state=d_state, headdim=headdim, nheads=heads, ngroups=groups, index=Index.I32, **more)
    spec = registry.select(op.OPERATOR, problem, batch, arch, arch >= Arch(90))
    return spec.kernels


@pytest.mark.matrix
@pytest.mark.parametrize("target", CHOSEN)
def test_chosen_kernels_compile_without_spills(target):
    arch = Arch.parse(target)
    specs = [part for which in CHOSEN[target] for part in chosen(*which, arch)]
    with ThreadPoolExecutor(2) as pool:  # NVRTC releases the GIL
        built = list(pool.map(lambda s: compiled(s, arch), specs))
    for spec, cubin in zip(specs, built, strict=True):
        print(f"{target} {spec.stem}: {cubin.seconds:.2f} s, {cubin.resources}")
    assert not [f"{spec}: {c.resources}" for spec, c in zip(specs, built, strict=True) if c.resources.spills]
