"""Source -> cubin, with NVRTC. Needs no GPU and no toolkit; works for any architecture that the installed NVRTC knows."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ..errors import CompileError, CompilerMissingError
from ..spec.kernel import Arch
from .forks import whole

# fmad=false: if the compiler contracted operations in one variant only, bits would differ. Sources use fmaf explicitly.
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", "--ptxas-options=-warn-spills")
# --no-cache (from 12.9 on): NVRTC's cache answers a repeated compilation without ptxas' report, and this package has a better cache.
PROGRAM_NAME = "ssmgen.cu"  # fixed: part of the compiler's input
# If ptxas serialises products of warpgroups, or ignores a request for registers, it compiles the kernel anyway and only reports it.
SERIALISED = re.compile(r"^.*\(C75(?:08|1\d|20)\).*$", re.MULTILINE)
UNSERIALISED = """ptxas waits for products of warpgroups where the kernel does not, or ignores what a warpgroup asks of registers.
  - Between its wgmma_fence and its wgmma_wait nothing else touches what a product sums into, or its first operand: fence again behind
    changes, name the sums behind the wait (wgmma_landed), unroll the loops around products, and keep sums in arrays with constant indices.
  - take_registers and give_registers need __launch_bounds__(threads, blocks), both."""


@dataclass(frozen=True, slots=True)
class Resources:
    """ptxas' report on one kernel; in bytes, except registers (per thread)."""

    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True, slots=True)
class Compiled:
    cubin: bytes
    resources: Resources
    seconds: float


@functools.cache
def _nvrtc() -> Any:
    """The bindings module, checked to find its library."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise CompilerMissingError(str(e)) from e
    try:
        nvrtc.nvrtcVersion()
    except Exception as e:  # each release of the bindings raises a different type
        raise CompilerMissingError(str(e).splitlines()[0] if str(e) else type(e).__name__) from e
    return nvrtc


def version() -> tuple[int, int]:
    """NVRTC's (major, minor)."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


def library_path() -> str:
    """Path of the NVRTC library in use."""
    _nvrtc()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return str(load_nvidia_dynamic_lib("nvrtc").abs_path)


@functools.cache
def build_id() -> str:
    """NVRTC's full build, for example `CL-36037853 V12.9.86`: two patch releases may generate different code.

    Read from the header comments of an empty program's PTX (120 ms the first time in a process; the cache remembers it).
    """
    ptx = _run("", ("--gpu-architecture=compute_80",), "an empty program", want="ptx").output.decode()
    build = re.search(r"Compiler Build ID: (\S+)", ptx)
    tools = re.search(r"\b(V\d+\.\d+\.\d+)", ptx)
    if not build or not tools:
        raise CompilerMissingError("NVRTC does not state its build in its PTX; expected a line 'Compiler Build ID'")
    return f"{build[1]} {tools[1]}"


def options_for(arch: Arch) -> tuple[str, ...]:
    return (f"--gpu-architecture={arch}", *OPTIONS, *(("--no-cache",) if version() >= (12, 9) else ()))


def compile_cubin(source: str, arch: Arch, spec: str, *more: str) -> Compiled:
    """Compiles a rendered source. more: compiler options in addition to the common ones.

    Raises CompileError with the log and the numbered lines around each error; with lines of PTX if ptxas serialises products of warpgroups.
    """
    start = time.perf_counter()
    options = (*options_for(arch), *more)
    done = _run(source, options, spec, want="cubin")
    if serialised := SERIALISED.findall(done.log):
        log = "\n".join(serialised)
        named = {int(n) for n in re.findall(r"\bline (\d+)", log)}
        raise CompileError(UNSERIALISED, spec, options, log, numbered(compile_ptx(source, arch, spec), named))
    return Compiled(done.output, parse_resources(done.log), time.perf_counter() - start)


def compile_ptx(source: str, arch: Arch, spec: str) -> str:
    options = (f"--gpu-architecture={str(arch).replace('sm_', 'compute_')}", "--std=c++17", "--fmad=false")
    return _run(source, options, spec, want="ptx").output.decode().rstrip("\0")


def parse_resources(log: str) -> Resources:
    """Reads ptxas -v. Raises ValueError when the log has no such lines."""

    def number(pattern: str, default: int | None = None) -> int:
        match = re.search(pattern, log)
        if match:
            return int(match[1])
        if default is None:
            raise ValueError(f"the compiler's log has no {pattern!r}; expected the lines of ptxas -v:\n{log}")
        return default

    return Resources(
        registers=number(r"Used (\d+) registers"),
        shared=number(r"(\d+) bytes smem", 0),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
    )


@dataclass(frozen=True, slots=True)
class _Output:
    output: bytes
    log: str


@whole()
def _run(source: str, options: tuple[str, ...], spec: str, want: str) -> _Output:
    nvrtc = _nvrtc()
    ok = nvrtc.nvrtcResult.NVRTC_SUCCESS

    def checked(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if code != ok:
            raise CompileError(f"NVRTC failed: {code.name}", spec, options, "", "")
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), PROGRAM_NAME.encode(), 0, [], []))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace")
        if code != ok:
            raise CompileError(f"NVRTC rejected the source: {code.name}", spec, options, text, listing(source, text))
        size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if want == "cubin" else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        output = bytearray(checked(size(program)))
        checked(get(program, output))
        return _Output(bytes(output), text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def listing(source: str, log: str, around: int = 3) -> str:
    """The source lines that the log names, numbered, with `around` lines of context."""
    return numbered(source, {int(n) for n in re.findall(re.escape(PROGRAM_NAME) + r"\((\d+)\)", log)}, around)


def numbered(text: str, named: Set[int], around: int = 3) -> str:
    """Named lines of a text, with their numbers and `around` lines of context."""
    lines = text.splitlines()
    shown: list[str] = []
    last = 0
    for n in sorted(n for n in named if n <= len(lines)):
        for i in range(max(last + 1, n - around), min(len(lines), n + around) + 1):
            if shown and i > last + 1:
                shown.append("      ...")
            shown.append(f"{'>' if i in named else ' '} {i:4d} | {lines[i - 1]}")
            last = i
    return "\n".join(shown)
