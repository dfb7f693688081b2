"""Rendered source: deterministic, complete, and with its promises visible in the text."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise

import jinja2
import kernel_laws as laws
import pytest
from programs import succeeds

from ssmgen.compile import render as rendering
from ssmgen.compile.render import render
from ssmgen.errors import SpecError
from ssmgen.families.selective_state_update.spec import SsuSpec
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode

SM90 = Arch.parse("sm_90a")
FULL = SsuSpec(
    d_state=128, headdim=64, nheads=8, ngroups=2, state=DType.BF16, D=DType.F32, z=DType.F16, dt_bias=DType.F32, tied=False, dt_limit=True,
    index=Index.I64, pool=PoolMode.SPLIT, lanes=16, vec=8, prefetch=132, pdl=Pdl.TRIGGER_LOADED,
)  # fmt: skip
BARE = SsuSpec(d_state=16, headdim=256, tied=False, dt_softplus=False, lanes=4, vec=4, tile=128)
SPECS = [
    FULL,
    BARE,
    replace(FULL, headdim=72, prefetch=0),
    replace(FULL, operand_loads=Loads.ELEMENT, tied=True),
    SlotCopySpec(slot_bytes=8192, pdl=Pdl.TRIGGER_LOADED),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_layout_of_the_text(spec):
    laws.is_well_formed(spec)
    lines = render(spec, SM90).splitlines()
    assert not any(a == b == "" for a, b in pairwise(lines))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_the_kernel_begins_where_the_text_says(spec):
    library, kernel = render(spec, SM90).split("\n// ---- The kernel. ----\n")
    assert library.count("// ---- The library") == 1 and "asm" not in kernel and "DEVICE" not in kernel
    assert kernel.lstrip().startswith('extern "C" __global__')


def test_ptx_is_in_the_library_alone():
    root = rendering.templates_dir()
    assert {p.relative_to(root).parts[0] for p in root.rglob("*.j2") if "asm" in re.findall(r"\w+", p.read_text())} == {"lib"}


def test_generated_indentation_is_clang_formats(tmp_path):
    """Compares lines that clang-format breaks as the templates do. The parameter list is an exception: its name has a separate line."""
    program = pytest.importorskip("clang_format").get_executable("clang-format")
    root = rendering.templates_dir()
    command = [program, f"--style=file:{root / '.clang-format'}"]
    files = sorted((root.parent / "generated").glob("sm_*/*.cu"))
    assert files
    for path in files:  # one call for all: starting the program took longer than its work
        shutil.copy(path, tmp_path / f"{path.parent.name}-{path.name}")
    subprocess.run([*command, "-i", *sorted(tmp_path.iterdir())], check=True)
    for path in files:
        have = path.read_text().splitlines()
        want = (tmp_path / f"{path.parent.name}-{path.name}").read_text().splitlines()
        first = have.index("// ---- The kernel. ----")
        last = next(i for i in range(first, len(have)) if have[i].endswith(") {"))
        alike = SequenceMatcher(None, *(["".join(line.split()) for line in lines] for lines in (have, want)), autojunk=False)
        pairs = [(a + i, b + i) for a, b, size in alike.get_matching_blocks() for i in range(size)]
        assert len(pairs) > 0.9 * len(have), path
        off = [a for a, b in pairs if not first <= a <= last and indentation(have[a]) != indentation(want[b])]
        assert not off, "\n".join(f"{path.name}:{a + 1}: {have[a]}" for a in off[:20])


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def test_same_in_another_process_and_environment():
    program = (
        "import sys\nfrom ssmgen.compile.render import render\nfrom ssmgen.select.catalog import SPECS\n"
        "from ssmgen.spec.kernel import Arch, parse_spec\n"
        f"sys.stdout.write(render(parse_spec({str(FULL)!r}, SPECS), Arch.parse('sm_90a')))"
    )
    root = str(rendering.templates_dir().parent)
    env = {"PYTHONPATH": root, "PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo", "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}
    assert succeeds(program, env=env, cwd="/").stdout == render(FULL, SM90)


def test_what_is_switched_off_is_not_in_the_text():
    absent = "softplus silu state_indices pad_slot_id prefetch griddepcontrol.wait load_elements dt_bias write_state"
    laws.has_none_of(BARE, *absent.split())
    text = render(BARE, SM90)
    assert "struct f16" not in text and "(f16 " not in text
    assert "constexpr bool kTail = false;" in text and "const i64 dst_slot = slot;" in text  # C++ decides these


@pytest.mark.parametrize("pdl", Pdl)
def test_wait_precedes_every_access_and_the_launch_attribute_follows_the_text(pdl):
    laws.waits_first(FULL, pdl, "load|store|prefetch")


def test_an_undefined_name_in_a_template_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        rendering.environment().from_string("{{ no_such_name }}").render()


def test_declarations_in_templates():
    made = rendering.environment().from_string("{{ constants(kA=3, kB=none, kC=true, kD=0) }}\n{{ types(X=x, Y=none, Z=z) }}")
    want = "constexpr int kA = 3, kD = 0;\nconstexpr bool kC = true;\nusing X = bf16;\nusing Z = f32;"
    assert made.render(x=DType.BF16, z=DType.F32) == want


def test_illegal_specs_are_not_rendered():
    with pytest.raises(SpecError):
        render(replace(FULL, lanes=64), SM90)
