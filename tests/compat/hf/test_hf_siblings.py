"""Linear layers that share a launch, and gated MLPs in one, of accelerated models."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built
from hf_cases import nothing_stays_patched as nothing_stays_patched
from selection import costly
from torch.nn.functional import silu

import ssmgen
from ssmgen.compat.hf import gated, linears, projections, siblings
from ssmgen.errors import NotBuiltError


class Three(torch.nn.Module):
    """Three layers that multiply the same x, and one that multiplies their sum."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Linear(16, n, bias=bias) for n in (8, 24, 8, 16))
        self.skip, self.change, self.twice = False, False, False

    def forward(self, x):
        found = [self.a(x)]
        if self.change:
            x.mul_(2)
        if not self.skip:
            found += [self.b(x), self.c(x)]
        if self.twice:
            found.append(self.b(x))
        y = torch.cat(found, dim=-1)
        return y, self.d(x + 0)


@pytest.fixture
def launches(monkeypatch):
    """The number of weights of each call of skinny_linear."""
    found = []

    def seen(ours):
        return lambda x, weight, *rest, **more: (
            found.append(len(weight) if isinstance(weight, list) else 1) or ours(x, weight, *rest, **more)
        )

    for module in (linears.linears, siblings, gated):
        monkeypatch.setattr(module, "skinny_linear", seen(module.skinny_linear))
    return found


def ready(launches, bias=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = Three(bias).to(dtype)
    made = linears.Linears(model)
    with torch.no_grad():
        model(torch.randn(1, 16).to(dtype))
    assert launches == [1, 1, 1, 1], "the first calls are learned from"
    launches.clear()
    return model, made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, (1, 1)), (torch.bfloat16, (3, 2)), (torch.bfloat16, (16,)), (torch.float32, (1,))]
)
def test_layers_that_multiply_the_same_x_share_a_launch_and_keep_their_bits(launches, bias, dtype, rows):
    model, _ = ready(launches, bias, dtype)
    alone = copy.deepcopy(model)
    x = torch.randn(*rows, 16).to(dtype)
    with torch.no_grad():
        got = model(x)
        assert launches == [3, 1]
        launches.clear()
        want = alone(x)
        assert launches == [1] * 4, "the copy has not learned"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        assert torch.equal(model(x)[0], model(x.clone())[0]) and launches[4:] == [3, 1, 3, 1]


def test_more_rows_and_recorded_gradients_are_pytorchs(launches):
    model, _ = ready(launches)
    with torch.no_grad():
        model(torch.randn(17, 16).bfloat16())
    model(torch.randn(1, 16).bfloat16())[0].sum().backward()
    assert not launches and model.b.weight.grad is not None
    with torch.inference_mode():
        x = torch.randn(1, 16).bfloat16()
        got = model(x)[0]
    with torch.no_grad():
        assert torch.equal(got, model(x.clone())[0])
    assert launches == [1, 1, 1, 1, 3, 1], "an inference tensor does not count its changes"


def test_a_result_that_is_not_called_for_ends_the_sharing(launches):
    model, _ = ready(launches)
    x, y = torch.randn(2, 1, 16).bfloat16()
    with torch.no_grad():
        want = model(y)[0].clone()
        model.skip = True
        model(x)
        model.skip = False
        launches.clear()
        assert torch.equal(model(y)[0], want) and torch.equal(model(y)[0], want)
    assert launches == [1] * 8


def test_an_x_that_changes_in_between_is_multiplied_as_it_is_then(launches):
    model, _ = ready(launches)
    x = torch.randn(1, 16).bfloat16()
    with torch.no_grad():
        want = torch.cat([model.a(x.clone()), model.b(2 * x), model.c(2 * x)], dim=-1)
        model.change = True
        for _ in range(2):
            assert torch.equal(model(x.clone())[0], want)


def test_a_layer_that_is_called_twice_gives_the_same_twice(launches):
    model, _ = ready(launches)
    x = torch.randn(1, 16).bfloat16()
    with torch.no_grad():
        want = model(x)[0]
        model.twice = True
        for _ in range(3):
            assert torch.equal(model(x)[0], torch.cat([want, want[:, 8:32]], dim=-1))


def test_a_layer_with_a_hook_or_another_dtype_multiplies_by_itself(launches):
    model, _ = ready(launches)
    x, called = torch.randn(1, 16).bfloat16(), []
    model.b.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        want = model(x)[0]
        assert called == [1] and launches == [1] * 4
        model.c.to(torch.float32)
        with pytest.raises(RuntimeError):  # as PyTorch's own layer does
            model(x)
        model.c.to(torch.bfloat16)
        assert torch.equal(model(x)[0], want)


def test_weights_that_are_replaced_or_changed_are_the_ones_that_multiply(launches):
    model, _ = ready(launches)
    x = torch.randn(1, 16).bfloat16()
    with torch.no_grad():
        model(x)
        model.b.weight.mul_(2)
        model.c.weight = torch.nn.Parameter(-model.c.weight)
        got = model(x)[0]
        assert torch.equal(got, torch.cat([copy.deepcopy(m)(x) for m in (model.a, model.b, model.c)], dim=-1))


def test_undo_forgets_what_was_learned(launches):
    model, made = ready(launches)
    assert len(siblings.groups([model.a, model.b, model.c])) == 1
    made.undo()
    assert not siblings.groups([model.a, model.b, model.c]) and not siblings._state.waiting and not siblings._state.seen


def test_load_loads_shared_launches_and_leaves_no_result_waiting(launches):
    model, made = ready(launches)
    x = torch.randn(1, 16).bfloat16()
    made.load([1, 4, 40])
    assert sorted(launches) == [1, 1, 1, 1, 1, 1, 3, 3] and not siblings._state.waiting
    launches.clear()
    with torch.no_grad():
        model(x)
    assert launches == [3, 1]


def test_results_of_one_row_are_joined_without_a_copy(launches):
    model, _ = ready(launches)
    for rows in (1, 2):
        x = torch.randn(rows, 16).bfloat16()
        with torch.no_grad():
            parts = [model.a(x), model.b(x), model.c(x)]
        got = projections.joined(parts)
        assert torch.equal(got, torch.cat(parts, dim=-1)) and (got.data_ptr() == parts[0].data_ptr()) == (rows == 1)
        assert torch.equal(projections.joined(parts[::-1]), torch.cat(parts[::-1], dim=-1))
        assert torch.equal(projections.joined([parts[0], parts[2]]), torch.cat([parts[0], parts[2]], dim=-1))


def test_a_kernel_that_may_not_be_compiled_is_a_warning_and_several_launches(launches, monkeypatch):
    """A cache may have kernels of single weights only, and SSMGEN_COMPILE=deny forbids to compile others."""
    model, _ = ready(launches)
    mlp = OfFunction(None).bfloat16()
    linears.Linears(mlp)
    x = torch.randn(1, 16).bfloat16()
    with torch.no_grad():
        want, h = model(x)[0], mlp.w2(silu(x @ mlp.w1.weight.T) * (x @ mlp.w3.weight.T))

        def refused(x, weight, *rest, **more):
            raise NotBuiltError("skinny_linear:k=16", "sm_90a")

        monkeypatch.setattr(siblings, "skinny_linear", refused)
        monkeypatch.setattr(gated, "skinny_linear", refused)
        with pytest.warns(RuntimeWarning, match=r"3 linear layers that could share a launch multiply one by one: .*skinny_linear:k=16"):
            assert torch.equal(model(x)[0], want)
        with pytest.warns(RuntimeWarning, match="the layers of an MLP multiply one by one"):
            assert torch.equal(mlp(x), h)
        launches.clear()
        assert torch.equal(model(x)[0], want)
        with pytest.warns(RuntimeWarning, match="2 linear layers that could share a launch"):  # gate and up by themselves
            assert torch.equal(mlp(x), h)
        assert launches == [1] * 7


class Gated(torch.nn.Module):
    def __init__(self, act):
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.w2, self.act = torch.nn.Linear(24, 16, bias=False), act


class UpFirst(Gated):
    def forward(self, x):
        """Words."""
        y = self.w2(self.w3(x) * self.act(self.w1(x)))
        return y


class OfFunction(Gated):
    def forward(self, x):
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Scaled(Gated):
    def forward(self, x):
        return self.w2(self.act(self.w1(x) * 2) * self.w3(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [UpFirst, OfFunction])
def test_a_gated_mlp_is_two_launches(launches, kind, dtype):
    torch.manual_seed(0)
    mlp = kind(torch.nn.SiLU()).to(dtype)
    x = torch.randn(1, 16).to(dtype)
    with torch.no_grad():
        plain, many = mlp(x), mlp(x.expand(17, 16).contiguous())
        made = linears.Linears(mlp)
        assert "of 1 MLPs" in made.words
        got = mlp(x)
        assert launches == [2, 1]
        h = (silu(x.double() @ mlp.w1.weight.double().T) * (x.double() @ mlp.w3.weight.double().T)).to(dtype)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), h.double() @ mlp.w2.weight.double().T, rtol=4 * step, atol=4 * step)
        torch.testing.assert_close(got, plain, rtol=16 * step, atol=16 * step)
        assert torch.equal(mlp(x.expand(17, 16).contiguous()), many), "more than 16 rows are PyTorch's"
        mlp.w3.register_forward_hook(lambda module, args, out: 0 * out)
        assert not mlp(x).any(), "a layer that something listens to is called"
    made.undo()
    assert "forward" not in mlp.__dict__


def test_mlps_that_compute_something_else_are_left_alone():
    for mlp in (Scaled(torch.nn.SiLU()), UpFirst(torch.nn.GELU()), UpFirst(torch.nn.Linear(24, 24))):
        made = linears.Linears(mlp)
        assert not made.mlps and "MLPs" not in made.words
        made.undo()


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "lfm2", "jamba"])
def test_gated_mlps_of_transformers_are_found(name):
    model = built(name)
    with ssmgen.accelerate(model) as fast:
        assert fast._linears.mlps and any(f"of {len(fast._linears.mlps)} MLPs" in words for words in fast.done)


IDS = torch.arange(3, 13).view(2, 5)


@costly(4)
@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "qwen3_5", "kimi_linear", "zamba2", "jamba", "olmo_hybrid", "bailing_hybrid"])
def test_greedy_tokens_stay_the_models_with_shared_launches(name):
    """In f32, where one row is multiplied by skinny_linear. Also of a second prompt, when all groups are known."""
    model = built(name)
    how = {"max_new_tokens": 6, "do_sample": False}
    prompts = [IDS[:1], IDS[1:]]
    want = [model.generate(ids, attention_mask=torch.ones_like(ids), **how) for ids in prompts]
    with ssmgen.accelerate(model) as fast:
        got = [fast.generate(ids, 6) for ids in prompts]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
