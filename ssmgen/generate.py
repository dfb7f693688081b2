"""generated/: the default variants as text, and ssmgen.lock, so that a review shows how the CUDA and its resources changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import compile as compiler
from . import registry
from .build import specs_for
from .errors import DriftError, SpillError
from .kernels import OPERATOR_OF
from .kernels.causal_conv1d import ConvLayout, ConvProblem
from .kernels.causal_conv1d_update import Advance, Saved, StateLayout, UpdateProblem
from .kernels.causal_conv1d_update import Tokens as Counted
from .kernels.combine_splits import MAX_SIZE as MANY_ROWS
from .kernels.combine_splits import CombineProblem
from .kernels.gated_rms_norm import MAX_SIZE as MANY_GROUPS
from .kernels.gated_rms_norm import NormProblem
from .kernels.linear_attention_problem import Layout, Ring
from .kernels.replay_selective_state_update import History, ReplayProblem
from .kernels.slot_copy import SlotCopySpec
from .models import find_model
from .render import render
from .spec import SM90, Arch, DType, Index, KernelSpec, Loads, Pdl, PoolMode, Problem

LOCK = "ssmgen.lock"

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # in the lock
TEXT_ARCHS = ("sm_80", "sm_90a")  # whose text is committed: without and with programmatic dependent launch

# (model, state dtype, index, pool): enough to show every template branch that a served model takes.
DEFAULTS = [
    ("nemotron-h-8b", DType.BF16, Index.I32, PoolMode.SINGLE),
    ("nemotron-h-8b", DType.F32, Index.I32, PoolMode.SINGLE),
    ("nemotron-nano-9b-v2", DType.F16, Index.I64, PoolMode.SPLIT),
    ("falcon-h1-7b", DType.F32, Index.NONE, PoolMode.SINGLE),
    ("mamba-130m", DType.F32, Index.I32, PoolMode.SINGLE),
    ("falcon-mamba-7b", DType.F32, Index.NONE, PoolMode.SINGLE),
    ("qwen3.5-397b-a17b", DType.BF16, Index.I32, PoolMode.SINGLE),
]

# What else several tokens of Mamba-2 may come with.
TREE = {
    "intermediates": True, "intermediate_indices": Index.I32, "parents": Index.I32, "cu_seqlens": Index.I32, "accepted": Index.I32,
    "philox_rounds": 10,
}  # fmt: skip

# The same and more of the call, in the variant that serves batch 1 only: its branches are those of all batches.
FORMS: list[tuple[str, DType, Index, PoolMode, dict[str, Any]]] = [
    ("qwen3.5-397b-a17b", DType.F32, Index.I64, PoolMode.SPLIT, {"layout": Layout.KV}),
    ("qwen3.5-397b-a17b", DType.BF16, Index.I32, PoolMode.SINGLE, {"tokens": 4, "intermediates": True}),
    ("qwen3.5-397b-a17b", DType.BF16, Index.I32, PoolMode.SINGLE, {"tokens": 4, "update_state": False}),
    ("qwen3.5-397b-a17b", DType.BF16, Index.I32, PoolMode.SINGLE, {"tokens": 4, "update_state": False, "ring": Ring.STORE}),
    ("qwen3.5-397b-a17b", DType.BF16, Index.I32, PoolMode.SINGLE, {"ring": Ring.COMMIT, "layers": True}),
    ("nemotron-h-8b", DType.BF16, Index.I32, PoolMode.SINGLE, {"tokens": 4, "intermediates": True, "update_state": False}),
    ("nemotron-h-8b", DType.F16, Index.I32, PoolMode.SPLIT, {"tokens": 4, **TREE}),
    ("kimi-linear-48b-a3b", DType.F32, Index.I32, PoolMode.SINGLE, {}),
    ("minimax-text-01", DType.F32, Index.I32, PoolMode.SINGLE, {}),
    ("rwkv7-1.5b", DType.F32, Index.I32, PoolMode.SINGLE, {}),
]

# Beside what the convolution of a model asks for: the other branches, in the variant that serves the smallest size only.
STATES = {"seq_idx": True, "initial": True, "final": True}
ROLL = {"advance": Advance.ROLL, "position": Index.I32, "index": Index.I32}
PACKED = {"count": Counted.RAGGED, "query_start_loc": Index.I32, "tokens": 4}
CONVOLUTIONS: list[Problem] = [
    *(ConvProblem(layout=layout, width=4, bias=DType.BF16, **STATES) for layout in ConvLayout),
    *(ConvProblem(layout=layout, width=3, loads=Loads.ELEMENT, taps=Loads.ELEMENT, silu=False) for layout in ConvLayout),
    UpdateProblem(width=4, tokens=4, state_len=6, **ROLL),
    UpdateProblem(width=4, layout=StateLayout.CHANNELS, saved=Saved.RUNS, saved_index=Index.I32, **ROLL, **PACKED),
    UpdateProblem(width=4, layout=StateLayout.ANY, advance=Advance.RING, position=Index.I32, loads=Loads.ELEMENT, taps=Loads.ELEMENT),
]

# Speculative decoding by replay of one shape, likewise: steps of up to 8 tokens, whose history is that of the last step or a ring.
SHAPE: dict[str, Any] = {
    "nheads": 16,
    "headdim": 64,
    "d_state": 128,
    "ngroups": 1,
    "D": DType.BF16,
    "dt_bias": DType.BF16,
    "index": Index.I32,
}
REPLAYS: list[Problem] = [
    ReplayProblem(**SHAPE, state=DType.BF16),
    ReplayProblem(**SHAPE, state=DType.BF16, history=History.RING, window=16),
    ReplayProblem(**SHAPE, state=DType.F32),
    ReplayProblem(**SHAPE, state=DType.BF16, two_kernels=True, after_conv=True),
]

# Merged splits, as (problem, rows): an MLA and a GQA model's decode, with few rows and with many; a cascade's two; the other branches.
PAIR = {"o": DType.BF16, "max_splits": 2, "pair": True}
COMBINATIONS: list[tuple[CombineProblem, int]] = [
    *((CombineProblem(d_v=512, max_splits=160, axes=2, num_splits=Index.I32), rows) for rows in (128, MANY_ROWS)),
    *((CombineProblem(d_v=128, max_splits=32), rows) for rows in (128, MANY_ROWS)),
    (CombineProblem(d_v=128, axes=2, **PAIR), MANY_ROWS),
    (CombineProblem(d_v=512, axes=2, mask=True, in_place=True, **PAIR), 128),
    (CombineProblem(d_v=128, o=DType.BF16, max_splits=0, axes=3, num_splits=Index.I64, sink=DType.F32, skip_single=True), MANY_ROWS),
    (CombineProblem(d_v=68, o=DType.F16, out=DType.F32, max_splits=8, lse_out=False, loads=Loads.ELEMENT), 128),
]

# Gated norms, as (problem, groups): those of a delta rule with few groups and with many, of a Mamba-2; the other branches.
NORMS: list[tuple[NormProblem, int]] = [
    *((find_model("qwen3.5-397b-a17b").norms()[0], groups) for groups in (64, MANY_GROUPS)),
    (find_model("nemotron-h-8b").norms()[0], 8),
    (NormProblem(size=10240, x=DType.F32, weight=DType.F32), 1),
    (NormProblem(size=100, gate=None, weight=None, out=DType.F16, loads=Loads.ELEMENT), MANY_GROUPS),
]

# Decode layers, as (problem, batch): every layout of a window; a norm in a kernel of its own (a delta rule's where keys come first), in the
# layer's own, of a block or a cluster of blocks, and none; operands that are not aligned; of several tokens, the states and windows that
# are left behind, kept after each token, or given slots of their own.
STATES_OF_LAYERS = (DType.BF16, DType.F32)
MAMBA2_LAYERS = find_model("nemotron-h-8b").layers(STATES_OF_LAYERS, (Index.I32,))
GDN_LAYERS = find_model("qwen3.5-397b-a17b").layers(STATES_OF_LAYERS, (Index.I32,))
ANYWHERE: dict[str, Any] = {"conv_layout": StateLayout.ANY} | dict.fromkeys(("conv_loads", "conv_taps", "norm_loads"), Loads.ELEMENT)
NEMOTRON = find_model("nemotron-h-8b")
VERIFY = NEMOTRON.layers((DType.F32,), (Index.I32,), tokens=8, intermediates=True, update_state=False)[0]
BY_INDEX: dict[str, Any] = {"conv_windows": Saved.ANY, "conv_rows": Index.I64, "intermediate_indices": Index.I64}
KIMI, KIMI_K3 = find_model("kimi-linear-48b-a3b"), find_model("kimi-k3").divided(8)
KEYS_FIRST = [model.layers((DType.BF16,), (Index.I32,), layout=Layout.KV)[0] for model in (find_model("qwen3.5-397b-a17b"), KIMI)]
LAYERS: list[tuple[Problem, int]] = [
    *((problem, 1) for problem in (*MAMBA2_LAYERS[:4], find_model("falcon-h1-7b").layers((), (Index.NONE,))[1])),
    *((problem, 1) for problem in find_model("qwen3.5-397b-a17b").divided(4).layers(STATES_OF_LAYERS, (Index.I32,))[::5]),
    *((problem, 64) for problem in (*GDN_LAYERS[::5], *KEYS_FIRST)),
    (replace(GDN_LAYERS[0], **ANYWHERE), 64),
    (KIMI.divided(4).layers((DType.F32,), (Index.I32,))[0], 1),
    *((problem, 64) for problem in KIMI.layers(STATES_OF_LAYERS, (Index.I32,))[::3]),
    (replace(KIMI_K3.layers((), (Index.I32,))[0], **ANYWHERE, operand_loads=Loads.ELEMENT), 64),
    *((problem, 1) for problem in NEMOTRON.layers((DType.BF16,), (Index.I32,), tokens=4)[:2]),
    *((problem, 1) for problem in (VERIFY, replace(VERIFY, **ANYWHERE, **BY_INDEX))),
    (find_model("falcon-h1-7b").layers((DType.F32,), (Index.NONE,), tokens=3)[2], 64),
    *((problem, 64) for problem in find_model("qwen3.5-397b-a17b").layers((DType.BF16,), (Index.I32,), tokens=4)[:2]),
    (KIMI.layers((DType.BF16,), (Index.I32,), tokens=4, intermediates=True, update_state=False)[0], 64),
    (replace(KIMI_K3.layers((DType.F32,), (Index.I32,), tokens=8, intermediates=True)[0], **ANYWHERE, **BY_INDEX), 1),
]


def default_variants(archs: Sequence[Arch] = tuple(map(Arch.parse, ARCHS))) -> list[tuple[KernelSpec, Arch]]:
    """The variants in the lock, or the like for other architectures."""
    found: dict[tuple[KernelSpec, Arch], None] = {}
    for arch in archs:
        for model, state, index, pool in DEFAULTS:
            problem = find_model(model).problem(state, index, pool)
            found.update(dict.fromkeys((spec, arch) for spec in specs_for([problem], arch, pdl=(True,))))
        for model, state, index, pool, call in FORMS:
            problem = find_model(model).problem(state, index, pool, **call)
            found.update(dict.fromkeys((spec, arch) for spec in specs_for([problem], arch, pdl=(True,), max_batch=1)))
        found.update(dict.fromkeys((s, arch) for s in specs_for(find_model(DEFAULTS[0][0]).convolutions((Index.I32,)), arch, pdl=(True,))))
        for problem in CONVOLUTIONS:
            found[registry.select(OPERATOR_OF[type(problem)], problem, 1, arch, arch >= SM90), arch] = None
        found.update(dict.fromkeys((spec, arch) for spec in specs_for(REPLAYS, arch, pdl=(True,), max_batch=1)))
        for problem, rows in (*COMBINATIONS, *NORMS):
            found[registry.select(OPERATOR_OF[type(problem)], problem, rows, arch, arch >= SM90), arch] = None
        for problem, batch in LAYERS:
            chosen = registry.select(OPERATOR_OF[type(problem)], problem, batch, arch, arch >= SM90)
            found.update(dict.fromkeys((part, arch) for part in chosen.kernels))
        found[SlotCopySpec(slot_bytes=2 << 20, pdl=Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF), arch] = None
    return list(found)


def path_of(spec: KernelSpec, arch: Arch) -> str:
    """Relative to generated/."""
    return f"{arch}/{spec.name}.cu"


def _row(spec: KernelSpec, arch: Arch) -> tuple[str, str, dict[str, Any]]:
    source = render(spec, arch)
    resources = compiler.compile_cubin(source, arch, str(spec)).resources
    if resources.spills:
        raise SpillError(str(spec), str(arch), resources.spills, resources.registers)
    row = {"spec": str(spec), "arch": str(arch), "source_sha256": hashlib.sha256(source.encode()).hexdigest()}
    return path_of(spec, arch), source, row | {"resources": asdict(resources)}


def _rows() -> list[tuple[str, str, dict[str, Any]]]:
    with ThreadPoolExecutor() as pool:
        return sorted(pool.map(lambda pair: _row(*pair), default_variants()))


def write(root: Path) -> int:
    """Renders, compiles and writes everything; the number of variants. Raises SpillError."""
    rows = _rows()
    texts = [(path, source) for path, source, row in rows if row["arch"] in TEXT_ARCHS]
    for path in set(root.glob("sm_*/*.cu")) - {root / path for path, _ in texts}:
        path.unlink()
    for path, source in texts:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source)
    lock = {"compiler": compiler.build_id(), "variants": {path: row for path, _, row in rows}}
    (root / LOCK).write_text(json.dumps(lock, indent=1, sort_keys=True) + "\n")
    return len(rows)


def check(root: Path) -> tuple[int, str]:
    """(variants, note). Raises DriftError naming every file whose text, or whose resources under the lock's compiler, differ;
    SpillError for a variant that spills."""
    try:
        lock = json.loads((root / LOCK).read_text())
    except (OSError, ValueError) as e:
        raise DriftError([f"{root / LOCK}: {e}"]) from e
    rows = _rows()
    same_compiler = lock["compiler"] == compiler.build_id()
    problems = [f"{path} is no longer a default variant" for path in sorted(set(lock["variants"]) - {path for path, *_ in rows})]
    for path, source, row in rows:
        locked = lock["variants"].get(path)
        if locked is None:
            problems.append(f"{path} is missing from {LOCK}")
            continue
        if row["arch"] in TEXT_ARCHS and (not (root / path).is_file() or (root / path).read_text() != source):
            problems.append(f"{path} differs from what the template renders")
        if locked["source_sha256"] != row["source_sha256"] or locked["spec"] != row["spec"]:
            problems.append(f"{path}: {LOCK} records another source")
        elif same_compiler and locked["resources"] != row["resources"]:
            problems.append(f"{path}: resources were {locked['resources']}, are {row['resources']}")
    if problems:
        raise DriftError(problems)
    note = "" if same_compiler else f"resources not compared: the lock is of {lock['compiler']}, this is {compiler.build_id()}"
    return len(rows), note
