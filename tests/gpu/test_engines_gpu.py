"""vLLM's and SGLang's functions as their layers call them, on a card: eager, in CUDA graphs, and in graphs that nothing was warmed for.

`engine_stand_ins` replaces the engines: its functions have the published parameters, and only report that they ran.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, sglang_functions, vllm_functions  # noqa: F401
from engine_cases import FORMS, SHARED, load, operands, padded_with
from engine_stand_ins import answer
from test_compat_engines_steps import TABLE, draft_call
from test_ops import Loaded
from torch_conv import randn

from ssmgen.calls import fast_path
from ssmgen.compat.shared import noise
from ssmgen.errors import UnsupportedError
from ssmgen.launch import runtime

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
named = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.id)
# Prompts are not in graphs.
CAPTURED = [f for f in FORMS if f.name != "causal_conv1d_fn"]
captured = pytest.mark.parametrize("form", CAPTURED, ids=lambda f: f.id)


def function_of(request: pytest.FixtureRequest, form):
    return getattr(request.getfixturevalue(form.engine), form.name)


@named
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_within_the_families_bounds(request, form, mode):
    """Two calls at different addresses: the second call uses the first one's plan."""
    function = function_of(request, form)
    with mode():
        for seed in (0, 1):
            call = form.make(DEVICE, seed)
            want = form.expected(call)
            form.prepared(function, call)()
            torch.cuda.synchronize()
            form.check(call, want)


@captured
def test_a_graph_follows_its_inputs(request, form):
    """Captured after a warm call. Replays find other slots, other inputs and other states in the same tensors."""
    function = function_of(request, form)
    with torch.inference_mode():
        first = form.make(DEVICE)
        run = form.prepared(function, first)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for seed in (1, 2, 3):
            other = form.make(DEVICE, seed)
            want = form.expected(other)
            load(first, other)
            graph.replay()
            load(other, first)
            torch.cuda.synchronize()
            form.check(other, want)


@pytest.fixture
def nothing_is_loaded():
    """The state of a process that has made no call yet; kernels that graphs hold stay loaded."""
    runtime._forget_in_child()
    fast_path.forget()  # its rows hold the kernels that they launch
    gc.collect()  # graphs in cycles: CUDA lets none go during a capture


def warnings_of(caplog: pytest.LogCaptureFixture, form) -> list[str]:
    """About calls that ssmgen refuses; 16-bit states get another one."""
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == f"{form.engine}.ssmgen"]
    return [words for words in said if "'s own" in words]


@pytest.mark.refused
@pytest.mark.parametrize("form", [f for f in CAPTURED if "noisy" not in f.id], ids=lambda f: f.id)
def test_a_graph_that_nothing_was_warmed_for(request, form, nothing_is_loaded, caplog):
    """The engine's own function serves it. One warning says so and gives the remedy. The capture continues, and later ones use ours."""
    function = function_of(request, form)
    with torch.inference_mode():
        call = form.make(DEVICE)
        want, ticks = form.expected(call), torch.zeros(1, device=DEVICE)
        run = form.prepared(function, call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answers = [run(), run()]
            ticks += 1
        graph.replay()
        torch.cuda.synchronize()
        said = warnings_of(caplog, form)
        if form.name != "ssu_backend":  # which returns nothing
            where = function.__module__, function.__name__
            assert answers == [answer(*where)] * 2
        assert ticks.item() == 1 and not call.memory.untouched({})
        assert len(said) == 1 and "is not loaded, and a CUDA graph is being captured" in said[0]
        assert "Call ssmgen.warm(ssmgen." in said[0] and "a step of the same batch size before the capture" in said[0]
        assert f"{form.engine}'s own" in said[0]

        run()
        torch.cuda.synchronize()
        form.check(call, want)
        again = form.make(DEVICE, seed=1)
        want, run = form.expected(again), form.prepared(function, again)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        form.check(again, want)
        assert warnings_of(caplog, form) == said


@pytest.mark.parametrize("form", [f for f in CAPTURED if "noisy" in f.id], ids=lambda f: f.id)
def test_a_noisy_graph_that_nothing_was_warmed_for(request, form, nothing_is_loaded, caplog):
    """No kernel of the engine can take over on this GPU, so the capture fails, and the error names the step that mends it."""
    if noise.major(torch.device(DEVICE, 0)) >= noise.CVT_RS:
        pytest.skip("the engine's own kernel runs on this GPU")
    function = function_of(request, form)
    with torch.inference_mode():
        call = form.make(DEVICE)
        run = form.prepared(function, call)
        torch.cuda.synchronize()
        with pytest.raises(UnsupportedError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()
        torch.cuda.synchronize()
        reason, own = error.value.reasons
        assert (
            "is not loaded, and a CUDA graph is being captured" in reason and "a step of the same batch size before the capture" in reason
        )
        assert "compute capability 10.0" in own and not warnings_of(caplog, form) and not call.memory.untouched({})

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        again = form.make(DEVICE, seed=1)
        want = form.expected(again)
        load(call, again)
        graph.replay()
        load(again, call)
        torch.cuda.synchronize()
        form.check(again, want)


@pytest.mark.parametrize("form", SHARED, ids=lambda f: f.id)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_padded_rows_that_share_slot_0_change_nothing_of_others(request, form, graph):
    """SGLang fills a graph's batch up with rows of one slot that is kept free; they race there, and nowhere else."""
    function, results = function_of(request, form), []
    for slot in (-1, 0):
        call, padded, pool = padded_with(form, DEVICE, slot)
        assert padded.sum() > 1
        run = form.prepared(function, call)
        if graph:
            states = {n: b.clone() for n, (b, *_) in call.memory.buffers.items()}
            run()
            for n, (b, *_) in call.memory.buffers.items():
                b.copy_(states[n])
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                run()
            recorded.replay()
        else:
            run()
        torch.cuda.synchronize()
        out = operands(call)["out"]
        results.append(((out.flatten(0, 1) if out.shape[0] == 1 else out)[~padded].clone(), pool[1:].nan_to_num(7.0)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("form", [f for f in FORMS if "noisy" in f.id], ids=lambda f: f.id)
def test_each_replay_draws_its_own_noise(request, form):
    function = function_of(request, form)
    call = form.make(DEVICE)
    before = {n: b.clone() for n, (b, *_) in call.memory.buffers.items()}
    run = form.prepared(function, call)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    states = []
    for _ in range(2):
        for n, (b, *_) in call.memory.buffers.items():
            b.copy_(before[n])
        graph.replay()
        states.append(operands(call)["state"].nan_to_num(7.0))
    assert not torch.equal(*states)


def test_parameters_of_vllm_s_own_type(vllm):
    """Subclasses that see functions, of ordinary memory."""
    (form,) = [f for f in FORMS if f.id == "vllm-conv"]
    for seed in (0, 1):
        call = form.make(DEVICE, seed)
        want = form.expected(call)
        given = form.arguments(operands(call))
        given["bias"] = Loaded(given["bias"], requires_grad=False)
        with torch.no_grad():
            assert vllm.causal_conv1d_update(**given) is given["x"]
        torch.cuda.synchronize()
        form.check(call, want)


def test_stochastic_rounding_is_the_backend_s_setting(vllm):
    """The backend passes on its configuration's values."""
    (form,) = [f for f in FORMS if f.id == "vllm-m2-f16"]
    noisy = type(vllm.ssu_backend)(SimpleNamespace(enable_stochastic_rounding=True, stochastic_rounding_philox_rounds=7))
    states = []
    for backend in (vllm.ssu_backend, noisy, noisy):
        call = form.make(DEVICE)
        form.prepared(backend, call)()
        states.append(operands(call)["state"].nan_to_num(7.0))
    off = [(s.double() - states[0].double()).abs() for s in states]
    assert all(d.max() > 0 and (d <= 2.0**-10 * states[0].double().abs() + 2.0**-24).all() for d in off[1:])
    assert not torch.equal(states[1], states[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_drafts_with_their_norm(vllm, graph, dtype):
    """The results of the two references on the CPU, within roundings to the output's dtype before and after the norm."""
    shapes = {"q": (6, 2, 128), "k": (6, 2, 128), "v": (6, 4, 64), "a": (6, 4), "b": (6, 4), "A_log": (4,), "dt_bias": (4,)}
    x = {n: randn(*shape, seed=seed) for seed, (n, shape) in enumerate(shapes.items())}
    state = randn(int(TABLE.max()) + 2, 4, 64, 128, seed=9).to(dtype)
    call = draft_call(x, state)
    call = {n: t.to(dtype) if n in ("mixed_qkv", "output_gate") else t for n, t in call.items()}
    there = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    want, own = vllm.fused_gdn_decode_post_conv_mtp(**call), there["state"].clone()
    got = vllm.fused_gdn_decode_post_conv_mtp(**there)
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            got = vllm.fused_gdn_decode_post_conv_mtp(**there)
        there["state"].copy_(own)
        recorded.replay()
    torch.cuda.synchronize()
    eps = torch.finfo(dtype).eps
    for a, b in ((got, want), (there["state"], state)):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=0, atol=max(4 * eps, 1e-4) * float(b.double().abs().max()))
