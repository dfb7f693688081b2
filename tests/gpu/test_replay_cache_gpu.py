"""checkpoint_selective_state_update with flush on a card: within rounding of float64, graphs that follow the flags, and vLLM's function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same
from card_calls import on_card, serves_as_on_the_host
from test_engine_replay import SLOT, SLOTS, H, N, P, tokens
from test_engine_replay_cached import cache
from test_replay_cache import MATRIX
from torch import Tensor
from torch_conv import randn

import ssmgen
from ssmgen.compat import vllm
from ssmgen.emulator.check import trial_of
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.trial import TOLERANCE
from ssmgen.families.replay_selective_state_update.spec import ReplaySpec
from ssmgen.spec.kernel import DType, Pdl

pytestmark = pytest.mark.gpu
I32, CACHED = torch.int32, ("x_cache", "B_cache", "dt_cache")
LARGE = {"d_state": 128, "headdim": 64, "nheads": 64, "ngroups": 8, "warps": 4}
CASES = {name: spec for name, spec in MATRIX.items() if not spec.scaled} | {
    f"large-{state.value}": replace(MATRIX["f32"], **LARGE, state=state, out=DType.BF16, D=DType.F32) for state in DType
}


def arguments(spec: ReplaySpec, named: dict[str, Tensor]) -> dict[str, Any]:
    noise = {"philox_rounds": spec.philox_rounds} if spec.philox_rounds else {}
    return {"ring_start": None} | named | {"dt_softplus": spec.dt_softplus, "zero_padding": spec.zero_padding} | noise


@pytest.mark.parametrize("name", CASES)
def test_within_rounding_of_float64_and_nothing_else_changes(name):
    """Written tensors keep every bit that the reference does not change."""
    spec = replace(CASES[name], pdl=Pdl.OFF)
    trial = trial_of(spec, 6, 7)
    there = on_card(trial.named)
    before = {n: trial.views[n].clone() for n in trial.written}
    exact = {n: t.double() for n, t in before.items()}
    trial.reference(trial.views | exact)
    out = ssmgen.checkpoint_selective_state_update(**arguments(spec, there))
    torch.cuda.synchronize()
    assert out.data_ptr() == there["out"].data_ptr()
    for n, want in exact.items():
        got, was = there[n].cpu(), before[n]
        changed = ~((want == was.double()) | (want.isnan() & was.isnan()))
        assert same(got[~changed], was[~changed]), f"{n} changed elsewhere"
        bound = TOLERANCE[DType.F32] * spec.window + torch.finfo(got.dtype).eps
        assert not changed.any() or norm_error(got[changed], want[changed]) <= bound, n


def of_heads(A: Tensor, D: Tensor, dt_bias: Tensor, dt: Tensor, **given: Any) -> Tensor:
    """vLLM's function, with one value per head expanded as its layer does."""
    expanded = {"A": A[:, None, None].expand(H, P, N), "D": D[:, None].expand(H, P), "dt_bias": dt_bias[:, None].expand(H, P)}
    return vllm.selective_state_update_replayssm_output_only(**given, **expanded, dt=dt[..., None].expand(3, H, P), dt_softplus=True)


def operands() -> dict[str, Any]:
    """A call's arguments, with a full cache."""
    weights = {"A": -randn(H).abs(), "D": randn(H), "dt_bias": randn(H, seed=1)}
    given = {"state": randn(SLOTS, H, P, N, seed=3), **tokens(1, 3), **weights, **{n: t.fill_(0.5) for n, t in cache().items()}}
    given |= {"dt": randn(3, H, seed=4), "write_pos": torch.tensor([3, 0, 1], dtype=I32), "is_flush": torch.zeros(3, dtype=torch.int8)}
    return given | {"state_batch_indices": SLOT[:, None].contiguous(), "out": torch.zeros(3, H, P)}


def test_a_graph_follows_positions_and_flags():
    """Replays of one graph equal calls outside of it, through two rounds of the cache."""
    states, caches, outs = [], [], []
    for graph in (False, True):
        g, there, fresh = torch.Generator().manual_seed(1), on_card(operands()), operands()
        of_heads(**there)
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                of_heads(**there)
        for n in ("state", *CACHED):
            there[n].copy_(fresh[n])
        for t in range(9):
            for n in ("x", "B", "C"):
                there[n].copy_(torch.randn(there[n].shape, generator=g))
            there["write_pos"].fill_(t % 4)
            there["is_flush"].fill_(t % 4 == 3)
            recorded.replay() if graph else of_heads(**there)
            outs.append(there["out"].clone())
        states.append(there["state"])
        caches.append({n: there[n] for n in CACHED})
    assert same(*states) and all(same(a, b) for a, b in zip(outs[:9], outs[9:], strict=True))
    assert all(same(caches[0][n], caches[1][n]) for n in caches[0])


@pytest.mark.parametrize("flush", [False, True])
def test_vllm_s_function(flush):
    def make() -> dict[str, Any]:
        return operands() | {"is_flush": torch.full((3,), int(flush), dtype=torch.int8)}

    def results(out: Tensor, given: Any) -> list[Tensor]:
        return [out, given["state"], *[given[n] for n in CACHED]]

    serves_as_on_the_host(of_heads, make, results, 2e-5)
