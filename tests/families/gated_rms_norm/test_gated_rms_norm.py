"""gated_rms_norm without a GPU: reference, emulated kernels, laws."""

from __future__ import annotations

import inspect
import random
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from bits import same as equal
from emulated_calls import SM90, emulate, needs_emulator
from norm_cases import BF16, F16, F32, GDN, KDA, MAMBA, PLAIN, Case, assert_matches, expected, make, matrix
from selection import costly, covering
from subjects import is_accurate
from varying import named

import ssmgen
from ssmgen.families.gated_rms_norm import call as op
from ssmgen.families.gated_rms_norm import spec as kernels
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, Pdl


@named(*matrix())
def test_reference_is_within_rounding_of_float64(case):
    call = make(case, "cpu")
    want = expected(call)
    assert call.run() is call.out
    assert_matches(call, want)


def test_reference_against_the_formulas():
    x, z, w = torch.randn(5, 4, 64), torch.randn(5, 4, 64), torch.randn(4 * 64)
    silu = torch.nn.functional.silu
    norm = torch.nn.functional.rms_norm
    got = ssmgen.gated_rms_norm(x, z, w, 1e-3)
    torch.testing.assert_close(got, norm(x * silu(z), (64,), eps=1e-3) * w.view(4, 64))
    got = ssmgen.gated_rms_norm(x.flatten(1), z.flatten(1), w, 1e-3, group_size=64)
    torch.testing.assert_close(got.view_as(x), norm(x * silu(z), (64,), eps=1e-3) * w.view(4, 64))
    got = ssmgen.gated_rms_norm(x, z, w[:64], norm_before_gate=True, activation="sigmoid")
    torch.testing.assert_close(got, norm(x, (64,), w[:64], 1e-5) * torch.sigmoid(z))
    torch.testing.assert_close(ssmgen.gated_rms_norm(x[0, 0]), norm(x[0, 0], (64,), eps=1e-5))


def test_reference_against_the_modules_of_transformers():
    pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    x, z = torch.randn(2, 3, 256), torch.randn(2, 3, 256)

    def module(cls, size, group_size, eps):
        grouped = "group_size" in inspect.signature(cls).parameters  # releases differ
        made = cls(size, eps=eps, **{"group_size": group_size} if grouped else {})
        torch.nn.init.normal_(made.weight)
        return made, made.weight.detach()

    with torch.no_grad():
        theirs, w = module(MambaRMSNormGated, 256, 256, 1e-6)
        torch.testing.assert_close(ssmgen.gated_rms_norm(x, z, w, 1e-6), theirs(x, z))
        theirs, w = module(Zamba2RMSNormGated, 256, 64, 1e-5)
        torch.testing.assert_close(ssmgen.gated_rms_norm(x, z, w, 1e-5, group_size=64), theirs(x, z))
        theirs, w = module(Qwen3_5RMSNormGated, 64, 64, 1e-6)
        x, z = x.view(2, 3, 4, 64), z.view(2, 3, 4, 64)
        torch.testing.assert_close(ssmgen.gated_rms_norm(x, z, w, 1e-6, norm_before_gate=True), theirs(x, z))


def features(case: Case) -> set[tuple]:
    """The generated text's inputs, with each operand's dtype separately."""
    call = make(case, "cpu")
    if not call.out.numel():
        return {("rows", 0)}
    problem = call.problem
    spec = registry.select(op.OPERATOR, problem, op.size_of(call.views), SM90, True)
    held = {f.name: getattr(problem, f.name) for f in fields(problem) if f.name != "size"}
    derived = spec.constants()
    held |= {n: derived[n] for n in ("vector", "late_weight")} | {"team": min(spec.team, 32), "several": spec.teams > 1}
    pairs = {("parts", derived["whole"], spec.team > 32, spec.passes > 1), ("warps", derived["warps"] == derived["warp_sums"])}
    return pairs | set(held.items())


@needs_emulator
@named(*covering(matrix(), features))
def test_kernels_are_within_rounding_of_float64(case):
    is_accurate("gated_rms_norm", case, "cpu", emulate)


@needs_emulator
@named(MAMBA, KDA)
def test_without_pdl_for_an_old_architecture(case):
    is_accurate("gated_rms_norm", case, "cpu", partial(emulate, arch=Arch.parse("sm_80")))


VARIED = [
    replace(GDN, id="gdn-128", rows=(2,)),
    replace(GDN, id="gdn-100-odd", rows=(2,), size=100, layout="odd", x=F16),
    replace(KDA, id="kda-256-f32", rows=(2,), size=256, x=F32, out=F32),
    replace(MAMBA, id="mamba-1024", rows=(1,)),
    replace(MAMBA, id="mamba-1280", rows=(1,), size=1280, in_place="x"),
    replace(PLAIN, id="plain-3000", rows=(1,), size=3000, out=F32),
]


@costly(3)
@needs_emulator
@named(*VARIED)
def test_variants_are_bit_equal(case):
    """f32 outputs agree to the last bit: the sums are the same, in the same order."""
    case = replace(case, out=F32) if not case.in_place else case
    specs = [s for s in kernels.space(make(case, "cpu").problem, SM90) if s.pdl is Pdl.TRIGGER_LOADED]
    assert len({(s.vec, s.team, s.threads) for s in specs}) == len(specs) >= 4
    shapes = list({(s.vec, s.team): s for s in specs}.values())
    shapes = random.Random(0).sample(shapes, min(6, len(shapes)))
    first = None
    for spec in shapes:
        call = make(case, "cpu")
        emulate(call, spec)
        first = first or call
        assert equal(call.out, first.out), f"{spec} differs from {shapes[0]}"


# Laws, of kernels.


@needs_emulator
def test_position_in_the_batch_changes_nothing():
    """The last row alone, as a different number of groups in a block."""
    case = replace(GDN, rows=(7,), out=F32)
    whole, alone = make(case, "cpu"), make(replace(case, rows=(1,)), "cpu")
    for name in ("x", "gate", "weight"):
        alone.operands[name].copy_(whole.operands[name][6:] if name != "weight" else whole.operands[name])
    emulate(whole)
    emulate(alone)
    assert whole.problem == alone.problem and equal(alone.out, whole.out[6:])


@needs_emulator
def test_groups_in_an_axis_of_their_own_or_in_one_are_the_same():
    flat = make(MAMBA, "cpu")
    emulate(flat)
    apart = make(replace(MAMBA, flat=False), "cpu")
    emulate(apart)
    assert flat.problem == apart.problem and equal(flat.out, apart.out.flatten(1))


@needs_emulator
def test_a_group_does_not_see_its_neighbours():
    call = make(replace(GDN, rows=(5,), size=64), "cpu")
    want = expected(call)
    call.kwargs["x"][2, 1] = torch.nan
    call.kwargs["gate"][4, 3] = torch.inf
    emulate(call)
    others = torch.ones(5, 4, dtype=torch.bool)
    others[2, 1] = others[4, 3] = False
    assert call.out[2, 1].isnan().all()
    excess = (call.out.double() - want.out).abs()[others] / want.bound[others]
    assert excess.max() <= 1


@needs_emulator
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_a_closed_gate_is_zero(dtype):
    """If the gate's factor underflows, x becomes zero, and zeros normalise to zeros."""
    case = replace(MAMBA, gate=dtype, x=F32, out=F32)
    call = make(case, "cpu")
    call.kwargs["gate"].fill_(-1e4)
    emulate(call)
    assert not call.out.any()
