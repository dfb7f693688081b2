"""SGLang's ring of KDA's drafts: steps and commits in its layout, through the replaced names, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_calls import needs_emulator, run_as_emulated
from engine_calls import (  # noqa: F401
    HK,
    HV,
    K,
    V,
    delta_token,
    gdn_operands,
    near,
    no_call_goes_to_the_engine,
    poisoned,
    sglang_functions,
)
from test_engine_forms import starts_of
from torch import Tensor
from torch_conv import randn

I32 = torch.int32
LAYERS, SLOTS, DRAFTS, RING = 2, 8, 3, 8
SLOT = torch.tensor([5, -1, 0, 2], dtype=I32)
KINDS = [pytest.param(None, id="softplus"), pytest.param(-5.0, id="bounded")]


def rings(kda: bool = True) -> dict[str, Tensor]:
    """Tensors of all layers as SGLang lays them out, with NaN where nothing was stored yet."""
    gate = (K,) if kda else ()
    made = {"rawv": poisoned(LAYERS, SLOTS, HV, RING, V), "rawk": poisoned(LAYERS, SLOTS, HK, RING, K)}
    return made | {"g": poisoned(LAYERS, SLOTS, HV, RING, *gate), "beta": poisoned(LAYERS, SLOTS, HV, RING)}


def verified(sglang: Any, state: Tensor, ring: dict[str, Tensor], x: dict[str, Tensor], lengths: list[int], **how: Any) -> Tensor:
    """The outputs of packed drafts of one layer, which leave the pool as it is."""
    return sglang.fused_sigmoid_gating_delta_rule_update(
        A_log=x["A_log"], a=x["a"].flatten(1)[None], dt_bias=x["dt_bias"], softplus_beta=1.0, softplus_threshold=20.0,
        **{n: x[n][None] for n in "qkvb"}, initial_state_source=state, initial_state_indices=SLOT, cu_seqlens=starts_of(lengths),
        use_qk_l2norm_in_kernel=True, disable_state_update=True, cache_ring=True,
        **{f"replayssm_{n}": t for n, t in ring.items()}, **how,
    )  # fmt: skip


def commit(sglang: Any, states: Tensor, ring: dict[str, Tensor], accepted: Tensor, **how: Any) -> None:
    found = sglang.commit_kda_replayssm_spec_all_layers(
        states, ring["rawv"], ring["rawk"], ring["g"], ring["beta"], SLOT, accepted, RING, HK, null_block_id=-1, **how
    )
    assert found is None


@pytest.mark.parametrize("bound", KINDS)
def test_drafts_and_their_commits_are_single_tokens(sglang, bound):
    """Several steps of two layers, with numbers of accepted tokens of their own, and a tracked state in the second step."""
    states, ring, g = randn(LAYERS, SLOTS, HV, V, K, seed=3), rings(), torch.Generator().manual_seed(0)
    exact, untouched = states.double(), states.clone()
    for step in range(3):
        xs = [gdn_operands(4 * DRAFTS, kda=True) | {"A_log": randn(HV, seed=step + layer) / 4} for layer in range(LAYERS)]
        before, accepted = states.clone(), torch.randint(1, DRAFTS + 1, (4,), generator=g)
        after: dict[tuple[int, int, int], Tensor] = {}  # of each layer, sequence and number of tokens
        for layer, x in enumerate(xs):
            one = {n: t[layer] for n, t in ring.items()}
            out = verified(sglang, states[layer], one, x, [DRAFTS] * 4, is_kda=True, lower_bound=bound)
            for b in (0, 2, 3):
                S = exact[layer, SLOT[b]]
                for t in range(DRAFTS):
                    S, y = delta_token(S, x, b * DRAFTS + t, lower_bound=bound)
                    after[layer, b, t + 1] = S
                    assert near(out[0, b * DRAFTS + t], y)
            assert not out[0, DRAFTS : 2 * DRAFTS].any()
        assert torch.equal(states, before), "a step writes no state"
        track = {}
        if step == 1:
            accepted[0], accepted[2] = 3, 1
            track = {"mamba_track_indices": torch.tensor([7, 1, 4, -1]), "mamba_steps_to_track": torch.tensor([1, 0, 2, 0])}
        commit(sglang, states, ring, accepted.to(I32), **track)
        for layer in range(LAYERS):
            for b in (0, 2, 3):
                exact[layer, SLOT[b]] = after[layer, b, int(accepted[b])]
            if step == 1:  # only the first sequence's: token 2 of the third was not accepted, and the others have no slot
                exact[layer, 7] = after[layer, 0, 2]
        assert near(states, exact)
    assert torch.equal(states[:, [1, 3, 4, 6]], untouched[:, [1, 3, 4, 6]])
    assert not torch.equal(states[:, 7], untouched[:, 7])


def test_tokens_past_the_ring_are_not_kept(sglang):
    """Sequences of other lengths, one of which is longer than the ring."""
    lengths, ring = [RING + 2, 1, 0, 4], rings()
    x, state = gdn_operands(sum(lengths), kda=True), randn(SLOTS, HV, V, K, seed=3)
    one = {n: t[0] for n, t in ring.items()}
    out = verified(sglang, state, one, x, lengths, is_kda=True)
    assert torch.equal(one["rawk"][5].transpose(0, 1), x["k"][:RING]) and torch.equal(one["rawv"][2, :, :4].transpose(0, 1), x["v"][-4:])
    assert near(one["beta"][5].T, x["b"][:RING].double().sigmoid()) and torch.isfinite(out).all()
    for t in ring.values():
        assert t[0, [0, 1, 3, 4, 6, 7]].isnan().all() and t[1].isnan().all() and t[0, 2, :, 4:].isnan().all()


def test_a_gate_per_head_has_its_ring_too(sglang):
    ring, state = {n: t[0] for n, t in rings(kda=False).items()}, randn(SLOTS, HV, V, K, seed=3)
    x = gdn_operands(4 * DRAFTS)
    verified(sglang, state, ring, x, [DRAFTS] * 4)
    g = -x["A_log"].double().exp() * (x["a"] + x["dt_bias"]).double().exp().log1p()
    for b in (0, 2, 3):
        assert near(ring["g"][SLOT[b], :, :DRAFTS].T, g[b * DRAFTS : (b + 1) * DRAFTS])


@needs_emulator
@pytest.mark.parametrize("bound", KINDS)
def test_the_kernels_take_sglang_s_layout(sglang, bound, monkeypatch):
    states, ring = randn(LAYERS, SLOTS, HV, V, K, seed=3), rings()
    x, found = gdn_operands(4 * DRAFTS, kda=True), []
    track = {"mamba_track_indices": torch.tensor([7, 1, 4, -1]), "mamba_steps_to_track": torch.tensor([1, 0, 2, 0])}
    for emulated in (False, True):
        if emulated:
            run_as_emulated(monkeypatch)
        own, kept = states.clone(), {n: t.clone() for n, t in ring.items()}
        outs = [
            verified(sglang, own[i], {n: t[i] for n, t in kept.items()}, x, [DRAFTS] * 4, is_kda=True, lower_bound=bound)
            for i in range(LAYERS)
        ]
        commit(sglang, own, kept, torch.tensor([2, 1, 3, 0], dtype=I32), **track)
        found.append([own, *(t.nan_to_num(7.0) for t in kept.values()), *outs])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*found, strict=True))


@pytest.mark.refused
def test_other_slots_of_padding_are_sglang_s(sglang, caplog):
    states, ring = randn(LAYERS, SLOTS, HV, V, K), rings()
    given = (states, ring["rawv"], ring["rawk"], ring["g"], ring["beta"], SLOT, torch.ones(4, dtype=I32), RING, HK)
    function = sglang.commit_kda_replayssm_spec_all_layers
    assert function(*given, null_block_id=3) == function.__wrapped__(*given) and "null_block_id is 3" in caplog.text
