"""A case as files, so that a process without torch can launch its kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmgen.compile import nvrtc
from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator.check import trial_of
from ssmgen.spec.arguments import Tiles

from .cases import Case
from .edits import EDITS

ALIGNED = 16  # kernels may assume this alignment: an operand has the same offset from a multiple of it as its view
LINES = "--generate-line-info"  # so that reports name lines of the text; the code is the same
BLOCKS = 2  # for persistent kernels: fewer blocks than there is work for


def write(case: Case, folder: Path) -> None:
    """Writes operands, from the first to the last byte of each view, so that accesses beyond are noticed; texts and cubins; launches.

    Raises CompileError, SpecError and the errors of making a trial.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    trial = trial_of(case.spec, case.batch, 0, case.tokens)
    operands = {name: _operand(tensor, folder / f"{name}.bin") for name, tensor in trial.named.items()}
    launches = []
    for i, part in enumerate(case.spec.kernels):
        values, grid = trial.launch_of(part)
        source = render(part, case.arch)
        if case.edit:
            source = EDITS[case.edit].made(source)
        (folder / f"{part.name}.cu").write_text(source)
        (folder / f"{i}.cubin").write_bytes(nvrtc.compile_cubin(source, case.arch, str(part), LINES).cubin)
        launches.append({
            "spec": str(part), "cubin": f"{i}.cubin", "grid": min(grid, BLOCKS) if part.stays else grid, "pdl": uses_pdl(source),
            "values": {name: _value(value) for name, value in values.items()},
        })  # fmt: skip
    image = {"operands": operands, "launches": launches, "written": trial.written}
    (folder / "image.json").write_text(json.dumps(image))


def _operand(tensor: Tensor, path: Path) -> dict[str, int]:
    """{skipped: bytes before the first element, from the aligned address on; bytes: these and all up to the last element}."""
    size = tensor.element_size()
    extent = (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * size if tensor.numel() else 0
    begin, skipped = tensor.storage_offset() * size, tensor.data_ptr() % ALIGNED if tensor.numel() else 0
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    path.write_bytes(whole[begin - skipped : begin + extent].numpy().tobytes())
    return {"skipped": skipped, "bytes": skipped + extent}


def _value(value: Any) -> Any:
    return {"tiles": list(value)} if isinstance(value, Tiles) else value
