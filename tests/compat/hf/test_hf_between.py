"""Norms between layers and the sums before them under `patch(fuse=True)`: bit for bit the model's roundings, in fewer launches."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from functools import partial
from types import ModuleType

import pytest
import torch
from selection import costly

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import MODELS, DecodeStep, built, generate, known, modeling, norm_label, norms_of_a_pass, takes_cache
from hf_cases import nothing_stays_patched as nothing_stays_patched
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ssmgen.compat import hf
from ssmgen.compat.hf import between as hf_between
from ssmgen.compat.hf import block_sums, norm_styles, texts
from ssmgen.compat.hf import layers as hf_layers
from ssmgen.compat.hf.functions import recording

# (sums that a step computes with the norm after them, norms alone) of the tiny models
STEPS = {"mamba": (3, 1), "mamba2": (3, 1), "qwen3_next": (6, 3), "bamba": (6, 1), "lfm2": (6, 3)}
every_kind = pytest.mark.parametrize("name", [*MODELS, "minimax"])


def plain_norms(name: str) -> list[type]:
    found = [getattr(modeling(name), c) for c in hf_between.classes(modeling(name))]
    return [c for c in found if hf_between.style_of(c) is not None]


@costly(6)
@every_kind
def test_every_norm_is_recognised(name):
    """But for one that rounds its root."""
    if not known(name):
        pytest.skip(f"this transformers has no {name}")
    module = modeling(name)
    norms = [c for n, c in vars(module).items() if n.endswith("RMSNorm") and c.__module__ == module.__name__]
    assert set(plain_norms(name)) >= {c for c in norms if "Unweighted" not in c.__name__} and norms


def test_styles_are_told_from_each_other():
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8, 64, generator=g).bfloat16(), torch.randn(64, generator=g).bfloat16()
    results = [s.of(x, weight, norm_styles.EPS[s.eps], 16 if s.grouped else None) for s in norm_styles.STYLES]
    assert not [(a, b) for i, a in enumerate(results) for b in results[:i] if torch.equal(a, b)]


@costly(10)
@every_kind
def test_the_tables_say_what_norms_and_blocks_do(name):
    """Every norm and block of the tested releases is in a table. Its numbers agree with its text."""
    if not known(name):
        pytest.skip(f"this transformers has no {name}")
    for kind in [getattr(modeling(name), c) for c in hf_between.classes(modeling(name))]:
        style = norm_styles.KNOWN.get(texts.of_class(kind))
        assert (style is None) == (norm_styles.tried(kind) is None) and style == norm_styles.tried(kind)
        if kind.__name__ == "Qwen4ExpTextAttention":  # whose residual left it with 5.23
            continue
        assert style is not None or (block_sums.KNOWN | block_sums.SHARED)[kind.__name__] == block_sums.count(kind)
        assert not hf_between.recognised(kind) and not hf_between.objection(kind)


class OtherRMSNorm(torch.nn.Module):
    """OLMo's arithmetic in other words."""

    def forward(self, hidden_states):
        x = hidden_states.float()
        return (self.weight.float() * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon))).to(hidden_states.dtype)


class WrongRMSNorm(OtherRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.01


class OtherBlock(torch.nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.mixer(self.norm(hidden_states))
        hidden_states = residual + hidden_states
        return hidden_states


class MambaBlock(torch.nn.Module):
    """One of a known name that has a sum more."""

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + self.mixer(self.norm(hidden_states))
        hidden_states = residual + hidden_states
        return hidden_states


@pytest.fixture
def changed(monkeypatch):
    """A modeling file with classes that no table has."""
    module = ModuleType("a_modeling_file")
    for kind in (OtherRMSNorm, WrongRMSNorm, OtherBlock, MambaBlock):
        monkeypatch.setattr(kind, "__module__", module.__name__)
        setattr(module, kind.__name__, kind)
    return module


def test_what_no_table_has_is_recognised_and_said(changed):
    assert hf_between.classes(changed) == ("OtherRMSNorm", "OtherBlock", "MambaBlock")
    assert norm_styles.style_of(OtherRMSNorm) == norm_styles.Style() and norm_styles.style_of(WrongRMSNorm) is None
    assert hf_between.recognised(OtherRMSNorm) == (
        "its source is not in ssmgen's table; on random numbers it gives the bits of an RMSNorm that rounds behind its weight"
    )
    assert hf_between.recognised(OtherBlock) == "it is not in ssmgen's table; its forward calls norms and adds to a residual 1 times"
    assert not hf_between.objection(OtherRMSNorm) and not hf_between.objection(OtherBlock)


def test_a_known_block_with_other_sums_is_left_alone(changed):
    assert hf_between.objection(MambaBlock) == "its forward adds to a residual 2 times; expected 1"
    assert not hf_between.recognised(MambaBlock)


def test_a_patch_says_what_it_recognised(monkeypatch):
    words = "it is not in ssmgen's table; its forward calls norms and adds to a residual 1 times"
    with monkeypatch.context() as without_tables:
        without_tables.setattr(block_sums, "KNOWN", {})
        hf_between.recognised.cache_clear()
        with hf.patch("mamba2", fuse=True) as patch:
            assert patch.recognised == {"mamba2.Mamba2Block": words} and not patch.lost
            assert str(patch).startswith(f"recognised: mamba2.Mamba2Block: {words}")
    hf_between.recognised.cache_clear()
    with hf.patch("mamba2", fuse=True) as patch:
        assert patch.recognised == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_5", "qwen4_exp", "olmo_hybrid", "falcon_mamba"])
def test_a_norm_rounds_where_its_own_forward_does(name, dtype):
    for kind in plain_norms(name) if known(name) else []:
        norm = kind.__new__(kind)
        torch.nn.Module.__init__(norm)
        vars(norm).update(weight=torch.randn(64).to(dtype), eps=1e-6, variance_epsilon=1e-6, group_size=None)
        x = torch.randn(2, 3, 128, dtype=dtype)[..., :64]
        with torch.no_grad():
            want = norm.forward(x)
            with hf.patch(name, fuse=True), recording() as calls:
                got = norm.forward(x)
        assert len(calls) == 1 and got.dtype == want.dtype and got.shape == want.shape
        assert (got != want).sum() <= 0.02 * got.numel()  # where the mean's order of summation moves a value over a boundary
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=0)


@pytest.mark.parametrize("name", STEPS)
def test_sums_are_computed_with_the_norms_behind_them(name):
    """This holds from the second pass on; the first pass finds out which norm follows."""
    model = built(name)
    want = generate(model, 4)
    with hf.patch(model, fuse=True), recording() as calls:
        got = generate(model, 4)
    assert torch.equal(got.sequences, want.sequences)
    norms = [call for call in calls if call.function.__name__ == "rms_norm"]
    count = Counter("residual" in call.kwargs for call in norms)
    together, alone = STEPS[name]
    assert count == {True: 3 * together, False: 3 * alone + together + alone} and len(norms) == 4 * sum(norms_of_a_pass(model).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("f32", [True, False], ids=["residual-f32", "residual-alike"])
def test_a_residual_in_f32_and_one_of_the_models_dtype(f32, dtype):
    """Hidden states after every block: the sums are exact, and rounded as the model rounds them."""
    model = built("mamba2", residual_in_fp32=f32).to(dtype)
    with torch.no_grad():
        step = DecodeStep(model)
        caches = [copy.deepcopy(step.cache) for _ in range(3)]
        with hf.patch(model, fuse=True):
            step(caches[0])
            got = model(step.token, **takes_cache(model, caches[1]), use_cache=True, output_hidden_states=True).hidden_states
        want = model(step.token, **takes_cache(model, caches[2]), use_cache=True, output_hidden_states=True).hidden_states
    assert [h.dtype for h in got] == [h.dtype for h in want] and got[1].dtype == (torch.float32 if f32 else dtype)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).norm() <= (1e-5 if dtype is torch.float32 else 2e-2) * b.float().norm()


class Operations(TorchDispatchMode):
    """The names of PyTorch's operations, except views and new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not any(word in function.name() for word in ("empty", "_unsafe_view", "promote_types")):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_a_step_has_few_operations_beside_ours(monkeypatch):
    """A mamba2 has two matrix products a layer. The embedding comes before them, and the head's product and its casts after them."""
    model = built("mamba2").bfloat16()
    for module, name in ((hf_between.native, "rms_norm"), (hf_layers.native_mamba2, "mamba2_layer")):
        monkeypatch.setattr(module, name, partial(_apart, getattr(module, name)))
    with torch.no_grad(), hf.patch(model, fuse=True), recording() as calls:
        step = DecodeStep(model)
        step(step.cache)
        before = len(calls)
        with Operations() as operations:
            step(step.cache)
    assert len(calls) - before == 3 * 2 + 1
    assert Counter(operations.names) == {"aten::embedding": 1, "aten::mm": 3 * 2 + 1, "aten::_to_copy": 3}


def _apart(function, *args, **kwargs):
    """A call that no mode sees: the reference's own operations do not count as a step's."""
    with _disable_current_modes():
        return function(*args, **kwargs)


def test_a_block_keeps_nothing_of_a_model_that_is_gone():
    model = built("mamba2")
    with hf.patch(model, fuse=True):
        generate(model, 2)
        gc.collect()
        before = len(hf_between._links)
        del model
        gc.collect()
        assert len(hf_between._links) == before - 3


def test_a_norm_that_does_not_come_is_forgotten():
    """Another call does not get its result, and the sum is computed alone until it occurs again."""
    model = built("mamba2")
    block, norm = model.backbone.layers[0], model.backbone.layers[1].norm
    with torch.no_grad(), hf.patch(model, fuse=True):
        x, y = torch.randn(2, 1, 32), torch.randn(2, 1, 32)
        norm(hf_between.add(block, 0, x, y))
        with recording() as calls:
            total = hf_between.add(block, 0, x, y)
            other = norm(total + 0)
            hf_between.add(block, 0, x, y)
        assert torch.equal(total, x + y) and [("residual" in call.kwargs) for call in calls] == [True, False]
        assert torch.equal(other, norm(x + y))


def test_training_is_untouched():
    """A forward under grad gives gradients between layers, and transformers' checkpointing still takes place."""
    model = built("mamba2").train()
    ids = torch.arange(3, 13).view(2, 5)
    model(input_ids=ids, labels=ids).loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    ran = []
    model.backbone.layers[0].mixer.register_forward_pre_hook(lambda *_: ran.append(1))
    with hf.patch("mamba2", fuse=True), pytest.warns(RuntimeWarning, match="requires grad"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert len(ran) == 2, "once more for the backward"
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-6)


def test_forwards_are_put_back():
    kinds = [modeling("mamba2").Mamba2Block, modeling("mamba2").Mamba2RMSNorm]
    before = [(kind.forward, block_sums.Forward(kind).forward) for kind in kinds]
    first, second = hf.patch("mamba2", fuse=True), hf.patch("mamba2", fuse=True)
    first.undo()
    assert [block_sums.Forward(kind).forward for kind in kinds] != [inner for _, inner in before]
    second.undo()
    assert [(kind.forward, block_sums.Forward(kind).forward) for kind in kinds] == before


def test_weights_that_make_f32_of_16_bits_are_the_originals():
    model = built("mamba2").bfloat16()
    norm = model.backbone.norm_f.float()
    x = torch.randn(2, 1, 32).bfloat16()
    with torch.no_grad():
        want = norm(x)
        with hf.patch(model, fuse=True) as patch, pytest.warns(RuntimeWarning, match="weight is float32 and promotes"):
            got = norm(x)
    assert torch.equal(got, want) and patch.calls() == {norm_label(norm): hf.Calls(0, 1)}
