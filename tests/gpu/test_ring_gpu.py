"""Rings and commits on a card: speculative steps in a CUDA graph, against the update by the accepted tokens."""

from __future__ import annotations

import pytest
import torch
from test_ring import BATCH, BF16, CASES, F32, SLOT, TOKENS, Step

import ssmgen
from ssmgen import Ring

pytestmark = pytest.mark.gpu


def on_card(name: str, state: torch.dtype, **how) -> Step:
    step = Step(name, state, **how)
    step.state, step.inputs = step.state.cuda(), {n: t.cuda() for n, t in step.inputs.items()}
    step.ring = Ring(*(None if t is None else t.cuda() for t in step.ring))
    step.options = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in step.options.items()}
    return step


def run(function, *args, **kwargs) -> torch.Tensor:
    return function(*args, **kwargs)


@pytest.mark.parametrize(("name", "state", "how"), CASES)
def test_a_step_and_its_commit(name, state, how):
    step, host = on_card(name, state, **how), Step(name, state, **how)
    before, out = step.state.clone(), step.verify(run)
    assert torch.equal(step.state, before) and torch.allclose(out.float().cpu(), host.verify(run).float(), rtol=2e-2, atol=2e-2)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(step.ring, host.ring, strict=True) if a is not None)
    want = before.clone()
    for b, count in ((0, 3), (2, TOKENS)):
        inputs = {n: t[b : b + 1, :count].contiguous() for n, t in step.inputs.items()}
        step.function(want, **inputs, **step.options | {"state_indices": SLOT[b : b + 1].cuda()})
    commit = ssmgen.kda_commit if name == "kda" else ssmgen.gated_delta_rule_commit
    commit(step.state, step.ring, torch.tensor([3, 2, TOKENS], device="cuda"), **step.options)
    assert torch.equal(step.state, want), "bit for bit"


@pytest.mark.parametrize("state", [F32, BF16], ids=["f32", "bf16"])
def test_steps_in_a_graph_with_counts_that_change(state):
    """Verify, then commit: replayed with other counts of accepted tokens, as a serving engine does."""
    step, eager = on_card("gated_delta_rule", state), on_card("gated_delta_rule", state)
    accepted = torch.zeros(BATCH, dtype=torch.int32, device="cuda")

    def decode(s: Step) -> torch.Tensor:
        out = s.verify(run)
        ssmgen.gated_delta_rule_commit(s.state, s.ring, accepted, **s.options)
        return out

    decode(step)  # loads both kernels; nothing was accepted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(step)
    for counts in ([1, 2, 3], [TOKENS, 0, 1], [0, 5, TOKENS], [2, 2, 2]):
        accepted.copy_(torch.tensor(counts))
        graph.replay()
        assert torch.equal(captured, decode(eager)) and torch.equal(step.state, eager.state)


def test_layers_at_once_are_each_alone():
    step, layers = on_card("gated_delta_rule", BF16), 48
    step.verify(run)
    states = torch.stack([step.state * (0.5 + n / layers) for n in range(layers)])
    ring = Ring(*(t.expand(layers, *t.shape).contiguous() for t in step.ring))
    weights = {n: torch.stack([step.options[n] + n_ / 50 for n_ in range(layers)]) for n in ("A_log", "dt_bias")}
    want, accepted = states.clone(), torch.tensor([4, 1, 2], device="cuda")
    for layer in range(layers):
        own = {n: t[layer] for n, t in weights.items()}
        ssmgen.gated_delta_rule_commit(want[layer], Ring(*(t[layer] for t in ring)), accepted, **step.options | own)
    ssmgen.gated_delta_rule_commit(states, ring, accepted, **step.options | weights)
    assert torch.equal(states, want) and not torch.equal(states[0], states[1])
