"""`python -m tools.demo`: its models, its step and its measurements, on CPU tensors."""

from __future__ import annotations

import contextlib
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from selection import costly, kept

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from demo_cases import FEW, narrow, narrow_delta_rule
from demo_cases import on_cpu as on_cpu
from hf_cases import MODELS, known, modeling, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from ssmgen.bench.progress import Watch
from ssmgen.compat import hf
from ssmgen.compat.hf import found as hf_found
from tools.demo import DemoError, floor, measure, prompts, run
from tools.demo.decode import PROMPT, Greedy, prompt
from tools.demo.measure import ACCELERATED, FUSED, FUSED_GRAPH, GRAPH, PATCHED, PLAIN, Launches, Options, Way
from tools.demo.presets import OTHERS, SHARED, Preset, chosen, presets

HERE = [preset.name for preset in chosen(())]


# The least time of a step.


def test_the_bytes_of_a_step():
    """A linear-attention model with experts: by hand from its parameters and its cache."""
    model = tiny("qwen3_5_moe", dtype=torch.bfloat16)
    greedy = Greedy(model, prompt(2, model.config.vocab_size, "cpu"))
    experts = {name: weight for name, weight in model.named_parameters() if ".experts." in name}
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    whole = sum(weight.nbytes for weight in model.parameters()) - (0 if tied else table.nbytes)
    count, chosen = model.config.num_experts, model.config.num_experts_per_tok
    assert experts and 0 < chosen < count
    want = whole - sum(weight.nbytes for weight in experts.values()) * (count - chosen) / count
    assert floor.weights(model) == pytest.approx(want, abs=1)
    recurrent = [state for layer in greedy.cache.layers for state in floor.states(layer)]
    assert len(recurrent) == 2 * sum(kind == "linear_attention" for kind in model.config.layer_types)
    assert floor.moved(model, greedy.cache) == floor.weights(model) + 2 * sum(state.nbytes for state in recurrent)
    again = Greedy(model, prompt(4, model.config.vocab_size, "cpu"))
    assert floor.moved(model, again.cache) - floor.weights(model) == 2 * (floor.moved(model, greedy.cache) - floor.weights(model))


# The models.


def meta(preset: Preset, layers: int) -> torch.nn.Module:
    config = preset.config(layers)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", HERE)
def test_a_preset_makes_a_model_with_every_kind_of_layer_it_names(name):
    preset = presets()[name]
    for layers in (8, 2):
        model = meta(preset, layers)
        served, total = preset.served(layers)
        assert model.config.num_hidden_layers == total == max(layers, len(preset.pattern))
        convolutions = sum(isinstance(layer, torch.nn.Conv1d) for layer in model.modules())
        assert convolutions == served > 0 and (total > served) == any(kind in OTHERS for kind in preset.pattern)
        assert model.config.vocab_size == SHARED["vocab_size"] and model.get_output_embeddings().weight.shape[0] == SHARED["vocab_size"]
        assert name in hf_found.kinds(model)


def test_presets_are_of_families_that_can_be_patched():
    assert presets().keys() <= MODELS.keys() and len(HERE) >= 15
    assert all(preset.source and preset.like for preset in presets().values())


# state [heads, headdim, d_state] or [channels, d_state], channels of the convolution
SHAPES = {
    "mamba": ((5120, 16), 5120),
    "falcon_mamba": ((8192, 16), 8192),
    "jamba": ((8192, 16), 8192),
    "mamba2": ((128, 64, 128), 10240),
    "bamba": ((128, 64, 128), 8448),
    "nemotron_h": ((128, 64, 128), 10240),
    "zamba2": ((80, 64, 64), 5248),
    "granitemoehybrid": ((48, 64, 128), 3328),
    "falcon_h1": ((24, 128, 256), 3584),
    "qwen3_next": ((32, 128, 128), 8192),
    "qwen3_5": ((32, 128, 128), 8192),
    "qwen3_5_moe": ((32, 128, 128), 8192),
    "olmo_hybrid": ((30, 96, 192), None),  # three convolutions
    "kimi_linear": ((32, 128, 128), 12288),
    "lfm2": (None, 2048),
    "lfm2_moe": (None, 2048),
}


@pytest.mark.parametrize("name", [name for name in SHAPES if name in HERE])
def test_a_presets_state_is_as_wide_as_its_model(name):
    """The cache after a prompt shows it, which needs no memory on the meta device."""
    state, channels = SHAPES[name]
    layer = Greedy(meta(presets()[name], 2), prompt(2, SHARED["vocab_size"], "meta")).cache.layers[0]
    if state is not None:
        assert tuple(layer.recurrent_states[0].shape) == (2, *state)
    if channels is not None:
        assert layer.conv_states[0].shape[:2] == (2, channels)


def test_a_family_that_is_not_there_is_refused():
    with pytest.raises(DemoError, match=r"no family is named zebra; known are mamba, .*lfm2"):
        chosen(("mamba2", "zebra"))
    assert [preset.name for preset in chosen(("mamba2", "mamba", "mamba2"))] == ["mamba2", "mamba"]
    unknown = Preset(name="zebra", like="none", kind="zebra", source="these tests", sizes={})
    with pytest.raises(DemoError, match="this transformers has no zebra"):
        unknown.config(2)


# The step.


@costly(4)
@pytest.mark.parametrize("name", HERE)
def test_a_step_gives_what_generate_does_with_either_cache_patched_or_not(name):
    model = tiny(name)
    model.generation_config.eos_token_id = None  # which generate() would keep from being chosen
    want = measure.generated(model, 2, 6)
    ids = prompt(2, model.config.vocab_size, "cpu")
    assert torch.equal(want[:, :1], Greedy(model, ids).token)
    assert torch.equal(want[:, 1:], Greedy(model, ids).tokens(5))
    with measure.served(model):
        assert torch.equal(want[:, 1:], Greedy(model, ids).tokens(5))
        assert torch.equal(want[:, 1:], Greedy(model, ids, steps=5).tokens(5))


@costly(3)
@pytest.mark.parametrize("name", HERE)
def test_a_step_on_a_static_cache_can_be_captured(name):
    """Runs on the meta device: no tensor's contents are read, and no data comes from the host."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Stays(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            devices = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
            assert devices <= {"meta"}, function
            return out

    step = Greedy(tiny(name).bfloat16().to("meta"), prompt(2, 64, "meta"), steps=4)
    with Stays():
        step()


def test_a_static_cache_has_room_for_the_steps_and_no_more():
    model = tiny("qwen3_5")
    step = Greedy(model, prompt(1, 64, "cpu"), steps=2)
    assert step.cache.get_max_length() == PROMPT + 2
    step.tokens(2)
    with pytest.raises(IndexError):
        step()


def test_what_is_left_to_transformers_is_an_error():
    model = tiny("mamba2", hidden_act="gelu")
    ids = prompt(1, 64, "cpu")
    with pytest.warns(RuntimeWarning), pytest.raises(DemoError, match=r"mamba2\.causal_conv1d_fn \(3 calls\)"), measure.served(model):
        Greedy(model, ids)
    with pytest.raises(DemoError, match="no layer called"), measure.served(model):
        pass


@pytest.mark.parametrize(("dtype", "may"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_scans_of_f32_prompts_on_a_card_may_be_left_to_transformers(dtype, may):
    with FakeTensorMode():
        weight = torch.empty(1, dtype=dtype, device="cuda")
    model = SimpleNamespace(parameters=lambda: iter([weight]))
    scans = ("mamba2.mamba2_chunk_scan", "olmo_hybrid.torch_chunk_gated_delta_rule", "kimi_linear.chunk_kimi_delta_attention")
    for label in scans:
        assert measure._unscanned(label, model) == may
    assert not measure._unscanned("olmo_hybrid.torch_recurrent_gated_delta_rule", model)


def test_tokens_are_compared_one_by_one(monkeypatch):
    """Both one sequence and two are compared, patched and fused."""
    assert measure.same_tokens(narrow(), 4, "cpu") == (24, 24)
    zeros, others = torch.zeros(2, 4), torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0]])
    answers, asked = iter([zeros[:1], zeros[:1], zeros[:1], zeros, zeros, others]), []
    monkeypatch.setattr(measure, "generated", lambda *_: next(answers))
    monkeypatch.setattr(measure, "served", lambda model, fuse: asked.append(fuse) or contextlib.nullcontext())
    assert measure.same_tokens(narrow(), 4, "cpu") == (22, 24)
    assert asked == [False, True] * 2


def test_a_family_without_fused_layers_is_compared_patched_alone(monkeypatch):
    monkeypatch.setattr(hf, "fusible", lambda model: False)
    assert measure.same_tokens(narrow(), 4, "cpu") == (12, 12)


def test_ways_take_turns_and_are_synchronised_around_each_loop(monkeypatch):
    log, clock = [], iter(range(1000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))

    @contextlib.contextmanager
    def within():
        log.append("(")
        yield
        log.append(")")

    ways = {"a": Way(lambda: log.append("a")), "b": Way(lambda: log.append("b"), within)}
    assert measure.interleaved_ms(ways, 2, 2, lambda: log.append("|")) == {"a": 500.0, "b": 500.0}
    assert "".join(log) == "|aa|(|bb|)(|bb|)|aa|"


def test_kernels_are_what_runs_on_the_device_without_copies():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [("ssu", cuda), ("aten::mm", cpu), ("Memcpy HtoD (Pageable -> Device)", cuda), ("Memset (Device)", cuda), ("gemm", cuda)]
    assert measure.kernel_names([SimpleNamespace(name=name, device_type=device) for name, device in events]) == ["ssu", "gemm"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_no_kernel_in_a_profile_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(DemoError, match="CUPTI"):
        measure.kernels(lambda: torch.ones(2).sum())


# A run whose parts that need a device are replaced.


def test_a_family_is_measured_at_each_batch_size(on_cpu):
    rows, failed = run.family(narrow(), (1, 2), FEW, "cpu")
    assert not failed and [row.batch for row in rows] == [1, 2]
    for row in rows:
        assert row.kernels == dict.fromkeys((PLAIN, PATCHED, FUSED), 5) and row.ms.keys() == {*row.kernels, ACCELERATED}
        assert min(row.ms[way] for way in row.kernels) > 0 and row.speedup(ACCELERATED) == row.ms[PLAIN] / row.ms[ACCELERATED]
        assert (row.same, row.tokens, row.served, row.layers) == (12, 12, 2, 2)
        assert row.notes == dict.fromkeys((f"{GRAPH} ms", f"{FUSED_GRAPH} ms"), "RuntimeError: no stream to capture")
        assert row.speedup(GRAPH) is row.speedup(FUSED_GRAPH) is None
        assert row.speedup(PATCHED) == row.ms[PLAIN] / row.ms[PATCHED]


def test_accelerate_is_timed_by_token_and_leaves_the_model_as_it_was(monkeypatch):
    """The time of three more tokens than one, by a clock of one second per call of the model."""
    model, clock = narrow().build(2, torch.float32, "cpu"), SimpleNamespace(now=0.0)
    model.generation_config.eos_token_id = [*range(1024)]  # each would end it
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    ids, forward = prompt(2, 1024, "cpu"), model.forward

    @wraps(forward)
    def timed(**inputs):
        clock.now += 1.0
        return forward(**inputs)

    model.forward = timed
    assert measure.accelerated_ms(model, ids, Options(tokens=3, rounds=1), lambda: None) == 1000.0
    assert clock.now >= 4 + 5 and len(model.generation_config.eos_token_id) == 1024 and not hf._active


@pytest.mark.parametrize(
    "preset", kept([narrow(), narrow_delta_rule()], lambda preset: preset.name == "mamba2"), ids=lambda preset: preset.name
)
def test_prompts_are_measured_patched_and_not(on_cpu, preset):
    rows, failed = run.family(preset, (1, 2), Options(layers=2, rounds=2, prompts=(3, 70)), "cpu")
    assert not failed and [(row.batch, row.length) for row in rows] == [(1, 3), (1, 70), (2, 3), (2, 70)]
    for row in rows:
        assert row.ms.keys() == {PLAIN, PATCHED, FUSED} and min(row.ms.values()) > 0
        assert all(row.speedup(way) == row.ms[PLAIN] / row.ms[way] for way in (PATCHED, FUSED))
        assert row.kernels == dict.fromkeys(row.ms, 5) and row.memory == dict.fromkeys(row.ms, 7) and not row.notes
        assert row.without > 0 and not row.by_kernel
        assert row.apart.keys() == {PATCHED, FUSED} and all(0 <= apart < 0.1 for apart in row.apart.values())
    assert "a prompt of 70: ms to the first token transformers " in run.line(rows[1])


@pytest.mark.matrix
def test_kernels_of_prompts_are_listed_where_that_is_asked_for(on_cpu):
    options = Options(layers=2, rounds=1, prompts=(3,), by_kernel=True)
    rows, failed = run.family(narrow(), (1,), options, "cpu")
    assert not failed and rows[0].by_kernel == dict.fromkeys((PATCHED, FUSED), {"gemm": Launches(2, 3.0)})


def test_kernels_are_summed_by_name_and_the_longest_come_first():
    found = measure.summed([("norm", 2.0), ("gemm", 3.0), ("norm", 4.0)])
    assert list(found.items()) == [("norm", Launches(2, 6.0)), ("gemm", Launches(1, 3.0))]


def test_recurrent_layers_are_bypassed_and_come_back():
    model = tiny("qwen3_5")
    layers = [layer for layer in model.modules() if type(layer).__name__ == "Qwen3_5GatedDeltaNet"]
    ids = prompt(2, 64, "cpu", 5)
    with torch.no_grad():
        want = model(ids).logits
        with prompts.bypassed(model):
            x = torch.randn(2, 5, 32)
            assert len(layers) == 2 and all(layer(hidden_states=x) is x for layer in layers)
            assert not torch.equal(model(ids).logits, want)
        assert torch.equal(model(ids).logits, want)


@costly(4)
@pytest.mark.parametrize("name", HERE)
def test_the_rest_of_every_model_can_be_timed_without_its_recurrent_layers(name):
    model, found = tiny(name), {"notes": {}}
    assert prompts._without(model, lambda: Greedy(model, prompt(2, 64, "cpu")), found) is not None and not found["notes"]


@costly(1)
@pytest.mark.parametrize(("fits", "found"), [(4, "of 5 tokens: "), (5, "")])
def test_prompts_that_transformers_has_no_memory_for(on_cpu, monkeypatch, fits, found):
    """Chunks have the model's own length. The patched model is measured all the same, also if a part of the prompt fits."""
    monkeypatch.setattr(prompts, "FEWEST", 1)
    own = modeling("mamba2").mamba2_chunk_scan

    def no_memory(x, *args, **kwargs):
        assert kwargs["chunk_size"] == 256
        if x.shape[1] > fits:
            raise torch.OutOfMemoryError("too much\nof it")
        return own(x, *args, **kwargs)

    monkeypatch.setattr(modeling("mamba2"), "mamba2_chunk_scan", no_memory)
    monkeypatch.setattr(no_memory, "__wrapped__", own, raising=False)
    rows, failed = run.family(narrow(), (1,), Options(layers=2, rounds=1, prompts=(40,)), "cpu")
    assert not failed and rows[0].ms.keys() == rows[0].memory.keys() == {PATCHED, FUSED}
    assert not rows[0].apart and rows[0].speedup(PATCHED) is rows[0].speedup(FUSED) is None
    reason = f"{found}OutOfMemoryError: too much"
    assert rows[0].notes == dict.fromkeys((f"{PLAIN} {unit}" for unit in ("ms", "kernels", "memory")), reason)


@costly(1)
@pytest.mark.parametrize(
    ("free", "taken", "reason"),
    [
        (55, 0.3, "it would need 56 GiB in addition to the weights, and 55 are free"),
        (56, 0.3, ""),
        (56, 0.5, "it would take 4 s"),
    ],
)
def test_passes_that_would_be_too_large_or_too_long_are_not_made(on_cpu, monkeypatch, free, taken, reason):
    """An eighth of the prompt tells."""
    seen = []
    monkeypatch.setattr(prompts, "FEWEST", 1)
    monkeypatch.setattr(prompts, "peak_bytes", lambda step: step() and 7 << 30)
    monkeypatch.setattr(prompts, "free_bytes", lambda: free << 30)
    monkeypatch.setattr(prompts, "seconds", lambda step: taken)
    monkeypatch.setattr(prompts, "Greedy", lambda model, ids: seen.append(ids.shape[1]) or Greedy(model, ids))
    model = narrow().for_prompts.build(2, torch.bfloat16, "cpu")
    found = prompts.measured(model, 1, 72, Options(rounds=1))
    assert found["notes"] == (dict.fromkeys((f"{PLAIN} {unit}" for unit in ("ms", "kernels", "memory")), reason) if reason else {})
    assert set(seen) == {9, 72} and (PLAIN in found["ms"]) == (not reason) and {PATCHED, FUSED} <= found["ms"].keys()


def test_a_family_of_whose_prompts_nothing_is_fused_has_no_such_way(on_cpu, monkeypatch):
    """All known families have layers, or norms between them; functions that patch() also replaces are not counted."""
    assert all(prompts._fuses(tiny(name)) for name in filter(known, ("qwen3_5", "kimi_linear", "mamba", "zamba", "lfm2")))
    patch = hf.patch
    monkeypatch.setattr(hf, "patch", lambda model, fuse=False: patch(model))
    assert not prompts._fuses(tiny("zamba"))


def test_a_family_without_fused_layers_has_no_such_way(on_cpu, monkeypatch):
    monkeypatch.setattr(hf, "fusible", lambda model: False)
    rows, failed = run.family(narrow(), (1,), FEW, "cpu")
    assert not failed and rows[0].ms.keys() == {PLAIN, PATCHED, ACCELERATED} and rows[0].notes.keys() == {f"{GRAPH} ms"}


def test_what_fails_is_named_and_the_others_go_on(on_cpu, monkeypatch):
    def decoded(model, batch, options):
        if batch == 2:
            raise torch.OutOfMemoryError("too much\nof it")
        return {"ms": {PLAIN: 2.0, PATCHED: 1.0, GRAPH: 0.5}, "kernels": {PLAIN: 4, PATCHED: 2, GRAPH: 2}, "notes": {}}

    monkeypatch.setattr(measure, "decoded", decoded)
    monkeypatch.setattr(run, "need_device", lambda: None)
    monkeypatch.setattr(run, "facts", lambda options: {"device": "GPU"})
    family = run.family
    monkeypatch.setattr(run, "family", lambda *args: family(*args, "cpu"))
    said: list[str] = []
    report = run.run([narrow(head_dim=7), narrow()], (1, 2), FEW, Watch(said.append))
    assert [row.batch for row in report.rows] == [1]
    assert [(failure.family, failure.batch) for failure in report.failed] == [("mamba2", None), ("mamba2", 2)]
    assert "FAILED" in said[0] and "2.00, patched 1.00, graph 0.50" in said[1]
    with pytest.raises(DemoError, match=r"2 failed:\n  - mamba2: .*\n  - mamba2, batch 2: OutOfMemoryError: too much$"):
        report.check()
