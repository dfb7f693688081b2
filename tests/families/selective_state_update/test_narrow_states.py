"""Narrow states: the reference, the public function's errors, and the emulated kernels."""

from __future__ import annotations

import random

import pytest
import torch
from emulated_calls import SM90, emulate, needs_emulator
from narrow_cases import E4M3, F32, I8, I16, WRITTEN, Call, Case, assert_matches, bits, matrix
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen.calls.checks import NARROW
from ssmgen.compile.render import environment
from ssmgen.emulator import run_source
from ssmgen.engine.narrow_reference import narrowed, rounded_narrow, widened
from ssmgen.errors import ArgumentError
from ssmgen.families.selective_state_update.spec import space
from ssmgen.select import registry
from ssmgen.select.catalog import parse
from ssmgen.select.models import Wanted, find_model
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, KernelSpec, Narrow, Param
from ssmgen.spec.needs import Needs

pytestmark = pytest.mark.usefixtures("one_thread")
TYPES = list(NARROW)


@costly(20)
@pytest.mark.parametrize("case", matrix(), ids=lambda c: c.id)
def test_reference_is_within_a_step_of_float64(case):
    call = Call(case)
    call.run()
    assert_matches(call)


@costly(6, 15)
@needs_emulator
@pytest.mark.parametrize("case", matrix(), ids=lambda c: c.id)
def test_kernels_are_within_a_step_of_float64(case):
    call = Call(case)
    emulate(call)
    assert_matches(call)


SMALL = {"heads": 2, "groups": 1, "headdim": 32, "d_state": 64, "batch": 2}
VARIED = [
    Case("i8", **SMALL), Case("e4m3", **SMALL, state=E4M3, noise=2), Case("i16", **SMALL, state=I16),
    Case("several", **SMALL, tokens=2, kept=I16),
]  # fmt: skip


@costly(1)
@needs_emulator
@pytest.mark.parametrize("case", VARIED, ids=lambda c: c.id)
def test_variants_are_bit_equal(case):
    """The variants differ in their lane maps; their other choices are drawn."""
    specs = list(space(Call(case).public.problem()[0], SM90))
    random.Random(1).shuffle(specs)
    results = []
    for spec in [*{(s.lanes, s.vec, s.ilp): s for s in specs}.values()][:6]:
        call = Call(case)
        emulate(call, spec)
        results.append([bits(call.named[n]) for n in WRITTEN if n in call.named])
        assert all(map(torch.equal, results[-1], results[0])), spec


OWNED = [
    Case("i8-split-z", **SMALL, dst="row", z=True), Case("e4m3-noise", **SMALL, state=E4M3, noise=3), Case("n128", headdim=32, batch=2),
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("case", OWNED, ids=lambda c: c.id)
def test_who_owns_a_rows_scalars_changes_no_bit(case):
    """A lane for all steps of its block, or one in each."""
    specs = list(space(Call(case).public.problem()[0], SM90))
    once, each = (next(s for s in specs if s.owned_once is owned and s.tile > s.rows_per_step) for owned in (True, False))
    results = []
    for spec in (once, each):
        call = Call(case)
        emulate(call, spec)
        assert_matches(call)
        results.append([bits(call.named[n]) for n in WRITTEN if n in call.named])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", TYPES)
def test_what_a_row_is_stored_as(dtype):
    """The greatest is the type's largest, others are half a step away at most; rows of zeros, of the tiniest and of no numbers."""
    rows = torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 64)[:, None]
    stored, scale = narrowed(rows, dtype)
    most = NARROW[dtype].largest
    assert stored.float().abs().amax(-1).eq(most).all() and scale.allclose(rows.abs().amax(-1) / most)
    again, _ = narrowed(widened(stored, scale, F32), dtype)
    assert torch.equal(bits(again), bits(stored)), "what is stored stays"
    error = (widened(stored, scale, torch.float64) - rows.double()).abs() / scale.double()[..., None]
    assert (error <= (0.5 if dtype != E4M3 else rows.abs() / scale[..., None] / 16 + 2.0**-10) * (1 + 1e-5) + most * 2.0**-22).all()
    odd = torch.zeros(1, 4, 8)
    odd[0, 1], odd[0, 2, 3], odd[0, 3, 5] = 2.0**-140, float("inf"), float("nan")
    stored, scale = narrowed(odd, dtype)
    back = widened(stored, scale, F32)
    assert not back[0, 0].any() and not back[0, 1].any() and scale[0, :2].gt(0).all()
    assert not back[0, 2:].isfinite().any()


@pytest.mark.parametrize("dtype", TYPES)
def test_noise_has_no_bias_and_leaves_what_fits(dtype):
    g = torch.Generator().manual_seed(3)
    n = 2**17
    for value in (0.3, -1.7, 100.25, -0.001, 126.99):
        random = torch.randint(0, 2**32, (n,), generator=g)
        found = rounded_narrow(torch.full((n,), value), dtype, random).float()
        step = max(abs(value) / 8, 2.0**-9) if dtype == E4M3 else 1
        assert len(found.unique()) <= 2 and abs(found.double().mean() - value) < 5 * 0.5 * step / n**0.5 + 2.0**-16
    every = torch.arange(-128, 128, dtype=torch.int16).to(I8).view(dtype if dtype != I16 else I8).to(F32)
    every = every[every.isfinite() & (every.abs() <= NARROW[dtype].largest)]
    for word in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        assert torch.equal(rounded_narrow(every, dtype, torch.full((len(every),), word)).float(), every)


TEXT = """
{% include "lib/types.cuh.j2" %}
constexpr int kPhiloxRounds = 1;
{% include "lib/ptx.cuh.j2" %}
{% include "lib/memory.cuh.j2" %}
{% include "lib/stochastic.cuh.j2" %}
{% include "lib/narrow.cuh.j2" %}
extern "C" __global__ void narrow(const f32* values, const u32* words, TYPE* nearest, TYPE* noisy, f32* back, u32 n) {
  const u32 i = 4 * (blockIdx.x * 256 + threadIdx.x);
  if (i >= n) return;
  float v[4], r[4];
  unpack(load_vector<f32, 4>(values + i), v);
  Pack<TYPE, 4> packed, rounded;
  pack_scaled(v, packed, 1.f);
  store_vector(nearest + i, packed);
  unpack(packed, r);
  Pack<f32, 4> wide;
  pack(r, wide);
  store_vector(back + i, wide);
  for (int j = 0; j < 4; ++j) v[j] = __uint_as_float(round_stochastic(TYPE{}, v[j], load_u32(words + i + j)));
  if constexpr (sizeof(TYPE) == 1)
    rounded.word[0] = __float_as_uint(v[0]) | __float_as_uint(v[1]) << 8 | __float_as_uint(v[2]) << 16 | __float_as_uint(v[3]) << 24;
  else
    for (int j = 0; j < 4; j += 2) rounded.word[j / 2] = __float_as_uint(v[j]) | __float_as_uint(v[j + 1]) << 16;
  store_vector(noisy + i, rounded);
}
"""


def converted(values: Tensor, random: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(to nearest, with noise, the former in f32) of values in steps, as the kernels' text makes them."""

    class Converting(KernelSpec):
        def parameters(self) -> list[Param]:
            given = (
                ("values", "f32", True),
                ("words", "u32", True),
                ("nearest", kind, False),
                ("noisy", kind, False),
                ("back", "f32", False),
            )
            return [*(Param.pointer(*p) for p in given), Param.u32("n")]

    kind = NARROW[dtype].value
    nothing = {"needs": Needs(narrow=True), "narrow_noise": True} | dict.fromkeys(("clusters", "waits", "triggers"), False)
    source = environment().from_string(TEXT.replace("TYPE", kind)).render(dtypes={kind}, rounded={kind}, **nothing)
    named = {"values": values, "words": random.to(torch.int32), "nearest": torch.zeros(len(values), dtype=dtype)}
    named |= {"noisy": torch.zeros(len(values), dtype=dtype), "back": torch.zeros(len(values))}
    packed = Arguments(Converting(), {"n": len(values)}).at([t.data_ptr() for t in named.values()])
    run_source(source, "narrow", -(-len(values) // 1024), 256, packed, named, ("nearest", "noisy", "back"))
    return named["nearest"], named["noisy"], named["back"]


@needs_emulator
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernels_text_rounds_as_the_reference_does(dtype):
    """Bit for bit, over all sizes, near every 8-bit number and near the middle of each two neighbours."""
    g, most = torch.Generator().manual_seed(7), NARROW[dtype].largest
    some = torch.arange(-128, 128, dtype=torch.int16).to(I8).view(dtype if dtype != I16 else I8).float().nan_to_num(0)
    middle = (some.sort().values[1:] + some.sort().values[:-1]) / 2
    values = torch.cat(
        [some, middle, middle * (1 + 2.0**-20), (torch.rand(1000, generator=g) * 2 - 1) * most, torch.randn(1000, generator=g).pow(9)]
    )
    values = values[: len(values) // 4 * 4].clamp(-most, most)
    random = torch.randint(0, 2**32, (len(values),), generator=g)
    nearest, noisy, back = converted(values, random, dtype)
    want = values.clamp(-448, 448).to(dtype) if dtype == E4M3 else values.round().to(dtype)
    assert torch.equal(back, nearest.float()) and torch.equal(back, want.float())
    assert torch.equal(noisy.float(), rounded_narrow(values, dtype, random).float())


def test_a_state_that_only_decays_keeps_its_elements():
    """A token without an input changes only scales, for all roundings."""
    for dtype in TYPES:
        call = Call(Case("one", state=dtype, index=None))
        call.run()
        call.named["x"].zero_()
        before, scale = call.named["state"].clone(), call.named["state_scale"].clone()
        call.run()
        assert torch.equal(bits(call.named["state"]), bits(before)) and (call.named["state_scale"] < scale).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state_scale": None}, "state is int8 and state_scale is None; expected a float32 scale for each row"),
        ({"state": torch.zeros(8, 4, 64, 128)}, "state_scale is given and state is float32; expected int16, int8 or float8_e4m3fn"),
        ({"state_scale": torch.zeros(8, 4, 64).half()}, "state_scale is float16; expected float32"),
        ({"state_scale": torch.zeros(8, 4)}, r"state_scale is \[8, 4\]; expected \[slots, heads, headdim\] = \[8, 4, 64\]"),
        ({"state_scale": torch.zeros(1, 4, 64).expand(8, 4, 64)}, "state_scale has strides .* two of its elements share memory"),
        ({"intermediate_state_scales": torch.zeros(4, 1, 4, 64)}, "intermediate_state_scales is given without intermediate_states"),
        ({"x": torch.zeros(4, 4, 64, dtype=I8)}, "x is torch.int8; expected float32, float16 or bfloat16"),
        ({"state": torch.zeros(8, 4, 64, 128, dtype=torch.float8_e5m2)}, "state is torch.float8_e5m2; expected float32"),
    ],
)  # fmt: skip
def test_says_what_is_wrong(change, words):
    call = Call(Case("one"))
    given = call.kwargs | change
    before = {n: t.clone() for n, t in given.items() if n in WRITTEN and t is not None}
    with pytest.raises(ArgumentError, match=words):
        ssmgen.selective_state_update(**given)
    assert all(torch.equal(bits(given[n]), bits(t)) for n, t in before.items())


def test_models_ask_for_them_where_they_are_served():
    asked = find_model("nemotron-h-8b").asked(Wanted(states=(Narrow.I8,), replay=6))
    states = {type(p).__name__: p.state for p in asked if hasattr(p, "state")}
    assert states["SsuProblem"] is states["ReplayProblem"] is Narrow.I8 and "Mamba2LayerProblem" not in states
    assert not any(p.faults() for p in asked)
    text = str(registry.select("selective_state_update", asked[0], 64, SM90, True))
    assert "state=i8" in text and str(parse(text)) == text


def test_fp8_needs_its_conversions():
    problem = Call(Case("one", state=E4M3)).public.problem()[0]
    found = registry.explain("selective_state_update", problem, 4, Arch.parse("sm_80"), False)
    assert found.chosen is None and any("arch is sm_80; expected sm_89 or later for fp8 states" in reason for reason in found.reasons)
    assert registry.explain("selective_state_update", problem, 4, Arch.parse("sm_89"), False).chosen
