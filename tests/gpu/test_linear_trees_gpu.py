"""Draft trees of the delta rules on a card: within rounding of float64, laws, variants, the emulator."""

from __future__ import annotations

import random

import pytest
import torch
from la_cases import make_call
from la_trees import DRAWS, LAWS, Draw, cases

from ssmgen.families.linear_attention import planning as op
from ssmgen.families.linear_attention.spec import space
from ssmgen.launch import runtime

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def run(function, **kwargs) -> None:
    function(**kwargs)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda d: f"{d[0]}-{d[1]}-{d[2]}".replace("torch.", ""))
def test_laws(law, draw):
    rule, state, layout = draw
    law(run, Draw(rule, DEVICE, state, layout, K=128, V=128, batch=9))


@pytest.mark.parametrize("name", ["gdn-bf16", "kda-f32-kv", "ragged-few"])
def test_variants_are_bit_equal(name):
    case, device = next(c for c in cases() if c.id == name), torch.cuda.current_device()
    arch = runtime.device_arch(device)
    specs = list(space(make_call(case, DEVICE).problem, arch))
    results = []
    for spec in random.Random(0).sample(specs, min(6, len(specs))):
        call = make_call(case, DEVICE)
        launch = runtime.Launch(
            runtime.load(spec, device, case.rule), device, op.grid_of(spec, call.views),
            op.kernel_values(spec, call.views, call.built.options),
        )  # fmt: skip
        launch.at([t.data_ptr() for t in call.operands.values()])()
        torch.cuda.synchronize()
        results.append([call.kwargs[n].view(torch.uint8).clone() for n in ("out", "state", "intermediate_states")])
        assert all(map(torch.equal, results[-1], results[0])), spec


def test_a_captured_call_reads_other_parents_when_it_is_replayed():
    draw = Draw("gated_delta_rule", DEVICE, torch.bfloat16, K=128, V=128)
    T, batch = draw.tokens["v"].shape[1], draw.state.shape[0]
    parents = torch.full((batch, T), -1, dtype=torch.int32, device=DEVICE)
    kept = draw.state.new_zeros(batch, T, *draw.state.shape[1:])
    out = torch.empty_like(draw.tokens["v"])

    def call() -> None:
        draw.function(draw.state, **draw.tokens, **draw.weights, intermediate_states=kept, parents=parents, update_state=False, out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    parents.copy_(torch.randint(0, T, (batch, T)))
    graph.replay()
    got = out.clone()
    call()
    assert torch.equal(got, out)
