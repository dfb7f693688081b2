"""gated_rms_norm: specs, the text and machine code of kernels, and that wrong ones are found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, product

import kernel_laws as laws
import pytest
from emulated_calls import SM90, needs_emulator
from norm_cases import F32, GDN, MAMBA
from selection import costly
from subjects import a_mistake_is_found
from test_check import edited as rendered

from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.engine.norm import Activation
from ssmgen.engine.norm_kernel import NormProblem
from ssmgen.families.gated_rms_norm import spec as kernels
from ssmgen.families.gated_rms_norm.spec import MAX_SIZE, NormSpec
from ssmgen.select import registry
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, DType, Loads, Pdl, parse_spec

ARCHS = [Arch.parse(a) for a in ("sm_80", "sm_90a", "sm_100a", "sm_120")]

# Specs and text.

HEAD = NormSpec(size=128, grouped=True, norm_first=True, vec=8, team=16)
WARP = NormSpec(size=256, norm_first=True, activation=Activation.SIGMOID, vec=8, team=32)
BLOCK = NormSpec(size=1280, vec=8, team=160, threads=160)
LONG = NormSpec(size=16384, x=DType.F32, grouped=True, vec=4, team=1024, threads=1024)
ODD = NormSpec(size=100, gate=None, weight=None, out=DType.F32, loads=Loads.ELEMENT, vec=4, team=8)


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (HEAD, {"size": 130}, " with size 130, no multiple of 4; expected loads=element"),
        (HEAD, {"size": 16388}, "size is 16388; expected 1 … 16384"),
        (ODD, {"norm_first": True}, "norm_first is yes and gate is none; expected a gate"),
        (ODD, {"activation": Activation.SIGMOID}, " and gate is none; expected a gate"),
        (HEAD, {"vec": 2}, "vec is 2; expected 4 or 8"),
        (ODD, {"vec": 8}, "size is 100; expected a multiple of vec 8"),
        (HEAD, {"team": 12}, "team is 12; expected 1, 2, 4, 8 or 16 threads, or 32 … 1024 in steps of 32"),
        (BLOCK, {"team": 2048}, "team is 2048; expected 1, 2, 4, 8 or 16 threads"),
        (BLOCK, {"team": 96, "threads": 96}, "team is 96 with 2 passes; expected a power of two"),
        (HEAD, {"threads": 48}, "threads is 48; expected 32 … 1024 in steps of 32"),
        (BLOCK, {"team": 128}, "threads is 160; expected a multiple of team 128"),
        (BLOCK, {"team": 64, "threads": 128}, "; expected 64, as many as meet at the team's barrier"),
        (HEAD, {"team": 2}, "a thread holds 64 elements of its group; expected at most"),
        (HEAD, {"team": 4, "threads": 1024}, "a thread holds 32 elements of its group; expected at most"),
    ],
)
def test_violations_in_words(spec, change, words):
    laws.says_its_violation(spec, change, words)


def test_violations_of_architectures():
    laws.says_its_architectures(HEAD)


TEXTS = [HEAD, WARP, BLOCK, LONG, ODD]


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_wait_precedes_every_access_and_the_launch_attribute_follows_the_text(spec, pdl):
    laws.waits_first(spec, pdl)


@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_layout_of_the_text(spec):
    laws.is_well_formed(spec)


def test_what_is_switched_off_is_not_in_the_text():
    text = render(ODD, SM90).split("#define DEVICE")[1]
    for word in ("gate", "weight", "silu", "sigmoid", "divide", "__shared__", "__syncthreads", "struct f16", "griddepcontrol.wait"):
        assert word not in text, word
    assert "__syncthreads" not in render(HEAD, SM90) and "inside" not in render(BLOCK, SM90) and "units" not in render(BLOCK, SM90)


def test_a_family_can_end_with_this_norm():
    """Its operands have their own names; the template uses the norm's names."""

    @dataclass(frozen=True, kw_only=True)
    class Behind(NormSpec):
        family = "behind"

        def operands(self) -> list[str]:
            return [{"x": "y", "gate": "z"}.get(role, role) for role in self.roles()]

    spec = Behind(size=1280, vec=8, team=160, threads=160)
    assert spec.operands() == ["y", "z", "weight", "out"] and spec.parameters() == BLOCK.parameters()
    ours, theirs = (render(s, SM90).split('extern "C"')[1].split("(\n")[1] for s in (BLOCK, spec))
    assert ours == theirs


# Wrong kernels.

CHECKED = {
    "head": "size=128,vec=8,team=16,grouped=yes,norm_first=yes,pdl=trigger_loaded",
    "lane": "size=8,vec=8,team=1,threads=32,activation=sigmoid",
    "warp": "size=200,vec=4,team=32,norm_first=yes,weight=f32",
    "block": "size=1280,vec=8,team=160,threads=160,x=f16,gate=f16,out=f16,pdl=trigger_top",
    "first": "size=1024,vec=8,team=128,threads=128,gate=none,residual=bf16,sum=f32,pdl=trigger_first",
    "passes": "size=1280,vec=4,team=64,threads=64,grouped=yes",
    "part": "size=3000,vec=4,team=256,threads=256,out=f32",
    "odd": "size=100,vec=4,team=8,gate=none,weight=none,x=f32,loads=element",
}


@needs_emulator
@pytest.mark.parametrize("name", CHECKED)
def test_check_of_variants(name):
    spec = parse_spec(f"gated_rms_norm:{CHECKED[name]}", SPECS)
    for batch in (1, 4):
        assert check(spec, SM90, batch).passed


@needs_emulator
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("head", "* silu(", "* 1.01f * silu("),
        ("passes", "1.f / kSize, eps", "1.1f / kSize, eps"),
        ("part", "sum_over_lanes<kWarpSums>", "sum_over_lanes<kWarpSums / 2>"),
        ("odd", "1.f / kSize, eps", "1.f / kSize, 1.f"),
    ],
)
def test_check_finds_what_is_wrong(name, old, new, monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", rendered(old, new))
    assert not check(parse_spec(f"gated_rms_norm:{CHECKED[name]}", SPECS), SM90).passed


EDITS = {
    "no wait": (GDN, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "no barrier": (MAMBA, "  __syncthreads();", "  __syncwarp();", "no barrier between"),
    "elements beyond the last": (replace(MAMBA, size=1000), "int(column) + p * kStep < kSize", "true", "outside of every operand"),
    "groups beyond the last": (replace(GDN, rows=(1,), groups=3), "unit < units", "true", "outside of every operand"),
    "the same weight for all": (MAMBA, "u64(group) * weight_group + ", "", "off by"),
    "a barrier's worth forgotten": (MAMBA, "lane % kWarpSums];", "0];", "off by"),
    "the gate after the norm": (replace(MAMBA, x=F32, out=F32), "value[p][i] * silu(factor[i])", "value[p][i]", "off by"),
}


@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    a_mistake_is_found("gated_rms_norm", EDITS[edit])


# The registry and machine code.


def every_rule() -> list[tuple[NormSpec, Arch]]:
    """Specs that serve every size in every form, for few groups and many; dtypes and architectures take turns."""
    archs, types = cycle(ARCHS), cycle(product(DType, (None, *DType), (None, *DType), DType))
    forms = [{}, {"norm_first": True}, {"norm_first": True, "activation": Activation.SIGMOID, "grouped": True}, {"loads": Loads.ELEMENT}]
    sizes = (4, 8, 64, 100, 128, 256, 260, 512, 1024, 1280, 2560, 3000, 4096, 5120, 8192, 12288, 16380, 16384)
    found: dict[tuple[NormSpec, Arch], None] = {}
    for size, form in product(sizes, forms):
        for _ in range(5):
            arch, (x, gate, weight, out) = next(archs), next(types)
            gate = gate or (DType.BF16 if form else None)
            problem = NormProblem(size=size, x=x, gate=gate, weight=weight, out=out, **form)
            for groups in (1, MAX_SIZE):
                found[registry.select(kernels.OPERATOR, problem, groups, arch, arch >= ARCHS[1]), arch] = None
    widest = NormProblem(size=16384, x=DType.F32, gate=DType.F32, weight=DType.F32, out=DType.F32, norm_first=True, grouped=True)
    for arch in ARCHS:
        found[registry.select(kernels.OPERATOR, widest, 1, arch, arch >= ARCHS[1]), arch] = None
    return list(found)


@pytest.mark.matrix
def test_no_variant_spills_or_uses_local_memory():
    """A tenth of them, and the widest."""
    every = every_rule()
    assert not laws.spilled([*every[:-4:11], *every[-4:]])


def test_the_rules_are_legal_and_agree_about_thresholds():
    for spec, arch in every_rule():
        assert not spec.violations(arch)
    problem = NormProblem(size=128, grouped=True)
    assert len(registry.variants(kernels.OPERATOR, problem, SM90, True, MAX_SIZE)) == 4
    assert len(list(kernels.space(problem, SM90))) >= 60


@costly(1)
@pytest.mark.parametrize(("spec", "count"), [(HEAD, 3), (BLOCK, 3), (LONG, 4)], ids=["head", "block", "long"])
def test_loads_are_in_flight_before_anything_waits(spec, count):
    """All loads are issued before the first arithmetic on them. No access comes before the PDL wait, and none is to local memory."""
    before = laws.operations_before(replace(spec, pdl=Pdl.TRIGGER_LOADED), ("SHFL", "MUFU"))
    assert sum(o.startswith("LDG") and o.endswith("128") for o in before) == count and "PREEXIT" in before
