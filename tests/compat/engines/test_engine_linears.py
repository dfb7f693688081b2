"""Linear layers of both engines: which calls skinny_linear serves, in graphs of torch.compile too, and which stay the engine's own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import namedtuple
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_stand_ins import found as place_of
from engine_stand_ins import importable, write
from torch.nn.functional import linear

from ssmgen.compat import sglang, vllm
from ssmgen.compat.hf.linears import Linears
from ssmgen.compat.sglang import invariance as of_sglang
from ssmgen.compat.shared import linears, replacing
from ssmgen.compat.vllm import invariance as of_vllm
from ssmgen.errors import CaptureError, ConfigError

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PLUGINS, MODES = {"vllm": vllm, "sglang": sglang}, {"vllm": of_vllm, "sglang": of_sglang}
PLACES = {
    "vllm": ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod.apply"),
    "sglang": ("sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod.apply"),
}
HEADS = {
    "vllm": ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.apply"),
    "sglang": ("sglang.srt.layers.logits_processor", "LogitsProcessor._compute_lm_head"),
}
both = pytest.mark.parametrize("engine", sorted(PLUGINS), indirect=True)


def default_unquantized_gemm(layer, x, weight, bias=None):
    return linear(x, weight, bias)  # vLLM's, by its name


# How the engine calls a layer, and its head; the words that its own methods return.
Called = namedtuple("Called", "name method apply head own own_head")


@pytest.fixture
def engine(request, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("SSMGEN_ENGINE_LINEAR", "allow")
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    name = request.param
    write(tmp_path, name)
    with importable(tmp_path, name), torch.no_grad():
        PLUGINS[name].register()
        method = place_of(PLACES[name][0], "UnquantizedLinearMethod")()
        if name == "vllm":
            method._gemm_impl = default_unquantized_gemm
            utils = ModuleType("vllm.model_executor.layers.utils")
            utils.dispatch_unquantized_gemm = lambda: default_unquantized_gemm
            monkeypatch.setitem(sys.modules, utils.__name__, utils)
            embedding = place_of(HEADS[name][0], "UnquantizedEmbeddingMethod")()

            def head(x, layer):
                return embedding.apply(layer, x)
        else:
            backends(monkeypatch, "auto")
            import_module(HEADS[name][0]).should_apply_lm_head_quant_method = lambda lm_head, method: method == "quantised"
            processor = place_of(HEADS[name][0], "LogitsProcessor")()
            vars(processor).update(use_fp32_lm_head=False, use_fp32_lm_head_output=False, rl_on_policy_target=None)

            def head(x, layer):
                return processor._compute_lm_head(x, layer)

        words = [f"the engine's {'.'.join(place)}" for place in (PLACES[name], HEADS[name])]
        yield Called(name, method, method.apply, head, *words)
        PLUGINS[name].unregister()


def backends(monkeypatch, value: str) -> None:
    """SGLang's choice of a backend of products."""
    monkeypatch.setattr(import_module(PLACES["sglang"][0]), "get_bf16_gemm_backend", lambda: SimpleNamespace(value=value), raising=False)


def layer(n: int = 48, k: int = 64, dtype=BF16, **more) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.nn.Parameter(torch.randn(n, k).mul_(k**-0.5).to(dtype), requires_grad=False), **more)


# Off by default.


@both
def test_nothing_is_replaced_without_the_variable(engine, monkeypatch):
    plugin = PLUGINS[engine.name]
    plugin.unregister()
    monkeypatch.delenv("SSMGEN_ENGINE_LINEAR")
    outcome = plugin.register()
    asked = [r for r in plugin._ENGINE.replacements if r.asked]
    assert {".".join(p) for p in (PLACES[engine.name], HEADS[engine.name])} <= {r.place for r in asked}
    for r in asked:
        assert outcome[r.place] == replacing.NOT_ASKED
        function = place_of(r.module, r.name)
        assert inspect.unwrap(function) is function
    assert engine.method.apply(layer(), torch.randn(2, 64).bfloat16()) == engine.own
    plugin.unregister()
    monkeypatch.setenv("SSMGEN_ENGINE_LINEAR", "yes")
    with pytest.raises(ConfigError, match="expected allow or deny"):
        plugin.register()


@both
def test_single_methods_are_kept(engine, monkeypatch):
    plugin = PLUGINS[engine.name]
    plugin.unregister()
    monkeypatch.setenv("SSMGEN_ENGINE_KEEP", HEADS[engine.name][1])
    outcome = plugin.register()
    assert "SSMGEN_ENGINE_KEEP names it" in outcome[".".join(HEADS[engine.name])]
    assert engine.head(torch.randn(2, 64).bfloat16(), layer()) == engine.own_head
    assert isinstance(engine.method.apply(layer(), torch.randn(2, 64).bfloat16()), torch.Tensor)


# Calls that are served, with the bits of skinny_linear, and calls that are not.

SERVED = {
    "one row": (BF16, lambda x: x[:1]),
    "16 rows": (BF16, lambda x: x[:16]),
    "f16": (F16, lambda x: x[:3]),
    "one row of f32": (F32, lambda x: x[:1]),
    "leading dimensions": (BF16, lambda x: x[:16].view(2, 8, -1)),
    "a vector": (BF16, lambda x: x[0]),
    "rows apart": (BF16, lambda x: x[:32:2]),
    "transposed rows": (BF16, lambda x: x[:16].view(2, 8, -1).transpose(0, 1)),
    "a part of a row": (BF16, lambda x: torch.cat([x, x], dim=1)[:5, 64:]),
    "an odd start": (BF16, lambda x: torch.cat([x, x], dim=1)[:5, 3:67]),
}
OWN = {
    "17 rows": (BF16, lambda x: x[:17]),
    "no row": (BF16, lambda x: x[:0]),
    "two rows of f32": (F32, lambda x: x[:2]),
    "another dtype": (BF16, lambda x: x[:1].float()),
    "leading dimensions": (BF16, lambda x: x[:24].view(3, 8, -1)),
}


@both
@pytest.mark.parametrize("bias", [None, BF16, F32], ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_calls_that_are_served(engine, case, bias):
    dtype, rows = SERVED[case]
    made, x = layer(dtype=dtype), rows(torch.randn(48, 64).to(dtype))
    given = None if bias is None else torch.randn(48).to(bias)
    got = engine.apply(made, x, given)
    want = linear(x.double(), made.weight.double(), None if given is None else given.double())
    assert got.shape == (*x.shape[:-1], 48) and got.dtype == dtype and got.is_contiguous()
    tolerance = {BF16: 2**-7, F16: 2**-9, F32: 1e-5}[dtype]
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(got, linears.skinny_linear(x.contiguous(), made.weight, given))


@both
@pytest.mark.parametrize("case", OWN)
def test_other_rows_stay_the_engine_s(engine, case, caplog):
    dtype, rows = OWN[case]
    assert engine.apply(layer(dtype=dtype), rows(torch.randn(48, 64).to(dtype)), None) == engine.own
    assert not caplog.records, "larger batches are no reason for a warning"


class Wrapped(torch.Tensor):
    """A tensor whose operators are its own, such as a quantised one."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("no operator is called")


WEIGHTS = {
    "columns": lambda: torch.randn(64, 48).bfloat16().t(),
    "an odd N": lambda: torch.randn(47, 64).bfloat16(),
    "an odd K": lambda: torch.randn(48, 60).bfloat16(),
    "an odd start": lambda: torch.randn(48 * 64 + 1).bfloat16()[1:].view(48, 64),
    "odd rows": lambda: torch.randn(48, 65).bfloat16()[:, :64],
    "nothing": lambda: torch.empty(0, 64).bfloat16(),
    "fp8": lambda: torch.randn(48, 64).to(torch.float8_e4m3fn),
    "a class": lambda: torch.Tensor._make_subclass(Wrapped, torch.randn(48, 64).bfloat16()),
}


@both
@pytest.mark.parametrize("case", WEIGHTS)
def test_other_weights_stay_the_engine_s(engine, case, caplog):
    made = SimpleNamespace(weight=WEIGHTS[case]())
    x = torch.randn(2, made.weight.shape[1]).to(made.weight.dtype)
    assert engine.apply(made, x, None) == engine.own and not caplog.records
    assert linears.objection(made.weight, None)


@both
def test_a_rank_s_part_of_a_weight_is_what_counts(engine):
    """Column parallel: 48 of 96 rows; row parallel: 64 of 128 columns, and only the first rank has the bias."""
    whole, x = torch.randn(96, 128).bfloat16(), torch.randn(4, 128).bfloat16()
    column, row = whole[48:], whole[:, 64:]
    assert torch.equal(engine.apply(SimpleNamespace(weight=column), x, None), linears.skinny_linear(x, column))
    assert torch.equal(engine.apply(SimpleNamespace(weight=row), x[:, 64:], None), linears.skinny_linear(x[:, 64:], row))
    assert engine.apply(SimpleNamespace(weight=whole[:44]), x, None) == engine.own, "44 rows are no multiple of 8"


@both
def test_calls_that_record_a_gradient_stay_the_engine_s(engine):
    made, x = layer(), torch.randn(2, 64).bfloat16()
    with torch.enable_grad():
        assert isinstance(engine.apply(made, x, None), torch.Tensor)
        made.weight.requires_grad_(True)
        assert engine.apply(made, x, None) == engine.own


@both
def test_without_tensor_cores_one_row_is_served(engine, monkeypatch):
    monkeypatch.setattr(linears, "tensor_cores", lambda device: False)
    x = torch.randn(2, 64).bfloat16()
    assert isinstance(engine.apply(layer(), x[:1], None), torch.Tensor) and engine.apply(layer(), x, None) == engine.own


@both
@pytest.mark.parametrize("cores", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_accelerate_has_the_same_rule(engine, monkeypatch, dtype, cores):
    monkeypatch.setattr(linears, "tensor_cores", lambda device: cores)
    for n, k in ((48, 64), (47, 64), (48, 68)):
        module, seen = torch.nn.Linear(k, n, bias=False).to(dtype), []
        module.weight.requires_grad_(False)
        ours = linears.skinny_linear
        monkeypatch.setattr(linears, "skinny_linear", lambda *given, ours=ours, seen=seen: seen.append(1) or ours(*given))
        changed = Linears(module)
        for rows in (1, 2, 16, 17):
            x, before = torch.randn(rows, k).to(dtype), len(seen)
            module(x)
            by_accelerate = len(seen) > before
            assert isinstance(engine.apply(module, x, None), torch.Tensor) == by_accelerate, (n, k, rows)
        changed.undo()


# The head.


@both
def test_the_head_is_served(engine):
    made, x = layer(n=128), torch.randn(16, 64).bfloat16()
    assert torch.equal(engine.head(x, made), linears.skinny_linear(x, made.weight))
    assert engine.head(torch.randn(17, 64).bfloat16(), made) == engine.own_head


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
@pytest.mark.parametrize("option", ["use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target"])
def test_heads_of_sglang_with_options_are_its_own(engine, option):
    processor = place_of(HEADS["sglang"][0], "LogitsProcessor")()
    vars(processor).update({"use_fp32_lm_head": False, "use_fp32_lm_head_output": False, "rl_on_policy_target": None} | {option: True})
    assert processor._compute_lm_head(torch.randn(2, 64).bfloat16(), layer()) == engine.own_head


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
@pytest.mark.parametrize("more", [{"set_lora": 1}, {"quant_method": "quantised"}, {"use_intel_amx_backend": True}], ids=str)
def test_heads_of_sglang_with_lora_or_quantised_are_its_own(engine, more):
    assert engine.head(torch.randn(2, 64).bfloat16(), layer(**more)) == engine.own_head


# Other backends, and the batch-invariant modes.


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_another_backend_of_vllm_is_its_own(engine, monkeypatch):
    """As with --linear-backend flashinfer_cutedsl, or on a CPU."""
    engine.method._gemm_impl = functools.partial(default_unquantized_gemm, pdl=True)
    assert engine.apply(layer(), torch.randn(2, 64).bfloat16(), None) == engine.own
    sys.modules["vllm.model_executor.layers.utils"].dispatch_unquantized_gemm = lambda: test_another_backend_of_vllm_is_its_own
    assert engine.head(torch.randn(2, 64).bfloat16(), layer()) == engine.own_head


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
@pytest.mark.parametrize("value", ["gemv", "cutedsl"])
def test_another_backend_of_sglang_is_its_own(engine, monkeypatch, value):
    backends(monkeypatch, value)
    assert engine.apply(layer(), torch.randn(2, 64).bfloat16(), None) == engine.own


def in_the_mode(monkeypatch, engine: Called) -> None:
    monkeypatch.setattr(MODES[engine.name].on, "known", True)


@both
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_a_batch_invariant_mode_keeps_the_engine_s_products(engine, monkeypatch, rows):
    """One answer would otherwise be computed with 16 rows in one step and 17 in the next."""
    in_the_mode(monkeypatch, engine)
    x = torch.randn(rows, 64).bfloat16()
    assert engine.apply(layer(), x, None) == engine.own and engine.head(x, layer()) == engine.own_head


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_the_mode_of_vllm_does_not_need_these_functions(engine, monkeypatch):
    """It promises without them, since it does not use them."""
    in_the_mode(monkeypatch, engine)
    vllm._ENGINE.outcome.update({r.place: replacing.NOT_ASKED for r in vllm._ENGINE.replacements if r.asked})
    assert place_of("vllm.v1.attention.backends.mamba2_attn", "Mamba2AttentionBackend").supports_batch_invariance()


# Refusals.


@both
def test_a_capture_without_a_loaded_kernel_is_the_engine_s_and_is_said_once(engine, monkeypatch, caplog):
    def refuse(*given):
        raise CaptureError("spec", "sm_90a", "skinny_linear")

    monkeypatch.setattr(linears, "skinny_linear", refuse)
    made, x = layer(), torch.randn(2, 64).bfloat16()
    assert [engine.apply(made, x, None) for _ in range(2)] == [engine.own] * 2
    operator = getattr(torch.ops.ssmgen, f"{engine.name}_linear")
    assert all(torch.equal(operator(x, made.weight, None), linear(x, made.weight)) for _ in range(2))
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and all("run a step of the same batch size before the capture" in words for words in said)


# Graphs of torch.compile.


class Counted:
    """A backend of torch.compile that counts graphs and keeps their operators."""

    def __init__(self):
        self.graphs, self.operators = 0, []

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.operators += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward


def compiled(engine: Called, made: SimpleNamespace, bias, times: int = 2):
    torch._dynamo.reset()  # all of these functions share one limit of recompilations
    counted = Counted()

    def forward(x):
        return engine.method.apply(made, x, bias) * times

    return counted, torch.compile(forward, fullgraph=True, dynamic=True, backend=counted)


@both
@pytest.mark.parametrize("bias", [False, True])
def test_one_graph_serves_any_number_of_rows(engine, bias):
    made, given = layer(), torch.randn(48).bfloat16() if bias else None
    counted, forward = compiled(engine, made, given)
    for rows in (5, 2, 16, 17, 40):
        x = torch.randn(rows, 64).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        own = linear(x, made.weight, given) if rows > 16 else linears.skinny_linear(x, made.weight, given)
        assert torch.equal(forward(x), own * 2)
    assert counted.graphs == 1 and f"ssmgen.{engine.name}_linear.default" in counted.operators


@both
def test_the_operator_has_a_fake(engine):
    operator = getattr(torch.ops.ssmgen, f"{engine.name}_linear").default
    made = layer()
    for x in (torch.randn(3, 64).bfloat16(), torch.randn(2, 10, 64).bfloat16()):
        for bias in (None, torch.randn(48).bfloat16()):
            torch.library.opcheck(operator, (x, made.weight.detach(), bias))


@both
@pytest.mark.parametrize("why", ["the mode", "the sizes", "the backend"])
def test_graphs_without_the_operator(engine, monkeypatch, why):
    """The engine's method is traced where no number of rows is served."""
    real = SimpleNamespace(weight=torch.randn(47 if why == "the sizes" else 48, 64).bfloat16())
    if why == "the mode":
        in_the_mode(monkeypatch, engine)
    elif why == "the backend":
        if engine.name == "sglang":
            backends(monkeypatch, "gemv")
        else:
            engine.method._gemm_impl = functools.partial(default_unquantized_gemm, pdl=True)
    counted, forward = compiled(engine, real, None, times=1)
    assert forward(torch.randn(2, 64).bfloat16()) == engine.own
    assert not any("linear" in operator for operator in counted.operators)


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("ours", [True, False])
def test_vllm_s_compiled_graphs_have_another_key(engine, monkeypatch, ours):
    """A graph with the operator is not loaded by a process without it, nor the other way."""
    vllm.unregister()
    envs = import_module("vllm.envs")
    envs.compile_factors = lambda: {"VLLM_SOMETHING": 1}
    if not ours:
        monkeypatch.setenv("SSMGEN_ENGINE_KEEP", "UnquantizedLinearMethod.apply")
    vllm.register()
    assert envs.compile_factors() == {"VLLM_SOMETHING": 1} | ({"SSMGEN_ENGINE_LINEAR": "allow"} if ours else {})
