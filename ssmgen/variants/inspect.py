"""Tools to look at kernels: find one by name, its SASS, and the properties that matter for speed."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cache.entry import Entry
from ..cache.store import Cache
from ..compile import nvrtc
from ..compile.occupancy import occupancy, sm_limits
from ..compile.render import render
from ..errors import SpecError, SsmgenError, UnknownArchError
from ..select.catalog import parse
from ..spec.kernel import Arch, KernelSpec
from .generate import default_variants


class DisassemblerMissingError(SsmgenError):
    """nvdisasm is not installed."""

    def __init__(self) -> None:
        super().__init__("nvdisasm was not found. Install it with: pip install 'ssmgen[sass]'")


def known_specs(cache: Cache | None) -> dict[str, KernelSpec]:
    """{name: spec} of the default variants and of all variants in the cache."""
    found = {spec.name: spec for spec, _ in default_variants()}
    for layer in cache.layers if cache else []:
        for _, entry in layer.entries():
            with contextlib.suppress(SpecError):  # from a release whose specs had other fields
                spec = parse(entry.spec)
                found[spec.name] = spec
    return found


def resolve(text: str, cache: Cache | None) -> KernelSpec:
    """A spec from its text (family:field=value,…), its name or a unique part of it. Raises SpecError that lists the candidates."""
    if ":" in text:
        return parse(text)
    matches = {name: spec for name, spec in known_specs(cache).items() if text in name}
    if text in matches:
        return matches[text]
    if len(matches) != 1:
        problem = (
            f"several variants match; expected one. Name one of {', '.join(sorted(matches))}."
            if matches
            else "no variant has that name. `ssmgen list` shows all"
        )
        raise SpecError(text, [problem])
    return next(iter(matches.values()))


def text_of(spec: KernelSpec, form: str, arch: Arch, cache: Cache) -> str:
    """The variant's source (cu), PTX or SASS. Raises SpecError, CompileError, DisassemblerMissingError."""
    if form == "sass":
        return sass(cache.get(spec, arch)[0].cubin)
    source = render(spec, arch)
    return source.rstrip("\n") if form == "cu" else nvrtc.compile_ptx(source, arch, str(spec))


def comparable(text: str, form: str, spec: KernelSpec) -> str:
    """PTX or SASS without the parts that differ between any two variants: the kernel's name, and instruction addresses."""
    if form == "sass":
        return re.sub(r"/\*[0-9a-f]{4,}\*/", "", text)
    return text.replace(spec.name, "kernel") if form == "ptx" else text


def stats(spec: KernelSpec, arch: Arch, cache: Cache) -> dict[str, Any]:
    """A variant's use of an SM, and a summary of its SASS. An unknown value is replaced by a sentence with the reason."""
    entry, _ = cache.get(spec, arch)
    found: dict[str, Any] = {"spec": str(spec), "arch": str(arch), "compiler": entry.compiler, "seconds": round(entry.seconds, 3)}
    found |= asdict(entry.resources) | {
        "dynamic_shared": spec.dynamic_bytes,
        "cubin_bytes": len(entry.cubin),
        "threads": spec.threads_per_block,
    }
    try:
        found |= residency(spec, arch, entry)
    except UnknownArchError as e:
        found["occupancy"] = str(e)
    try:
        found |= sass_summary(sass(entry.cubin))
    except DisassemblerMissingError as e:
        found["sass"] = str(e)
    return found


def residency(spec: KernelSpec, arch: Arch, entry: Entry) -> dict[str, Any]:
    """Theoretical occupancy of a compiled variant. Raises UnknownArchError."""
    found = occupancy(arch, spec.threads_per_block, entry.resources.registers, entry.resources.shared + spec.dynamic_bytes)
    return {
        "blocks_per_sm": found.blocks_per_sm,
        "warps_per_sm": found.warps_per_sm,
        "max_warps_per_sm": sm_limits(arch).warps,
        "occupancy_limit": found.limit,
    }


def sass(cubin: bytes) -> str:
    """The disassembly. Raises DisassemblerMissingError."""
    tool = _nvdisasm()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SsmgenError(f"nvdisasm failed: {done.stderr.strip()}")
    return "\n".join(line for line in done.stdout.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/|^\.L_", line))


def _nvdisasm() -> str:
    try:
        import nvidia

        for root in nvidia.__path__:
            for path in sorted(Path(root).glob("**/bin/nvdisasm")):
                return str(path)
    except ImportError:
        pass
    if found := shutil.which("nvdisasm"):
        return found
    raise DisassemblerMissingError


def opcodes(listing: str) -> list[str]:
    """The instructions of a disassembly in order, without predicates and operands."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing)
    return [op for op in found if op != "NOP"]


def sass_summary(listing: str) -> dict[str, int]:
    """Counts that decide speed: memory instructions by width, local memory, and instructions that wait for other threads."""
    ops = opcodes(listing)

    def count(pattern: str) -> int:
        return sum(bool(re.match(pattern, op)) for op in ops)

    return {
        "instructions": len(ops),
        "global_loads": count(r"LDG(\.|$)"),
        "global_loads_16_byte": count(r"LDG\.(\S*\.)?128(\.|$)"),
        "global_stores": count(r"STG"),
        "global_stores_16_byte": count(r"STG\.(\S*\.)?128(\.|$)"),
        "local_memory": count(r"(LDL|STL)"),
        "shared_loads": count(r"LDS"),
        "shared_stores": count(r"STS"),
        "shuffles": count(r"SHFL"),
        "barriers": count(r"BAR"),
        "tensor_core": count(r"[A-Z]*MMA(\.|$)"),
    }
