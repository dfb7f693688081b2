"""Looking at kernels: finding one by name, its SASS, and what of it matters for speed."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .cache import Cache
from .errors import SpecError, SsmgenError
from .generate import default_variants
from .kernels import FAMILIES
from .spec import KernelSpec, parse_spec


class DisassemblerMissingError(SsmgenError):
    """nvdisasm is not installed."""

    def __init__(self) -> None:
        super().__init__("nvdisasm was not found. Install it with: pip install nvidia-cuda-nvdisasm")


def known_specs(cache: Cache | None) -> dict[str, KernelSpec]:
    """{name: spec} of the default variants and of what is in the cache."""
    found = {spec.name: spec for spec, _ in default_variants()}
    for layer in cache.layers if cache else []:
        for _, entry in layer.entries():
            with contextlib.suppress(SpecError):  # of a release whose specs had other fields
                spec = parse_spec(entry.spec, FAMILIES)
                found[spec.name] = spec
    return found


def resolve(text: str, cache: Cache | None) -> KernelSpec:
    """A spec from its text (family:field=value,…), its name or a unique part of it. Raises SpecError that lists the candidates."""
    if ":" in text:
        return parse_spec(text, FAMILIES)
    matches = {name: spec for name, spec in known_specs(cache).items() if text in name}
    if text in matches:
        return matches[text]
    if len(matches) != 1:
        problem = f"several variants match: {', '.join(sorted(matches))}" if matches else "no variant of that name; see: ssmgen list"
        raise SpecError(text, [problem])
    return next(iter(matches.values()))


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
            for found in sorted(Path(root).glob("**/bin/nvdisasm")):
                return str(found)
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
    """Counts that decide speed: memory instructions by width, local memory, shuffles."""
    ops = opcodes(listing)

    def count(pattern: str) -> int:
        return sum(bool(re.match(pattern, op)) for op in ops)

    return {
        "instructions": len(ops),
        "global_loads": count(r"LDG"),
        "global_loads_16_byte": count(r"LDG\S*\.128"),
        "global_stores": count(r"STG"),
        "global_stores_16_byte": count(r"STG\S*\.128"),
        "local_memory": count(r"(LDL|STL)"),
        "shuffles": count(r"SHFL"),
    }
