"""ssmgen's functions for the package `kernels`. Most tests run on stand-ins for the modules that this package makes of functions."""

from __future__ import annotations

import copy
import enum
import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import MODELS, built, generate, modeling
from hf_cases import nothing_stays_patched as nothing_stays_patched
from transformers.utils import import_utils

from ssmgen.compat import hf
from ssmgen.compat.hf import functions, kernels
from ssmgen.errors import PatchError

THERE = import_utils.is_kernels_available()
needs_kernels = pytest.mark.skipif(
    not THERE,
    reason=f"needs kernels >= {import_utils.KERNELS_MIN_VERSION}, < {import_utils.KERNELS_MAX_VERSION} beside this transformers",
)


class Mode(enum.Flag):
    """The flags of `kernels`."""

    INFERENCE = enum.auto()
    TRAINING = enum.auto()
    TORCH_COMPILE = enum.auto()


def as_module(function: Any, hub_name: str, signature: inspect.Signature | None = None) -> torch.nn.Module:
    """A function as `kernels` makes a module of it."""

    def forward(self, *args, **kwargs):
        return function(*args, **kwargs)

    parameters = (signature or inspect.signature(function)).parameters.values()
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([self, *parameters])  # type: ignore[attr-defined]
    return type("Func", (torch.nn.Module,), {"forward": forward, "kernel_layer_name": hub_name})()


@pytest.fixture
def stand_ins(monkeypatch) -> None:
    """The convolutions of two folders as modules, and no other folder. They replace the modules of an installed `kernels`."""
    monkeypatch.setattr(kernels, "_mode", lambda: Mode)
    monkeypatch.setattr(kernels.found, "names", lambda: ("lfm2", "lfm2_moe"))
    for folder in ("lfm2", "lfm2_moe"):
        for name in MODELS["lfm2"]:
            function = getattr(modeling(folder), name)
            function = type(function).forward.__get__(function) if isinstance(function, torch.nn.Module) else function
            signature = inspect.signature(functions.FUNCTIONS[name])
            monkeypatch.setattr(modeling(folder), name, as_module(function, name, signature))


def of(mapping: kernels.Mapping, name: str) -> kernels.Kernel:
    """A function of a mapping for CUDA."""
    return mapping[name]["cuda"][Mode.INFERENCE]


def put_in(function: torch.nn.Module, kernel: kernels.Kernel) -> None:
    """As `kernels` does it."""
    function.forward = kernel.load().forward.__get__(function)


def test_functions_are_found_by_name_and_parameters(stand_ins):
    mapping = kernels.mapping()
    assert set(mapping) == {"causal_conv1d_update", "causal_conv1d_fn"}
    kernel = of(mapping, "causal_conv1d_fn")
    assert mapping["causal_conv1d_fn"]["cuda"] == {Mode.INFERENCE: kernel, Mode.INFERENCE | Mode.TORCH_COMPILE: kernel}
    assert kernels.mapping(device="cpu")["causal_conv1d_fn"]["cpu"][Mode.INFERENCE] is kernel and str(kernel) == "ssmgen's causal_conv1d_fn"


def test_a_class_is_as_kernels_wants_it(stand_ins):
    """No constructor, no further member, and the parameters of the function that it replaces."""
    layer = of(kernels.mapping(), "causal_conv1d_fn").load()
    members, known = ({name for name, _ in inspect.getmembers(c)} for c in (layer, torch.nn.Module))
    assert issubclass(layer, torch.nn.Module) and layer.__init__ is torch.nn.Module.__init__
    assert members - known == {"can_torch_compile", "has_backward"}
    theirs = inspect.signature(type(modeling("lfm2").causal_conv1d_fn).forward).parameters.values()
    assert [p.kind for p in inspect.signature(layer.forward).parameters.values()] == [p.kind for p in theirs]


def test_calls_are_counted_and_the_others_go_to_the_function_of_their_file(stand_ins):
    kernel = of(kernels.mapping(), "causal_conv1d_fn")
    function, before = modeling("lfm2").causal_conv1d_fn, kernel.calls
    x, weight = torch.randn(2, 8, 5), torch.randn(8, 3)
    want = function(x, weight)
    put_in(function, kernel)
    assert torch.allclose(function(x, weight), want, atol=1e-6)
    assert (kernel.calls.ssmgen - before.ssmgen, kernel.calls.original - before.original) == (1, 0)
    with pytest.warns(RuntimeWarning, match="an operand requires grad"):
        got = function(x.requires_grad_(), weight)
    got.sum().backward()
    assert torch.equal(got, want) and x.grad is not None and kernel.calls.original - before.original == 1


def test_a_refused_call_names_the_layer_and_not_the_function(stand_ins):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 3), requires_grad=False)

        def forward(self, x):
            return modeling("lfm2").causal_conv1d_fn(x, self.weight, None, "gelu")

    kernel = kernels.Kernel("causal_conv1d_fn", functions.causal_conv1d_fn, inspect.signature(functions.causal_conv1d_fn))
    put_in(modeling("lfm2").causal_conv1d_fn, kernel)
    with pytest.warns(RuntimeWarning, match="first in Layer:"):
        Layer()(torch.randn(2, 8, 5))
    assert kernel.calls == (0, 1)


def test_a_copy_of_a_mapping_has_the_same_functions(stand_ins):
    mapping = kernels.mapping()
    assert copy.deepcopy(mapping) == mapping == kernels.mapping()


def test_a_model_gets_the_functions_of_its_files(stand_ins):
    assert set(kernels.mapping(built("lfm2"))) == {"causal_conv1d_update", "causal_conv1d_fn"}
    with pytest.raises(PatchError, match="`kernels` can replace no function of these models"):
        kernels.mapping(torch.nn.Linear(2, 2))


def test_a_patch_does_not_hide_a_function(stand_ins):
    want = kernels.mapping()
    with hf.patch("lfm2"):
        assert kernels.mapping() == want


def test_a_function_that_one_file_has_changed_is_left_out(stand_ins, monkeypatch):
    def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None, dilation=1):
        raise AssertionError

    monkeypatch.setattr(modeling("lfm2"), "causal_conv1d_update", as_module(causal_conv1d_update, "causal_conv1d_update"))
    with pytest.warns(RuntimeWarning, match="causal_conv1d_update: its parameters differ|in lfm2, its parameters.*dilation"):
        mapping = kernels.mapping()
    assert set(mapping) == {"causal_conv1d_fn"}


@pytest.mark.skipif(THERE, reason="kernels is installed")
def test_without_kernels_one_sentence_says_what_to_install():
    with pytest.raises(PatchError, match=r"pip install 'kernels>=0\.\d+\.\d+,<0\.\d+"):
        kernels.mapping()


# Tests that need the package.


@needs_kernels
def test_every_function_that_patch_replaces_is_given_to_kernels():
    names = set(kernels.mapping())
    for folder, replaced in hf.models().items():
        for name in replaced:
            function = getattr(modeling(folder), name)
            assert isinstance(function, type) or function.kernel_layer_name in names, (folder, name)


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_generation_has_the_same_tokens(name):
    """Every call is ssmgen's. An empty mapping puts transformers' functions back."""
    import kernels as package

    model = built(name)
    want = generate(model, 4)
    mapping = kernels.mapping(model, "cpu")
    ours = [kinds["cpu"][package.Mode.INFERENCE] for kinds in mapping.values()]
    before = [kernel.calls for kernel in ours]
    try:
        with package.use_kernel_mapping(mapping):
            package.kernelize(model, mode=package.Mode.INFERENCE, device="cpu")
        got = generate(model, 4)
    finally:
        with package.use_kernel_mapping({}, inherit_mapping=False):
            package.kernelize(model, mode=package.Mode.INFERENCE, device="cpu")
    after = [kernel.calls for kernel in ours]
    assert torch.equal(got.sequences, want.sequences)
    assert all(b.ssmgen > a.ssmgen and b.original == a.original for a, b in zip(before, after, strict=True))
    generate(model, 2)
    assert [kernel.calls for kernel in ours] == after


@needs_kernels
@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "kimi_linear", "mamba"])
def test_a_forward_is_traced_with_them(name):
    import kernels as package

    model = built(name)
    ids = torch.arange(3, 13).view(2, 5)
    mode = package.Mode.INFERENCE | package.Mode.TORCH_COMPILE
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        try:
            with package.use_kernel_mapping(kernels.mapping(model, "cpu")):
                package.kernelize(model, mode=mode, device="cpu")
            targets: list[str] = []

            def backend(graph, _):
                targets.extend(str(node.target) for node in graph.graph.nodes)
                return graph.forward

            torch._dynamo.reset()
            got = torch.compile(model, backend=backend)(ids, use_cache=False).logits
        finally:
            with package.use_kernel_mapping({}, inherit_mapping=False):
                package.kernelize(model, mode=package.Mode.INFERENCE, device="cpu")
    assert torch.allclose(got, want, atol=1e-4) and any("ssmgen" in target for target in targets)
