"""skinny_linear with the norm before it, and a gate or a residual after it: the bits of separate calls, and the laws of all variants."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulated_calls import SM80, SM90, emulate
from kernel_laws import operations_before, spilled
from selection import costly, few
from skinny_cases import NAN, WITH_GXX, served, variants, wide

import ssmgen
from ssmgen.calls.operator import call_of
from ssmgen.emulator import EmulatorError
from ssmgen.families.skinny_linear.operands import OPERANDS
from ssmgen.families.skinny_linear.spec import FmaSpec, SkinnySpec
from ssmgen.spec.kernel import DType, Pdl, changed

I8, BF16, F16, F32 = torch.int8, torch.bfloat16, torch.float16, torch.float32
TYPES = [(BF16, BF16, F32), (F16, F16, F16), (BF16, I8, BF16), (F32, F32, F32)]  # of x, weights, norm and residual
IDS = ["bf16", "f16", "int8", "f32"]
GATED, RELU2 = "silu_and_mul", "relu2"


def made(types, rows=16, k=528, n=40, weights=1, out=None, odd=0, **given):
    """A call's arguments, with NaN between rows. given: the options of the call, `norm` and `residual` among them."""
    torch.manual_seed(1)
    dtype, stored, other = types
    x = wide(16, k, dtype=dtype, shift=odd)
    call = {"x": x.mul_(3)[:rows], "weight": [], "bias": [torch.randn(n) for _ in range(weights)], "out": []}
    if stored is I8:
        call["scale"] = [torch.rand(n) * k**-0.5 / 40 for _ in range(weights)]
    for _ in range(weights):
        w = torch.randint(-128, 128, (n, k + 16)).to(I8)[:, :k] if stored is I8 else wide(n, k, dtype=stored).mul_(k**-0.5)
        call["weight"].append(w)
    outputs = 1 if given.get("activation") == GATED else weights
    call["out"] = [wide(16, n, dtype=out or dtype)[:rows].fill_(NAN) for _ in range(outputs)]
    if given.pop("norm", False):
        call |= {"norm_weight": 1 + torch.randn(k).to(other) / 4, "eps": 1e-5}
    if given.pop("residual", False):
        call["residual"] = [wide(16, n, dtype=other)[:rows] for _ in range(outputs)]
    return call | given


def results(call, spec=None, arch=SM90):
    found = emulate(call_of(ssmgen.skinny_linear, **call), spec, arch)
    return [t.clone() for t in (found if isinstance(found, tuple) else (found,))]


def without(call, *names):
    return {name: given for name, given in call.items() if name not in names}


def equal(got, want):
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


ALL = {"norm": True, "residual": True, "activation": GATED, "weights": 2}
SQUARED = {"norm": True, "residual": True, "activation": RELU2, "weights": 3}
FORMS = [{"norm": True}, {"residual": True, "weights": 3}, {"activation": GATED, "weights": 2}, ALL, {"activation": RELU2}, SQUARED]
FORM_IDS = ["norm", "residual-three", "gated", "all", "relu2", "relu2-all"]


@costly(4)
@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
@pytest.mark.parametrize("types", TYPES, ids=IDS)
@pytest.mark.parametrize("k", [528, 8704])  # the second one has two blocks of the norm's sums
def test_the_norm_has_the_bits_of_rms_norm_before_the_product(types, k, arch):
    call = made(types, rows=3, k=k, norm=True)
    normed = emulate(call_of(ssmgen.rms_norm, call["x"], call["norm_weight"], 1e-5, out=torch.empty_like(call["x"])), arch=arch)
    separate = without(call, "norm_weight", "eps") | {"x": normed}
    assert equal(results(call, arch=arch), results(separate, arch=arch))


@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
@pytest.mark.parametrize("types", TYPES, ids=IDS)
def test_a_residual_is_added_to_the_f32_sum(types, arch):
    call = made(types, rows=5, weights=3, residual=True)
    sums = results(without(call, "residual") | {"out": [torch.empty(t.shape) for t in call["out"]]}, arch=arch)
    want = [(s + r.float()).to(types[0]) for s, r in zip(sums, call["residual"], strict=True)]
    assert equal(results(call, arch=arch), want)


@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
@pytest.mark.parametrize("types", TYPES, ids=IDS)
def test_the_gate_multiplies_f32_sums_that_have_the_bits_of_products_alone(types, arch):
    call = made(types, rows=5, weights=2, activation=GATED, out=F32)
    gate, up = results(without(call, "activation") | {"out": [torch.empty(5, 40) for _ in range(2)]}, arch=arch)
    (got,) = results(call, arch=arch)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    # Roundings of silu and of the product, and of the exponential's argument, which grows with the gate.
    assert ((got - exact).abs() <= (4 + gate.abs()) * torch.finfo(F32).eps * exact.abs()).all()
    (halved,) = results({**call, "bias": None, "weight": [call["weight"][0], torch.zeros_like(call["weight"][1])]}, arch=arch)
    assert not halved.any()


@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
@pytest.mark.parametrize("types", TYPES, ids=IDS)
@pytest.mark.parametrize("weights", [1, 3])
def test_relu2_squares_the_positive_f32_results_and_keeps_nan(types, weights, arch):
    call = made(types, rows=5, weights=weights, activation=RELU2, residual=True)
    call["bias"][0][3] = NAN
    plain = without(call, "activation", "residual") | {"out": [torch.empty(5, 40) for _ in range(weights)]}
    sums = results(plain, arch=arch)
    want = [(y.relu().square() + r.float()).to(types[0]) for y, r in zip(sums, call["residual"], strict=True)]
    got = results(call, arch=arch)
    assert all(y.lt(0).any() and y.gt(0).any() for y in sums)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(got, want, strict=True)) and got[0][:, 3].isnan().all()


@costly(4, 6)
@WITH_GXX
@pytest.mark.parametrize("types", TYPES, ids=IDS)
@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_a_row_has_the_same_bits_beside_any_others(types, form):
    whole = results(made(types, **form))
    for rows in range(1, 16):
        call = made(types, **form)
        for name in ("x", "residual", "out"):
            if name in call:
                call[name] = [t[-rows:] for t in call[name]] if isinstance(call[name], list) else call[name][-rows:]
        assert equal(results(call), [t[-rows:] for t in whole]), rows


@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
def test_other_rows_do_not_matter_even_if_they_are_nan(arch):
    clean, dirty = made(TYPES[0], rows=9, **ALL), made(TYPES[0], rows=9, **ALL)
    dirty["x"][3].fill_(NAN)
    dirty["residual"][0][8].fill_(NAN)
    kept = [0, 1, 2, 4, 5, 6, 7]
    (a,), (b,) = results(clean, arch=arch), results(dirty, arch=arch)
    assert torch.equal(a[kept], b[kept]) and torch.isnan(b[[3, 8]]).all()


@costly(4, 6)
@WITH_GXX
@pytest.mark.parametrize("types", TYPES, ids=IDS)
@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_variants_are_bit_equal(types, form):
    call = made(types, rows=3, k=1552, **form)
    problem, *_ = call_of(ssmgen.skinny_linear, **call).problem()
    specs = [s for s in variants(problem) if not s.violations(SM90)]
    want = results(call)
    assert len(specs) >= 2 and all(equal(results(call, spec), want) for spec in specs)


@WITH_GXX
@pytest.mark.parametrize("types", [TYPES[0], TYPES[3]], ids=["bf16", "f32"])
def test_x_that_is_not_aligned(types):
    aligned, odd = made(types, rows=3, **ALL), made(types, rows=3, odd=1, **ALL)
    odd["x"].copy_(aligned["x"])
    problem, *_ = call_of(ssmgen.skinny_linear, **odd).problem()
    assert problem.loads.value == "element" and equal(results(odd), results(aligned))


@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
def test_a_residual_may_be_the_output(arch):
    call = made((BF16, BF16, BF16), rows=9, weights=2, residual=True)
    want = results(call, arch=arch)
    assert equal(results({**call, "out": call["residual"]}, arch=arch), want)


@WITH_GXX
@pytest.mark.parametrize(
    ("types", "others"), [(TYPES[0], ()), (TYPES[3], ("norm_weight",))], ids=["bf16", "f32"]
)  # tensor cores also read the norm's weight
def test_only_weights_are_read_before_the_wait(types, others):
    call = call_of(ssmgen.skinny_linear, **made(types, rows=2, **ALL))
    for early in ("x + rows", *others, "residual", "bias"):

        def changed_text(text, early=early):
            return text.replace("  wait_for_upstream();", f"  (void)load({early});\n  wait_for_upstream();", 1)

        with pytest.raises(EmulatorError, match="wait"):
            emulate(call, change=changed_text)


def test_the_function_follows_torch():
    x, w, norm = torch.randn(2, 3, 40), [torch.randn(16, 40) for _ in range(2)], torch.rand(40)
    normed = torch.nn.functional.rms_norm(x, (40,), norm, 1e-6)
    gate, up = (torch.nn.functional.linear(normed, each) for each in w)
    residual = torch.randn(2, 3, 16)
    want = torch.nn.functional.silu(gate) * up + residual
    got = ssmgen.skinny_linear(x, w, norm_weight=norm, activation=GATED, residual=residual)
    assert isinstance(got, torch.Tensor) and torch.allclose(got, want, atol=1e-4)
    squared = ssmgen.skinny_linear(x, w, norm_weight=norm, activation=RELU2)
    assert all(torch.allclose(a, b.relu() ** 2, atol=1e-4) for a, b in zip(squared, (gate, up), strict=True))
    in_place = residual.clone()
    assert ssmgen.skinny_linear(x, w[0], norm_weight=norm, residual=in_place, out=in_place) is in_place
    assert torch.allclose(in_place, gate + residual, atol=1e-4)


@pytest.mark.parametrize("activation", [GATED, RELU2])
def test_compiled_calls_have_all_options(activation):
    w, norm, residual = [torch.randn(16, 48) for _ in range(2)], torch.rand(48), torch.randn(3, 16)

    def layer(x):
        outputs = [residual, residual] if activation == RELU2 else residual
        return ssmgen.skinny_linear(x, w, norm_weight=norm, eps=1e-5, activation=activation, residual=outputs)

    x = torch.randn(3, 48)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(got, layer(x), strict=True))


def test_what_is_wrong_is_said():
    x, w = torch.zeros(2, 48), torch.zeros(16, 48)

    def problems_of(*args, **kwargs):
        with pytest.raises(ssmgen.errors.ArgumentError) as e:
            ssmgen.skinny_linear(*args, **kwargs)
        return e.value.problems

    assert problems_of(x, w, activation=GATED) == ["activation is 'silu_and_mul' and weight has 1 tensors; expected 2, gate and up"]
    assert problems_of(x, [w, w], activation="gelu") == ["activation is 'gelu'; expected 'silu_and_mul', 'relu2' or None"]
    assert problems_of(x, [w, w[:8]], activation=GATED) == [
        "weight[1] is [8, 48] and weight[0] is [16, 48]; expected gate and up of one shape"
    ]
    out = [torch.zeros(2, 16) for _ in range(2)]
    assert problems_of(x, [w, w], activation=GATED, out=out) == ["out has 2 tensors; expected one for both weights"]
    assert problems_of(x, [w, w], residual=out[0]) == ["residual has 1 tensors; expected 2, one per weight"]
    assert problems_of(x, w, residual=out[0][:1]) == ["residual is [1, 16]; expected [*rows, N] = [2, 16]"]
    assert problems_of(x, [w, w], residual=[out[0], out[1].half()]) == ["residual has tensors of float16 and float32; expected one dtype"]
    assert problems_of(x, w, norm_weight=torch.ones(40)) == ["norm_weight is [40]; expected [K] = [48]"]
    assert problems_of(x, w, norm_weight=torch.ones(48), eps=-1.0)[0].startswith("eps is -1.0; expected a number of 0 or more")
    shared = torch.zeros(2, 32)
    assert problems_of(x, w, residual=shared[:, 8:24], out=shared[:, :16]) == [
        "out overlaps residual in memory; expected separate memory, since out is written"
    ]
    with pytest.raises(ssmgen.errors.ArgumentError, match=r"out\[1\] is None; expected a tensor for each weight"):
        tensors = OPERANDS.Tensors(x=x, weight=w, weight_1=w, out=out[0])
        torch.ops.ssmgen.skinny_linear(*tensors, None, 1e-6, None)
    with pytest.raises(ssmgen.errors.ArgumentError, match="norm_weight does not begin at a multiple of 16 bytes"):
        ssmgen.explain(ssmgen.skinny_linear, x, w, norm_weight=torch.ones(49)[1:], arch="sm_90a")


def test_specs_that_cannot_be_are_refused_in_words():
    assert any("expected 2, gate and up" in fault for fault in SkinnySpec(k=512, gated=True, tiles=1, stages=4).violations(SM90))
    both = SkinnySpec(k=512, gated=True, relu2=True, weights=2, tiles=1, stages=4)
    assert both.violations(SM90) == ["gated and relu2 are yes; expected at most one activation"]
    two = FmaSpec(k=512, x=DType.F32, out=DType.F32, weights=2, gated=True, tile=1)
    assert two.violations(SM90) == ["tile is 1; expected 2, 4 or 8: half of each of two weights"]
    assert not changed(two, tile=2).violations(SM90)


@pytest.mark.parametrize("rows", [8, 16])
def test_tensor_cores_serve_all_sizes_with_all_options(rows):
    for k, n, stored in itertools.product((16, 4096, 28672), (8, 18560, 262144), (BF16, I8)):
        call = made((BF16, stored, F32), rows=rows, k=16, **ALL)
        problem, *_ = call_of(ssmgen.skinny_linear, **call).problem()
        assert isinstance(served(changed(problem, k=k), n), SkinnySpec), (k, n)


def posed(types, rows, k, **form):
    """A problem with rows of k elements."""
    problem, *_ = call_of(ssmgen.skinny_linear, **made(types, rows=rows, k=16, **form)).problem()
    return changed(problem, k=k)


# (architecture, elements of a row, rows)
SERVED = [(SM90, 8192, 16), (SM90, 4096, 16), (SM80, 4096, 8), (SM90, 8192, 8), (SM90, 4096, 8)]


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("form", few(SERVED, 2), ids=lambda form: f"{form[0]}-k{form[1]}-{form[2]}")
def test_served_variants_do_not_spill(form):
    arch, k, rows = form
    assert not spilled((served(posed(types, rows, k, **ALL), 18560, arch), arch) for types in (TYPES[:3] if arch is SM90 else TYPES))


@pytest.mark.parametrize("types", TYPES[:3], ids=IDS[:3])
def test_the_machine_loads_nothing_before_the_wait(types):
    """Weights come by bulk copies, which are no loads."""
    for form in ({}, ALL, SQUARED):
        spec = changed(served(posed(types, 8, 4096, **form), 18560), pdl=Pdl.WAIT)
        assert operations_before(spec, ("LDG",)) == ["ACQBULK"]
