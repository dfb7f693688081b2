"""MLPs with relu^2, and gated ones whose gate and up are one layer: `accelerate` has the activation in the product's launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built
from hf_cases import nothing_stays_patched as nothing_stays_patched
from transformers.activations import ACT2FN

import ssmgen
from ssmgen.compat.hf import gated, linears
from ssmgen.errors import NotBuiltError

Linear = torch.nn.Linear
IDS = torch.arange(3, 13).view(2, 5)


class Squared(torch.nn.Module):
    def __init__(self, act=None, bias=False):
        super().__init__()
        self.up, self.down, self.act = Linear(16, 24, bias=bias), Linear(24, 16, bias=bias), act or ACT2FN["relu2"]

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Halves(torch.nn.Module):
    def __init__(self, act=None, bias=False, width=48):
        super().__init__()
        self.both, self.out, self.act = Linear(16, width, bias=bias), Linear(width // 2, 16, bias=bias), act or torch.nn.SiLU()

    def forward(self, x):
        x = self.both(x)
        parts = x.chunk(2, dim=-1)
        x = self.act(parts[0]) * parts[1]
        x = self.out(x)
        return x


class Unpacked(Halves):
    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.out(up * self.act(gate))


class UpFirst(Halves):
    def forward(self, x):
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.out(up * self.act(gate))


class Twice(Squared):
    def forward(self, x):
        return self.down(self.act(self.up(x)) * self.up(x))


@pytest.fixture
def launches(monkeypatch):
    """(weights, activation) of each call by MLPs."""
    seen, plain = [], gated.skinny_linear

    def counted(x, weight, *rest, activation=None, **more):
        seen.append((len(weight), activation))
        return plain(x, weight, *rest, activation=activation, **more)

    monkeypatch.setattr(gated, "skinny_linear", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "form"), [(Squared, (1, "relu2")), (Halves, (2, "silu_and_mul")), (Unpacked, (2, "silu_and_mul"))])
def test_the_activation_is_in_the_launch(launches, kind, form, bias, dtype):
    torch.manual_seed(0)
    mlp, x = kind(bias=bias).to(dtype), torch.randn(1, 16).to(dtype)
    with torch.no_grad():
        exact, plain = mlp.double()(x.double()), mlp.to(dtype)(x)
        many = mlp(x.expand(17, 16).contiguous())
        made = linears.Linears(mlp)
        assert made.mlps == [mlp] and "of 1 MLPs" in made.words
        got = mlp(x)
        assert launches == [form] and got.dtype == dtype
        assert (got - exact).abs().max() <= 1.5 * (plain - exact).abs().max() + 1e-6
        made.load([1])
        assert launches == [form] * 2
        assert torch.equal(mlp(x.expand(17, 16).contiguous()), many), "more than 16 rows are PyTorch's"
        if dtype is torch.bfloat16:
            batch = torch.cat([x, torch.randn(2, 16).to(dtype)])
            assert torch.equal(mlp(batch)[:1], got), "a row has the same bits beside any others"
        mlp.act.register_forward_hook(lambda module, args, out: 0 * out)
        assert torch.equal(mlp(x), mlp.get_submodule("down" if kind is Squared else "out")(torch.zeros(1, 24, dtype=dtype)))
    made.undo()
    assert "forward" not in mlp.__dict__


def test_mlps_that_compute_something_else_are_left_alone():
    for mlp in (Squared(torch.nn.ReLU()), Squared(torch.nn.SiLU()), Halves(ACT2FN["relu2"]), Halves(width=24), UpFirst(), Twice()):
        made = linears.Linears(mlp)
        assert not made.mlps, type(mlp)
        made.undo()


@pytest.mark.parametrize(("name", "form"), [("nemotron_h", (1, "relu2")), ("granitemoehybrid", (2, "silu_and_mul"))])
def test_tokens_are_those_of_the_model_and_undo_restores_it(launches, name, form):
    model = built(name)
    want = model.generate(IDS[:1], attention_mask=torch.ones_like(IDS[:1]), max_new_tokens=8, do_sample=False)
    with ssmgen.accelerate(model) as fast:
        assert fast._linears.mlps and torch.equal(fast.generate(IDS[:1], 8), want)
    assert set(launches) == {form} and not any("forward" in m.__dict__ for m in model.modules())


def test_a_kernel_that_may_not_be_compiled_is_a_warning_and_torchs_activation(monkeypatch):
    mlp, x = Squared(), torch.randn(1, 16)
    with torch.no_grad():
        want = mlp(x)
        made = linears.Linears(mlp)

        def refused(*args, **more):
            raise NotBuiltError("skinny_linear:k=16", "sm_90a")

        monkeypatch.setattr(gated, "skinny_linear", refused)
        with pytest.warns(RuntimeWarning, match="the layers of an MLP multiply one by one"):
            torch.testing.assert_close(mlp(x), want)
        torch.testing.assert_close(mlp(x), want)
    made.undo()
