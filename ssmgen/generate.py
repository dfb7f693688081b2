"""generated/: the default variants as text, and ssmgen.lock, so that a review shows how the CUDA and its resources changed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import nvrtc as compiler
from . import registry
from .build import specs_for
from .catalog import OPERATOR_OF
from .errors import DriftError, SpillError, SsmgenError, bullets
from .families.causal_conv1d.spec import ConvLayout, ConvProblem
from .families.causal_conv1d_update.spec import Advance, Saved, StateLayout, UpdateProblem
from .families.causal_conv1d_update.spec import Tokens as Counted
from .families.combine_splits.spec import MAX_SIZE as MANY_ROWS
from .families.combine_splits.spec import CombineProblem
from .families.gated_rms_norm.spec import MAX_SIZE as MANY_GROUPS
from .families.gated_rms_norm.spec import NormProblem
from .families.linear_attention.problem import Layout, Ring
from .families.replay_selective_state_update.spec import History, ReplayProblem
from .families.slot_copy.spec import SlotCopySpec
from .files import FileError, plain
from .lock import LOCK, Lock, Locked, major_of
from .models import find_model
from .nvrtc import Resources
from .render import render
from .spec import SM90, Arch, DType, Index, KernelSpec, Loads, Pdl, PoolMode, Problem

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


class ForeignFilesError(SsmgenError):
    """A folder to generate into has files that would be overwritten or removed, and that ssmgen did not write."""

    def __init__(self, root: Path, problems: Sequence[str]):
        super().__init__(
            f"{root} has files that ssmgen did not write:\n{bullets(problems)}\nNothing was changed. Move them, or give another --dir."
        )
        self.problems = list(problems)


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


@dataclass(frozen=True, slots=True)
class _Source:
    """A default variant as text. digest: sha256 of that."""

    spec: KernelSpec
    arch: Arch
    text: str

    @property
    def path(self) -> str:
        return path_of(self.spec, self.arch)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def _sources() -> list[_Source]:
    return sorted((_Source(spec, arch, render(spec, arch)) for spec, arch in default_variants()), key=lambda source: source.path)


def _texts(sources: Sequence[_Source]) -> dict[str, bytes]:
    """The files beside the lock, by path."""
    return {source.path: source.text.encode() for source in sources if str(source.arch) in TEXT_ARCHS}


def _resources(source: _Source) -> Resources:
    resources = compiler.compile_cubin(source.text, source.arch, str(source.spec)).resources
    if resources.spills:
        raise SpillError(str(source.spec), str(source.arch), resources.spills, resources.registers)
    return resources


def _fresh(sources: Sequence[_Source], old: Lock) -> Lock:
    """The lock of these sources: under the compiler at hand as it compiles them now, under others as the old one has the same sources.

    Raises SpillError.
    """
    build = compiler.build_id()
    major = major_of(build)
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(_resources, sources))
    variants = {}
    for source, resources in zip(sources, compiled, strict=True):
        known = old.variants.get(source.path)
        others = known.resources if known and known.source_sha256 == source.digest else {}
        variants[source.path] = Locked(str(source.spec), str(source.arch), source.digest, {**others, major: resources})
    return Lock({**old.compilers, major: build}, variants)


def _files(root: Path) -> list[str]:
    """Every file and link below a folder, relative to it; links are not followed."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir())


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise FileError(f"{plain(str(e.filename or root))} cannot be read or written: {e.strerror or e}") from e


def _foreign(root: Path, texts: Mapping[str, bytes], old: Lock) -> list[str]:
    """What is below a folder and no regular file, and the .cu files that ssmgen did not write there, with the reason."""
    found = []
    for name in _files(root):
        path, locked = root / name, old.variants.get(name)
        if path.is_symlink():
            found.append(f"{plain(name)} is a link")
        elif not path.is_file():
            found.append(f"{plain(name)} is no regular file")
        elif path.suffix != ".cu" or texts.get(name) == path.read_bytes():
            continue
        elif locked is None:
            found.append(f"{plain(name)} is not in {LOCK}")
        elif not path.read_bytes().startswith(locked.header.encode()):
            found.append(f"{name} does not begin with {locked.header!r}")
    return found


def write(root: Path) -> tuple[int, str]:
    """Renders, compiles and writes everything: (variants, note). Removes what it wrote before and no longer writes, and nothing else.

    Raises SpillError; LockError; ForeignFilesError and FileError, before which nothing was removed.
    """
    sources = _sources()
    texts = _texts(sources)
    with _folder(root):
        try:
            old = Lock.read(root / LOCK)
        except FileNotFoundError:
            old = Lock({}, {})
        if foreign := _foreign(root, texts, old):
            raise ForeignFilesError(root, foreign)
    lock = _fresh(sources, old)
    with _folder(root):
        for name in _files(root):
            if name.endswith(".cu") and name not in texts:
                (root / name).unlink()
        for name, text in texts.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text)
        (root / LOCK).write_text(str(lock))
    return len(sources), "; ".join(_unasked(lock))


def _unasked(lock: Lock) -> list[str]:
    """What another compiler would have to be asked for."""
    words = "have no resources under {build}: run `ssmgen generate` with that NVRTC, too"
    return [f"{len(names)} {words.format(build=build)}" for build, names in lock.unasked().items()]


def check(root: Path, any_compiler: bool = False) -> tuple[int, str]:
    """(variants, note). Raises DriftError naming everything that `write` would change, and every file that is not of it; LockError;
    FileError; SpillError for a variant that spills.

    any_compiler: where the lock has no resources under the compiler at hand, that is a note and no drift.
    """
    try:
        old = Lock.read(root / LOCK)
    except FileNotFoundError as e:
        raise DriftError([f"{root / LOCK} is missing"]) from e
    sources = _sources()
    texts = _texts(sources)
    new = _fresh(sources, old)
    with _folder(root):
        problems = _changed_files(root, texts) + _changed_rows(old, new)
        if not problems and (root / LOCK).read_text() != str(old):
            problems.append(f"{LOCK} is not as it is written: names twice, or in another order or form")
    problems += [f"{LOCK}: {words}" for words in _unasked(old)]
    note = ""
    if old.compilers != new.compilers:
        note = f"resources not compared: the lock is of {' and '.join(old.compilers.values()) or 'none'}, this is {compiler.build_id()}"
    if note and not any_compiler:
        problems.append(note)
    if problems:
        raise DriftError(problems)
    return len(sources), note


def _changed_files(root: Path, texts: Mapping[str, bytes]) -> list[str]:
    found = _files(root)
    problems = [f"{plain(name)} is not generated" for name in sorted({*found} - {LOCK, *texts})]
    for name, text in texts.items():
        path = root / name
        if name not in found:
            problems.append(f"{name} is missing")
        elif path.is_symlink() or not path.is_file():
            problems.append(f"{name} is no regular file")
        elif path.read_bytes() != text:
            problems.append(f"{name} differs from what the template renders")
    return problems


def _changed_rows(old: Lock, new: Lock) -> list[str]:
    """Resources are compared under compilers that both name: others' are not known again."""
    problems = [f"{name} is no longer a default variant" for name in sorted(old.variants.keys() - new.variants.keys())]
    same = [major for major, build in new.compilers.items() if old.compilers.get(major) == build]
    for name, row in new.variants.items():
        locked = old.variants.get(name)
        if locked is None:
            problems.append(f"{name} is missing from {LOCK}")
        elif (locked.spec, locked.arch, locked.source_sha256) != (row.spec, row.arch, row.source_sha256):
            problems.append(f"{name}: {LOCK} records another source")
        else:
            pairs = ((locked.resources.get(major), row.resources.get(major)) for major in same)
            problems += [f"{name}: resources were {was}, are {now}" for was, now in pairs if was and was != now]
    return problems
