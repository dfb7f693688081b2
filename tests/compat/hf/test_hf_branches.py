"""Multipliers and sums after the branches of a block, which accelerated models have in the launches of the branches' last products."""

from __future__ import annotations

import ast

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, known, modeling
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.compat.hf import between, branch_texts, branches, linears, scaled, siblings
from ssmgen.errors import NotBuiltError, PatchError
from tools.demo import ops

BF16, F32 = torch.bfloat16, torch.float32
IDS = torch.arange(3, 13).view(2, 5)
SIZES = {"mamba_n_heads": 8, "mamba_d_ssm": 128}  # so that all of in_proj's sizes are multiples of 8
MULTIPLIED = SIZES | {"ssm_out_multiplier": 0.7, "attention_out_multiplier": 1.4, "attention_in_multiplier": 0.6}


class Branch(torch.nn.Module):
    """Two products; its last one returns the result."""

    def __init__(self, bias=False):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(32, 32, bias=False) for _ in range(2))
        self.out = torch.nn.Linear(32, 32, bias=bias)

    def forward(self, x):
        y = self.a(x) + self.b(x)
        y = self.out(y)
        return y, None


class Changed(Branch):
    def forward(self, x):
        y = self.out(self.a(x) + self.b(x)) * 2
        return y


class Hidden(Branch):
    """Has the text of a branch, and not its results."""

    def __call__(self, x):
        return super().__call__(x)[0].clone(), None


@pytest.fixture
def products(monkeypatch):
    """(whether it has a scale, whether it has a residual) of each launch."""
    seen = []
    for module in (scaled, siblings):
        plain = module.skinny_linear

        def counted(*args, plain=plain, scale=None, residual=None, **more):
            seen.append((scale is not None, residual is not None))
            return plain(*args, scale=scale, residual=residual, **more)

        monkeypatch.setattr(module, "skinny_linear", counted)
    return seen


def in_branch(module, x, times=None, residual=None, into=1.0):
    return branches.branch(module, lambda: module(branches.multiplied(module, "x", x, into)), times, residual)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("times", "add", "into"), [(0.7, False, 1.0), (None, True, 1.0), (0.7, True, 1.0), (1.0, True, 0.6), (3, True, 0.6)]
)
def test_a_branch_is_finished_by_its_last_product(products, dtype, times, add, into):
    torch.manual_seed(0)
    module, x = Branch().to(dtype), torch.randn(1, 1, 32).to(dtype)
    residual = torch.randn(1, 1, 32).to(dtype) if add else None
    with torch.no_grad():
        plain, _ = in_branch(module, x, times, residual, into)
        assert not products
        exact = module.double()(x.double() * into)[0] * (1 if times is None else times) + (residual.double() if add else 0)
        made = linears.Linears(module.to(dtype))
        got, rest = in_branch(module, x, times, residual, into)
        of_last = (times not in (None, 1.0), add)
        assert products == ([(True, False)] if into != 1.0 else []) + [of_last]
        assert rest is None and got.dtype == dtype and not siblings._state.waiting
        assert (got - exact).abs().max() <= 1.5 * (plain - exact).abs().max() + 1e-6
        assert not torch.allclose(got.double(), exact * 1.01, rtol=1e-3, atol=1e-6)
        if dtype is BF16:
            more = torch.cat([x, torch.randn(2, 1, 32).to(dtype)])
            beside = None if residual is None else torch.cat([residual, torch.randn(2, 1, 32).to(dtype)])
            assert torch.equal(in_branch(module, more, times, beside, into)[0][:1], got), "a row has the same bits beside any others"
    made.undo()


def test_calls_that_no_product_can_finish_are_the_models_own(products):
    """More rows, biases with a multiplier, another dtype or shape, hooks, gradients, a changed forward."""
    torch.manual_seed(1)
    x, residual = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    hooked, heard = Branch(), Branch()
    cases = [
        (Branch(), torch.randn(1, 20, 32), residual.expand(1, 20, 32)),
        (Branch(bias=True), x, residual),
        (Branch(), x, residual.double()),
        (Branch(), x, torch.randn(32)),
        (Changed(), x, residual),
        (hooked, x, residual),
        (heard, x, residual),
    ]
    hooked.register_forward_hook(lambda module, args, out: (2 * out[0], None))
    heard.out.register_forward_hook(lambda module, args, out: 2 * out)
    for module, given, added in cases:
        want = module(given * 0.6)
        want = (want[0] if isinstance(want, tuple) else want) * 0.7 + added
        made = linears.Linears(module)
        with torch.no_grad():
            got = in_branch(module, given, 0.7, added, 0.6)
        torch.testing.assert_close(got[0] if isinstance(got, tuple) else got, want)
        assert not any(with_residual for _, with_residual in products)
        made.undo()
    products.clear()
    module = Branch()
    made = linears.Linears(module)
    in_branch(module, x, 0.7, residual, 0.6)[0].sum().backward()
    assert not products and module.out.weight.grad is not None
    made.undo()


def test_a_result_that_is_not_the_last_products_is_an_error():
    module, x = Hidden(), torch.randn(1, 1, 32)
    made = linears.Linears(module)
    with torch.no_grad(), pytest.raises(PatchError, match="Hidden changes the result of its last layer"):
        in_branch(module, x, 0.7)
    made.undo()


def test_kernels_that_may_not_be_compiled_are_a_warning_and_operations(monkeypatch):
    module, x, residual = Branch(), torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def refused(plain):
        def run(*args, scale=None, residual=None, **more):
            if scale is None and residual is None:
                return plain(*args, **more)
            raise NotBuiltError("skinny_linear:k=32", "sm_90a")

        return run

    with torch.no_grad():
        want = in_branch(module, x, 0.7, residual, 0.6)[0]
        made = linears.Linears(module)
        for owner in (scaled, siblings):
            monkeypatch.setattr(owner, "skinny_linear", refused(owner.skinny_linear))
        with pytest.warns(RuntimeWarning) as told:
            torch.testing.assert_close(in_branch(module, x, 0.7, residual, 0.6)[0], want)
        assert [str(w.message).partition(" is an")[0] for w in told] == [
            "a multiplier before linear layers",
            "a multiplier or a sum after a linear layer",
        ]
        torch.testing.assert_close(in_branch(module, x, 0.7, residual, 0.6)[0], want)
    made.undo()


MODELS = {
    "falcon_h1": MULTIPLIED,
    "granitemoehybrid": {"residual_multiplier": 0.3},
    "kimi_linear": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_model(products, name):
    """Also of two sequences, of which f32 products are PyTorch's, of padding, and after undo."""
    if not known(name):
        pytest.skip(f"this transformers has no {name}")
    model = built(name, **MODELS[name])
    forwards = {c: c.forward for c in {type(m) for m in model.modules()}}
    mask = torch.tensor([[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]])
    calls = [(IDS[:1], torch.ones_like(IDS[:1])), (IDS, torch.ones_like(IDS)), (IDS, mask)]

    def generated(generate):
        return [generate(ids, attention_mask=m, max_new_tokens=8, do_sample=False) for ids, m in calls]

    want = generated(model.generate)
    with ssmgen.accelerate(model) as fast:
        assert all(torch.equal(a, b) for a, b in zip(generated(fast.generate), want, strict=True))
    assert any(map(any, products)) and all(c.forward is f for c, f in forwards.items())
    products.clear()
    assert all(torch.equal(a, b) for a, b in zip(generated(model.generate), want, strict=True)) and not products


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Branch()


def test_a_residual_sum_is_in_the_product_of_steps_that_no_norm_follows(products):
    """The first sum shows whether a norm follows it. Prompts have the same bits in every call."""
    torch.manual_seed(0)
    block, x, residual = Block(), torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    added = []

    def run(x):
        return block.mixer(x)[0]

    with torch.no_grad():
        want = residual + run(x)
        made = linears.Linears(block)
        for given in (x, x, x.view(1, 32), x):
            products.clear()
            got = between.add(block, 0, residual.view(given.shape), lambda given=given: run(given), block.mixer)
            torch.testing.assert_close(got, want.view(given.shape))
            added.append((False, True) in products)
        assert added == [False, True, False, True]
        between._learn((block, 0), norm := torch.nn.Identity(), cast=False)
        assert between._norm_after(block, 0) is norm
        products.clear()
        torch.testing.assert_close(between.add(block, 0, residual, lambda: run(x), block.mixer), want)
        assert (False, True) not in products, "a norm that is known to follow has the sum in its launch"
    made.undo()


def test_multipliers_of_branches_cost_no_launch():
    counts = [ops.listed(built("falcon_h1", **more)).per_layer(False) for more in (SIZES, MULTIPLIED)]
    assert counts[0] == counts[1]


def test_a_multiplier_that_changes_is_the_one_that_multiplies():
    module, x = Branch(), torch.randn(1, 1, 32)
    with torch.no_grad():
        made = linears.Linears(module)
        one = in_branch(module, x, 0.5, into=0.5)[0]
        assert torch.equal(in_branch(module, x, 1.0, into=0.5)[0], 2 * one)
        assert torch.equal(in_branch(module, x, 0.5, into=1.0)[0], 2 * one)
    made.undo()


TEXTS = {
    "h = self.m(x); h = h * self.k": "h = _ssmgen_branch(self.m, lambda: self.m(x), self.k, None)",
    "h, _ = self.m(x); h = h * self.k; y = r + h": "h, _ = _ssmgen_branch(self.m, lambda: self.m(x), self.k, r); y = h",
    "h = self.m(x); h = r + h * self.k": "h = _ssmgen_branch(self.m, lambda: self.m(x), self.k, None); h = r + h",
    "h = self.m(y=x * self.k)": "h = _ssmgen_branch(self.m, lambda: self.m(y=_ssmgen_input(self.m, 'y', x, self.k)), None, None)",
    "h = self.m(x); h = h * self.k; y = r + h; z = h": "h = _ssmgen_branch(self.m, lambda: self.m(x), self.k, None); y = r + h; z = h",
    "h, r = self.m(x); h = h * self.k; y = r + h": "h, r = _ssmgen_branch(self.m, lambda: self.m(x), self.k, None); y = r + h",
    "h = self.m(x); h = r + h": "h = r + self.m(x)",
    "h = self.m(x); h = h + r": "h = r + self.m(x)",
    "h = self.m(x); h = h + h": "h = self.m(x); h = h + h",
    "h = self.m(x); y = r + h": "h = self.m(x); y = r + h",
    "h, _ = self.m(x); h = r + h": "h, _ = self.m(x); h = r + h",
    "h = self.m(x); x = h * self.k": "h = self.m(x); x = h * self.k",
    "h = self.m(x); h = h * k": "h = self.m(x); h = h * k",
    "h = m(x); h = h * self.k": "h = m(x); h = h * self.k",
}


@pytest.mark.parametrize("text", TEXTS)
def test_which_statements_are_changed(text):
    (function,) = ast.parse(f"def forward(self, x):\n  {text}").body
    branch_texts.fold(function)
    assert "; ".join(ast.unparse(statement) for statement in function.body) == TEXTS[text]


def test_a_multiplier_after_an_if_goes_into_both_branches():
    text = "def f(self, h):\n if h:\n  h = self.m(h)\n else:\n  h, _ = self.n(h)\n h = r + h * self.k"
    (function,) = ast.parse(text).body
    branch_texts.fold(function)
    test, total = function.body
    assert [ast.unparse(s) for s in (*test.body, *test.orelse, total)] == [
        "h = _ssmgen_branch(self.m, lambda: self.m(h), self.k, None)",
        "h, _ = _ssmgen_branch(self.n, lambda: self.n(h), self.k, None)",
        "h = r + h",
    ]
    (function,) = ast.parse(text.replace("else:\n  h, _ = self.n(h)", "elif x:\n  h = self.n(h)")).body
    plain = ast.unparse(function)
    branch_texts.fold(function)
    assert ast.unparse(function) == plain, "without an else, h may come from before"


@pytest.mark.parametrize(
    ("name", "kind", "last", "first"),
    [
        ("falcon_h1", "FalconH1Mixer", "out_proj", ()),
        ("falcon_h1", "FalconH1Attention", "o_proj", ("q_proj", "k_proj", "v_proj")),
        ("falcon_h1", "FalconH1MLP", "", ()),
        ("granitemoehybrid", "GraniteMoeHybridMLP", "output_linear", ()),
        ("kimi_linear", "KimiLinearMLP", "down_proj", ()),
        ("lfm2", "Lfm2MLP", "w2", ()),
    ],
)
def test_first_and_last_layers_of_transformers_modules(name, kind, last, first):
    if not known(name):
        pytest.skip(f"this transformers has no {name}")
    found = getattr(modeling(name), kind)
    assert (branch_texts.ending(found), branch_texts.first(found, "hidden_states")) == (last, first)
