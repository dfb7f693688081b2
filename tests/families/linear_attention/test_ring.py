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

    def __init__(self, name: str, state: torch.dtype, layout: str = "vk", beta_rows: bool = False, ready: bool = False, **more):
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
        self.more = {}
        if ready:
            self.ring = Ring(*self.ring[:2], *(None if t is None else t.float() for t in self.ring[2:]))
            self.more = {"ring_ready": True}
        self.options = NORM | {"state_indices": SLOT, "state_layout": layout} | more
        if name != "delta_rule":
            self.options |= {"A_log": torch.rand(HV), "dt_bias": torch.randn(HV, K) if per_channel else torch.randn(HV)}

    def verify(self, run, **more) -> Tensor:
        return run(self.function, self.state, **self.inputs, **self.options, update_state=False, ring=self.ring, **self.more, **more)

    def commit(self, run, *args, **more) -> Tensor:
        """The commit of the step's ring. One with ready gates needs no weights."""
        weights = ("A_log", "dt_bias", "beta_sigmoid", "lower_bound") if self.more else ()
        given = {n: value for n, value in self.options.items() if n not in weights}
        return run(getattr(ssmgen, f"{self.function.__name__}_commit"), *args, **given | more)


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


READY = [
    pytest.param("gated_delta_rule", F32, {}, id="gdn-f32"),
    pytest.param("gated_delta_rule", BF16, {}, id="gdn-bf16"),
    pytest.param("gated_delta_rule", F32, {"layout": "kv", "beta_rows": True}, id="gdn-kv-beta-rows"),
    pytest.param("kda", F32, {}, id="kda-f32"),
    pytest.param("kda", BF16, {"lower_bound": -5.0}, id="kda-bounded"),
]


@costly(3)
@runs
@pytest.mark.parametrize(("name", "state", "how"), READY)
def test_a_ready_ring_holds_gates_that_a_commit_takes_as_they_are(name, state, how, run):
    step = Step(name, state, ready=True, **how)
    out, x = step.verify(run), step.inputs
    for kept, given in ((step.ring.k, x["k"]), (step.ring.v, x["v"])):
        assert torch.equal(kept[4, :TOKENS], given[0]) and torch.equal(kept[2, :TOKENS], given[2])
    raw, bound = x["g"].double(), how.get("lower_bound")
    A = step.options["A_log"].double().exp().view(HV, *[1] * (raw.dim() - 3))
    raw = raw + step.options["dt_bias"].double()
    log = -A * raw.exp().log1p() if bound is None else bound * (A * raw).sigmoid()
    for kept, want in ((step.ring.g, log), (step.ring.beta, x["beta"].double().sigmoid())):
        for b, slot in ((0, 4), (2, 2)):
            assert torch.allclose(kept[slot, :TOKENS].double(), want[b], rtol=1e-5, atol=1e-6)
    others = torch.ones(SLOTS, TOKENS + 1, dtype=torch.bool)
    others[[4, 2], :TOKENS] = False
    assert all((t[others] == 7).all() for t in step.ring)
    want = step.state.clone()
    for b, count in ((0, 3), (2, TOKENS)):
        inputs = {n: t[b : b + 1, :count].contiguous() for n, t in x.items()}
        run(step.function, want, **inputs, **step.options | {"state_indices": SLOT[b : b + 1]})
    step.commit(run, step.state, step.ring, torch.tensor([3, 2, TOKENS]))
    assert torch.equal(step.state, want), "bit for bit"
    assert torch.isfinite(out).all()


@costly(2)
@runs
@pytest.mark.parametrize("ready", [False, True], ids=["raw", "ready"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_packed_sequences_fill_rings_that_may_be_shorter(name, ready, run):
    step = Step(name, F32, ready=ready)
    whole = step.verify(run)
    step.options["cu_seqlens"] = torch.tensor([0, 3, 3, 3 + TOKENS], dtype=torch.int32)
    full, step.ring = step.ring, Ring(*(torch.full_like(t[:, : TOKENS - 1], 7) for t in step.ring))
    packed = {n: torch.cat([t[0, :3], t[2]])[None].contiguous() for n, t in step.inputs.items()}
    step.inputs = packed
    out = step.verify(run)
    assert torch.equal(out[0, :3], whole[0, :3]) and torch.equal(out[0, 3:], whole[2])
    for kept, want in zip(step.ring, full, strict=True):
        assert torch.equal(kept[4, :3], want[4, :3]) and torch.equal(kept[2], want[2, : TOKENS - 1])
        assert (kept[4, 3:] == 7).all() and (kept[[0, 1, 3, 5, 6]] == 7).all()


@costly(2)
@runs
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_a_commit_may_write_other_slots(name, run):
    step = Step(name, F32, ready=True)
    step.verify(run)
    counts, target = torch.tensor([2, 1, 4], dtype=torch.int32), torch.tensor([6, 0, -1], dtype=torch.int32)
    before, want = step.state.clone(), step.state.clone()
    step.commit(run, want, step.ring, counts)
    step.commit(run, step.state, step.ring, counts, dst_state_indices=target)
    assert torch.equal(step.state[6], want[4]) and torch.equal(step.state[:6], before[:6])
    layers = [torch.stack([t, t]) for t in (step.state, *step.ring)]
    layers[0].copy_(before)
    step.commit(run, layers[0], Ring(*layers[1:]), counts, dst_state_indices=target)
    assert torch.equal(layers[0][0], step.state) and torch.equal(layers[0][1], step.state)


def test_what_is_wrong_with_ready_rings_and_targets():
    step = Step("kda", F32)
    with pytest.raises(ArgumentError, match="with ring_ready=True; expected torch"):
        step.verify(RUN["reference"], ring_ready=True)
    with pytest.raises(ArgumentError, match="ring_ready is True without a ring; expected both"):
        step.function(step.state, **step.inputs, **step.options, ring_ready=True)
    step = Step("kda", F32, ready=True)
    with pytest.raises(ArgumentError, match=r"dst_state_indices is torch.int64; expected one dtype for both"):
        step.commit(RUN["reference"], step.state, step.ring, torch.tensor([1, 1, 1]), dst_state_indices=torch.tensor([0, 1, 3]))
    step.options.pop("state_indices")
    with pytest.raises(ArgumentError, match="dst_state_indices is given without state_indices"):
        step.commit(RUN["reference"], step.state, step.ring, torch.tensor([1, 1, 1]), dst_state_indices=torch.tensor([0, 1, 3]))


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
