"""NVRTC without a GPU: every architecture, resources, readable errors, required and forbidden instructions of the SASS."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from programs import succeeds
from selection import costly

from ssmgen.compile import nvrtc
from ssmgen.compile.nvrtc import Resources, compile_cubin, compile_ptx, listing, parse_resources
from ssmgen.compile.render import render
from ssmgen.errors import CompileError
from ssmgen.families.selective_state_update.spec import SsuSpec
from ssmgen.spec.kernel import Arch, DType, Index, Pdl
from ssmgen.variants import inspect

SPEC = SsuSpec(
    d_state=128, headdim=64, nheads=8, ngroups=2, state=DType.BF16, D=DType.BF16, dt_bias=DType.F32, index=Index.I32, lanes=16, vec=8
)
NARROW = SsuSpec(
    d_state=16, headdim=256, tied=False, z=DType.BF16, D=DType.F32, dt_bias=DType.F32, index=Index.I32, lanes=4, vec=4, tile=128
)


@costly(6)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=lambda s: s.stem)
def test_compiles_for_every_architecture(spec, arch):
    target = Arch.parse(arch)
    done = compile_cubin(render(spec, target), target, str(spec))
    assert done.cubin[:4] == b"\x7fELF" and spec.name.encode() in done.cubin
    assert 16 <= done.resources.registers <= 128 and done.resources.spills == 0 and done.resources.shared == 0


def test_same_bytes_every_time():
    target = Arch.parse("sm_90a")
    source = render(SPEC, target)
    assert compile_cubin(source, target, "").cubin == compile_cubin(source, target, "").cubin


def test_cold_compile_takes_less_than_a_third_of_a_second():
    target = Arch.parse("sm_90a")

    def seconds(nheads: int) -> float:
        """Seconds of this process's processor time: other processes of the machine do not count."""
        source, start = render(replace(SPEC, nheads=nheads), target), time.process_time()
        compile_cubin(source, target, "")
        return time.process_time() - start

    assert min(map(seconds, (10, 12, 14))) <= 0.3


def test_error_shows_log_options_spec_and_numbered_lines():
    source = render(SPEC, Arch.parse("sm_90a")).replace("constexpr int kIlp", "constexpr integer kIlp")
    with pytest.raises(CompileError) as e:
        compile_cubin(source, Arch.parse("sm_90a"), str(SPEC))
    text = str(e.value)
    number = next(i for i, line in enumerate(source.splitlines(), 1) if "integer kIlp" in line)
    assert re.search(rf"> +{number} \| constexpr integer kIlp", text)
    assert "--gpu-architecture=sm_90a" in text and str(SPEC) in text and 'identifier "integer" is undefined' in text


def test_unknown_architecture_is_an_error_with_the_option():
    with pytest.raises(CompileError, match="sm_13"):
        compile_cubin("", Arch(13), "none")


def test_listing_merges_neighbours():
    source = "\n".join(f"line {i}" for i in range(1, 41))
    text = listing(source, "ssmgen.cu(10): error\nssmgen.cu(12): error\nssmgen.cu(30): error\n", around=1)
    assert [line.split("|")[0].strip(" >") for line in text.splitlines()] == ["9", "10", "11", "12", "13", "...", "29", "30", "31"]


def test_resources_are_read_from_the_report():
    log = (
        "ptxas info : Function properties for k\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info : Used 72 registers, used 1 barriers, 128 bytes smem"
    )
    assert parse_resources(log) == Resources(registers=72, shared=128, spill_stores=4, spill_loads=12, stack=8)
    with pytest.raises(ValueError, match="registers"):
        parse_resources("")


def test_build_id_is_the_whole_version():
    major, minor = nvrtc.version()
    assert re.fullmatch(rf"CL-\d+ V{major}\.{minor}\.\d+", nvrtc.build_id())


def test_ptx():
    assert ".visible .entry " + SPEC.name in compile_ptx(render(SPEC, Arch.parse("sm_90a")), Arch.parse("sm_90a"), str(SPEC))


@pytest.mark.parametrize("package", ["cuda.bindings", "nvrtc"])
def test_missing_compiler_names_the_extra(package):
    """Without the bindings, and with bindings that do not find the library."""
    program = (
        "import sys\n"
        + ("sys.modules['cuda.bindings'] = None\n" if package == "cuda.bindings" else
           "from cuda.bindings import nvrtc\n"
           "def missing(*a): raise RuntimeError('libnvrtc.so.12 not found')\n"
           "nvrtc.nvrtcVersion = missing\n")
        + "from ssmgen.compile import nvrtc\n"
        "try: nvrtc.build_id()\n"
        "except nvrtc.CompilerMissingError as e: print(e)\n"
    )  # fmt: skip
    told = succeeds(program).stdout
    assert "pip install 'ssmgen[cu12]'" in told and "torch.version.cuda" in told


def sass(spec: SsuSpec) -> str:
    target = Arch.parse("sm_90a")
    return inspect.sass(compile_cubin(render(spec, target), target, str(spec)).cubin)


@costly(3)
@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=lambda s: s.stem)
@pytest.mark.parametrize("pdl", [Pdl.WAIT, Pdl.TRIGGER_TOP, Pdl.TRIGGER_LOADED])
def test_no_memory_access_before_the_wait_in_the_machine_code(spec, pdl):
    ops = inspect.opcodes(sass(replace(spec, pdl=pdl)))
    before = ops[: ops.index("ACQBULK")]
    assert not [op for op in before if op.startswith(("LDG", "LD.", "STG", "ST.", "UBLKPF"))]
    assert ("PREEXIT" in ops) == (pdl is not Pdl.WAIT)


@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=lambda s: s.stem)
def test_state_moves_in_16_byte_pieces_and_nothing_is_local(spec):
    counts = inspect.sass_summary(sass(spec))
    state_vectors = spec.tile * spec.d_state * spec.state.size // 16 // spec.threads
    assert counts["global_stores_16_byte"] == state_vectors
    assert counts["global_loads_16_byte"] >= state_vectors
    assert counts["local_memory"] == 0


@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=lambda s: s.stem)
def test_all_loads_are_issued_before_the_first_result_is_waited_for(spec):
    """One step: the loads that do not depend on the slot come before the branch on it, the state's right after."""
    spec = replace(spec, tile=spec.rows_per_step)
    ops = inspect.opcodes(sass(spec))
    loads = [i for i, op in enumerate(ops) if op.startswith("LDG")]
    first_math = min(i for i, op in enumerate(ops) if op.startswith(("MUFU", "SHFL")))
    assert max(loads) < first_math
    assert loads[0] < 45, "the slot's load waits for other address arithmetic"
    branch = next(i for i, op in enumerate(ops) if op == "BRA")
    state_vectors = spec.tile * spec.d_state * spec.state.size // 16 // spec.threads
    assert sum(i > branch for i in loads) == state_vectors
