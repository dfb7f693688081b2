"""combine_splits: specs, the text and machine code of kernels, and that wrong ones are found."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import kernel_laws as laws
import pytest
from combine_cases import DENSE, F32, INF, PREFIX
from emulated_calls import SM90, needs_emulator
from selection import costly
from subjects import a_mistake_is_found
from test_check import edited as rendered

from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.families.combine_splits import spec as kernels
from ssmgen.families.combine_splits.spec import BOUNDS, MAX_SIZE, CombineProblem, CombineSpec
from ssmgen.select import registry
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, parse_spec

ARCHS = [Arch.parse(a) for a in ("sm_80", "sm_90a", "sm_100a", "sm_120")]

# Specs and text.

FEW = CombineSpec(d_v=512, max_splits=64, axes=2, num_splits=Index.I32, vec=4, parts=4, ilp=4)
MANY = CombineSpec(d_v=128, max_splits=32, vec=4)
TWO = CombineSpec(d_v=128, o=DType.BF16, max_splits=2, pair=True, axes=2, mask=True, vec=8, lanes=16)
IN_PLACE = CombineSpec(d_v=512, o=DType.BF16, max_splits=2, pair=True, in_place=True, vec=8, threads=64)
ANY = CombineSpec(
    d_v=68, o=DType.F16, out=DType.F32, max_splits=0, axes=3, num_splits=Index.I64, sink=DType.F32, loads=Loads.ELEMENT, vec=4
)


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (MANY, {"d_v": 66}, "loads is vector with d_v 66, no multiple of 4; expected element"),
        (MANY, {"d_v": 2048}, "d_v is 2048; expected 1 … 1024"),
        (MANY, {"max_splits": 7}, "max_splits is 7; expected one of 2, 4, 8, "),
        (MANY, {"axes": 4}, "axes is 4; expected 1 … 3"),
        (TWO, {"max_splits": 4}, "pair is yes and max_splits is 4; expected 2"),
        (TWO, {"num_splits": Index.I32}, "pair is yes and num_splits is i32; expected none"),
        (MANY, {"skip_single": True}, "skip_single is yes and num_splits is none; expected num_splits"),
        (MANY, {"in_place": True}, "in_place is yes without a pair and its lse_out; expected both"),
        (MANY, {"threads": 48}, "threads is 48; expected 32 … 1024 in steps of 32"),
        (MANY, {"threads": 32, "parts": 2}, "threads is 32; expected a multiple of lanes x parts = 64"),
        (FEW, {"threads": 256}, "threads is 256; expected 128, as many as meet at a barrier"),
        (IN_PLACE, {"threads": 128}, "threads is 128; expected 64, as many as meet at a barrier"),
        (MANY, {"vec": 8}, "vec is 8; expected 4 or 4"),
        (MANY, {"lanes": 64}, "lanes is 64; expected at most 32"),
        (MANY, {"parts": 16, "threads": 512}, "parts is 16; expected at most 8"),
        (MANY, {"ilp": 8}, "ilp is 8; expected at most 4"),
        (MANY, {"parts": 3}, "parts is 3; expected a power of two"),
        (TWO, {"pair": False, "max_splits": 16}, "lanes x parts is 16 for any number of splits; expected 32 or more"),
    ],
)
def test_violations_in_words(spec, change, words):
    laws.says_its_violation(spec, change, words)


def test_violations_of_architectures():
    laws.says_its_architectures(MANY)


TEXTS = [FEW, MANY, TWO, IN_PLACE, ANY, replace(FEW, skip_single=True, parts=8, threads=256), replace(MANY, lse_out=False)]


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_wait_precedes_every_access_and_the_launch_attribute_follows_the_text(spec, pdl):
    laws.waits_first(spec, pdl)


@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_layout_of_the_text(spec):
    laws.is_well_formed(spec)


def test_what_is_switched_off_is_not_in_the_text():
    text = render(replace(MANY, lse_out=False), SM90).split("#define DEVICE")[1]
    absent = ("num_splits", "attn_sink", "load_u8", "empty_lse", "o_other", "divide", "__shared__", "__syncthreads", "struct f16")
    for word in (*absent, "griddepcontrol.wait"):
        assert word not in text, word


def test_in_place_all_of_a_row_is_read_before_it_is_written():
    for spec in (IN_PLACE, replace(IN_PLACE, parts=2, threads=128)):
        body = render(spec, SM90).partition('extern "C"')[2]
        assert body.index("add_split(__shfl") < body.index("__syncthreads();") < body.index("store(lse_out")


# Wrong kernels.

CHECKED = {
    "dense": "d_v=128,vec=4",
    "mla": "d_v=512,vec=4,parts=4,ilp=4,axes=3,num_splits=i32,max_splits=64",
    "any": "d_v=100,vec=4,parts=8,ilp=4,threads=256,num_splits=i64,max_splits=0,sink=f32,axes=2,skip_single=yes",
    "pair": "d_v=128,vec=8,lanes=16,pair=yes,max_splits=2,o=bf16,axes=2,mask=yes",
    "in-place": "d_v=512,vec=8,parts=2,threads=128,pair=yes,max_splits=2,o=bf16,in_place=yes",
    "odd": "d_v=68,vec=4,loads=element,o=f16,out=f32,axes=3,lse_out=no,sink=bf16",
}


@needs_emulator
@pytest.mark.parametrize("name", CHECKED)
def test_check_of_variants(name):
    spec = parse_spec(f"combine_splits:{CHECKED[name]}", SPECS)
    for batch in (1, 4):
        assert check(spec, SM90, batch).passed


@needs_emulator
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("dense", "fmaf(w, f[e]", "fmaf(1.01f * w, f[e]"),
        ("mla", "log2f(sum)", "(0.01f + log2f(sum))"),
        ("odd", "to_float(raw_sink), sink_to_base", "to_float(raw_sink), 1.1f * sink_to_base"),
    ],
)
def test_check_finds_what_is_wrong(name, old, new, monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", rendered(old, new))
    assert not check(parse_spec(f"combine_splits:{CHECKED[name]}", SPECS), SM90).passed


EDITS = {
    "no wait": (DENSE, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "weightless read": (DENSE, "if (w != 0.f)", "if (true)", "off by"),
    "infinite lse": (
        replace(DENSE, empty_lse=INF),
        "fabsf(lse) < __uint_as_float(0x7f800000u)",
        "lse < __uint_as_float(0x7fffffffu)",
        "off",
    ),
    "chains in another order": (
        replace(DENSE, splits=17, d_v=64),
        "j * kParts + first < int(count)",
        "j * kParts + first < 17 - 8",
        "off by",
    ),
    "splits beyond the last": (PREFIX, "min(u32(load(num_splits + num_splits_outer)), splits)", "splits + 1", "outside of every operand"),
    "no barrier": (replace(DENSE, splits=40, d_v=64), "  __syncthreads();", "  __syncwarp();", "no barrier between"),
    "columns beyond the last": (replace(DENSE, d_v=36), "inside) store", "true) store", "store"),
    "masked rows written": (replace(DENSE, mask=True), "if (load_u8(mask) == 0) return;", "", "off by"),
    "sink in the sum": (replace(DENSE, sink=F32), "log2f(sum)", "log2f(sum + to_float(raw_sink))", "lse_out off by"),
}


@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    a_mistake_is_found("combine_splits", EDITS[edit])


# The registry and machine code.


def every_rule() -> list[tuple[CombineSpec, Arch]]:
    """Specs that serve every form with every bound, for few rows and many; dtypes, widths and architectures take turns."""
    archs, types, widths = cycle(ARCHS), cycle(product(DType, repeat=2)), cycle((512, 128, 64, 576, 68, 1024, 256))
    forms = [{}, {"num_splits": Index.I32, "axes": 2}, {"num_splits": Index.I64, "axes": 3, "sink": DType.BF16, "skip_single": True}]
    forms += [{"axes": 3, "mask": True, "lse_out": False}, {"loads": Loads.ELEMENT, "axes": 2}]
    found: dict[tuple[CombineSpec, Arch], None] = {}
    problems = [(form, bound) for bound in (*BOUNDS, 0) for form in forms]
    problems += [({"pair": True, "axes": 2, "in_place": p}, 2) for p in (False, True) for _ in range(7)]
    for form, bound in problems:
        arch, (o, out) = next(archs), next(types)
        problem = CombineProblem(d_v=next(widths), o=o, out=out, max_splits=bound, **form)
        for rows in (1, 128, 700, MAX_SIZE):
            found[registry.select(kernels.OPERATOR, problem, rows, arch, arch >= SM90), arch] = None
    return list(found)


@pytest.mark.matrix
def test_no_variant_spills_or_uses_local_memory():
    """A seventh of them."""
    assert not laws.spilled(every_rule()[::7])


def test_the_rules_are_legal_and_agree_about_thresholds():
    for spec, arch in every_rule():
        assert not spec.violations(arch)
    problem = CombineProblem(d_v=128)
    assert len(registry.variants(kernels.OPERATOR, problem, SM90, True, MAX_SIZE)) == 3
    assert len(list(kernels.space(problem, SM90))) >= 30


@costly(1)
@pytest.mark.parametrize(("spec", "count"), [(FEW, 8), (MANY, 8), (TWO, 2)], ids=["few", "many", "two"])
def test_loads_of_16_bytes_are_in_flight_before_anything_waits(spec, count):
    """All of the first vectors are loaded before the first shuffle, which waits for the LSEs. No access comes before the PDL wait."""
    before = laws.operations_before(replace(spec, pdl=Pdl.TRIGGER_LOADED), ("SHFL",))
    assert sum(o.startswith("LDG") and o.endswith("128") for o in before) == count and "PREEXIT" in before
