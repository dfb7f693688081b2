"""Rings: the raw inputs that a speculative step keeps, and the commit that replays the accepted ones."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import emulate, needs_emulator
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen import Ring
from ssmgen.errors import ArgumentError
from ssmgen.spec.kernel import DType

F32, BF16 = torch.float32, torch.bfloat16
BATCH, SLOTS, TOKENS, HK, HV, K, V = 3, 7, 5, 2, 4, 64, 96
SLOT = torch.tensor([4, -1, 2], dtype=torch.int32)
NORM = {"use_qk_l2norm": True, "beta_sigmoid": True}


def emulated(function, *args, **kwargs) -> Tensor:
    """The function's result, from its kernel's text."""
    return emulate(function.build(*args, **kwargs))


RUN = {
    "reference": lambda function, *args, **kwargs: function(*args, **kwargs),
    "emulator": pytest.param(emulated, marks=needs_emulator, id="emulator"),
}
runs = pytest.mark.parametrize("run", [pytest.param(RUN["reference"], id="reference"), RUN["emulator"]])


class Step:
    """A speculative step of one operator, and its ring with room for one token more."""

    def __init__(self, name: str, state: torch.dtype, layout: str = "vk", beta_rows: bool = False):
        torch.manual_seed(1)
        self.function, per_channel = getattr(ssmgen, name), name == "kda"
        self.state = torch.randn(SLOTS, HV, *((V, K) if layout == "vk" else (K, V))).to(state)
        lead = (BATCH, TOKENS)
        q, k, v = (torch.randn(*lead, h, d).to(BF16) for h, d in ((HK, K), (HK, K), (HV, V)))
        gate = torch.randn(*lead, HV, K) if per_channel else torch.randn(*lead, HV)
        beta = torch.randn(*lead, HV, V) if beta_rows else torch.randn(*lead, HV)
        self.inputs = {"q": q, "k": k, "v": v} | ({} if name == "delta_rule" else {"g": gate.to(BF16)}) | {"beta": beta.to(BF16)}
        kept = [self.inputs.get(n) for n in ("k", "v", "g", "beta")]
        self.ring = Ring(*(None if t is None else torch.full((SLOTS, TOKENS + 1, *t.shape[2:]), 7.0, dtype=t.dtype) for t in kept))
        self.options = NORM | {"state_indices": SLOT, "state_layout": layout}
        if name != "delta_rule":
            self.options |= {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV, K) if per_channel else torch.randn(HV)}

    def verify(self, run, **more) -> Tensor:
        return run(self.function, self.state, **self.inputs, **self.options, update_state=False, ring=self.ring, **more)


CASES = [
    pytest.param("gated_delta_rule", F32, {}, id="gdn-f32"),
    pytest.param("gated_delta_rule", BF16, {}, id="gdn-bf16"),
    pytest.param("gated_delta_rule", F32, {"layout": "kv"}, id="gdn-kv"),
    pytest.param("gated_delta_rule", F32, {"beta_rows": True}, id="gdn-beta-rows"),
    pytest.param("kda", BF16, {}, id="kda-bf16"),
    pytest.param("delta_rule", BF16, {}, id="delta-bf16"),
]


@costly(3)
@runs
@pytest.mark.parametrize(("name", "state", "how"), CASES)
def test_a_step_keeps_its_inputs_and_leaves_the_state(name, state, how, run):
    step = Step(name, state, **how)
    before = step.state.clone()
    out = step.verify(run, out=torch.full((BATCH, TOKENS, HV, V), 9.0))
    assert torch.equal(step.state, before) and (out[1] == 0).all()
    for ring, given in zip(step.ring, (step.inputs.get(n) for n in ("k", "v", "g", "beta")), strict=True):
        if given is None:
            continue
        assert torch.equal(ring[4, :TOKENS], given[0]) and torch.equal(ring[2, :TOKENS], given[2])
        others = torch.ones(SLOTS, TOKENS + 1, dtype=torch.bool)
        others[[4, 2], :TOKENS] = False
        assert (ring[others] == 7).all(), "only the step's slots and tokens are written"
    plain = step.function(step.state.clone(), **step.inputs, **step.options, out=torch.empty(BATCH, TOKENS, HV, V))
    assert torch.allclose(out, plain, rtol=1e-5, atol=1e-5)


@costly(3)
@runs
@pytest.mark.parametrize(("name", "state", "how"), [c for c in CASES if c.id != "delta-bf16"])
def test_a_commit_is_the_update_by_the_accepted_tokens(name, state, how, run):
    step = Step(name, state, **how)
    step.verify(run)
    want = step.state.clone()
    for b, count in ((0, 3), (2, TOKENS)):
        inputs = {n: t[b : b + 1, :count].contiguous() for n, t in step.inputs.items()}
        run(step.function, want, **inputs, **step.options | {"state_indices": SLOT[b : b + 1]})
    result = run(getattr(ssmgen, f"{name}_commit"), step.state, step.ring, torch.tensor([3, 2, TOKENS]), **step.options)
    assert result is step.state and torch.equal(step.state, want), "bit for bit"


@runs
@pytest.mark.parametrize("counts", [[0, 1, 0], [TOKENS + 2, 1, -1], [2**31 - 1, -1, -(2**31)]], ids=["none", "out-of-range", "extreme"])
def test_counts_that_are_none_or_none_at_all_change_nothing(counts, run):
    step = Step("gated_delta_rule", F32)
    before = step.state.clone()
    run(ssmgen.gated_delta_rule_commit, step.state, step.ring, torch.tensor(counts, dtype=torch.int32), **step.options)
    assert torch.equal(step.state, before)


@runs
def test_all_layers_at_once_are_each_alone(run):
    step = Step("gated_delta_rule", BF16)
    step.verify(run)
    states = torch.stack([step.state, step.state * 0.5])
    ring = Ring(*(torch.stack([t, t * 0.5]) for t in step.ring))
    weights = {n: torch.stack([step.options[n], step.options[n] + 0.3]) for n in ("A_log", "dt_bias")}
    want, accepted = states.clone(), torch.tensor([4, 1, 2])
    for layer in range(2):
        alone = Ring(*(t[layer] for t in ring))
        own = {n: t[layer] for n, t in weights.items()}
        run(ssmgen.gated_delta_rule_commit, want[layer], alone, accepted, **step.options | own)
    run(ssmgen.gated_delta_rule_commit, states, ring, accepted, **step.options | weights)
    assert torch.equal(states, want)


def test_short_states_take_the_tensor_cores_and_f32_does_not():
    for state, frozen in ((BF16, True), (F32, False)):
        step = Step("gated_delta_rule", state)
        found = ssmgen.explain(step.function, step.state, **step.inputs, **step.options, update_state=False, ring=step.ring, arch="sm_90a")
        assert found.chosen.spec.frozen is frozen and found.chosen.spec.state is (DType.BF16 if frozen else DType.F32)


WRONG = {
    "no slots": ({"state_indices": None}, lambda r: r, "ring is given without state_indices; expected both"),
    "short": ({}, lambda r: r._replace(k=r.k[:, :3]), "ring.k is [7, 3, 2, 64]; expected [slots, tokens or more, …] = [7, 5, 2, 64]"),
    "other dtype": ({}, lambda r: r._replace(v=r.v.float()), "ring.v is torch.float32; expected torch.bfloat16, the dtype of v"),
    "incomplete": ({}, lambda r: r._replace(g=None), "; expected a tensor for each operand of the call that it keeps"),
    "strided": ({}, lambda r: r._replace(k=r.k.repeat(1, 1, 1, 2)[..., ::2]), "ring.k has strides"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_rings(what):
    change, ring, words = WRONG[what]
    step = Step("gated_delta_rule", BF16)
    step.options |= change
    step.ring = ring(step.ring)
    with pytest.raises(ArgumentError) as e:
        step.verify(RUN["reference"])
    assert words in str(e.value)


def test_a_wrong_commit_says_everything():
    step = Step("gated_delta_rule", BF16)
    ring = step.ring._replace(v=step.ring.v[:, :2], beta=None)
    with pytest.raises(ArgumentError) as e:
        ssmgen.gated_delta_rule_commit(step.state, ring, torch.tensor([1, 2]), **step.options)
    for words in ("beta is a NoneType", "; expected a tensor"):
        assert words in str(e.value)
    with pytest.raises(ArgumentError) as e:
        ssmgen.gated_delta_rule_commit(step.state, ring._replace(beta=step.ring.beta), torch.tensor([1, 2]), **step.options)
    for words in ("v is [1, 7, 2, 4, 96]; expected [layers, slots, tokens, heads, V]", "state_indices is [3]; expected [batch]"):
        assert words in str(e.value)
