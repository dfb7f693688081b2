"""generated/: variants for every path through the templates as text, and ssmgen.lock with the digest and the resources of all default
variants. A review of them shows how the CUDA and its resources changed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..cache.files import FileError, plain
from ..cache.store import Cache
from ..compile import nvrtc
from ..compile.nvrtc import Resources
from ..compile.render import render
from ..errors import DriftError, SpillError, SsmgenError, bullets
from ..spec.kernel import Arch, KernelSpec
from .defaults import named
from .lock import LOCK, Lock, Locked, major_of
from .paths import cover, lines_of

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # in the lock
TEXT_ARCHS = ("sm_80", "sm_90a")  # of the committed texts: without and with programmatic dependent launch


class ForeignFilesError(SsmgenError):
    """A folder to generate into has files that would be overwritten or removed, and that ssmgen did not write."""

    def __init__(self, root: Path, problems: Sequence[str]):
        super().__init__(
            f"{root} has files that ssmgen did not write:\n{bullets(problems)}\nNothing was changed. Move them, or give another --dir."
        )
        self.problems = list(problems)


class OtherCheckoutError(SsmgenError):
    """A checkout's folder would be compared with the templates of another ssmgen."""

    def __init__(self, root: Path, checkout: Path, package: Path):
        super().__init__(
            f"{plain(str(root))} belongs to the checkout {plain(str(checkout))}; this ssmgen runs from {plain(str(package))}. "
            "Its templates may differ. Nothing was compared or written.\n"
            f"Run: cd {plain(str(checkout))} && PYTHONPATH=. python -m ssmgen generate"
        )


def _own(root: Path) -> None:
    """Raises OtherCheckoutError if the folder is in another checkout than this package."""
    checkout, package = root.resolve().parent, Path(__file__).resolve().parents[1]
    if (checkout / "ssmgen" / "__init__.py").is_file() and checkout / "ssmgen" != package:
        raise OtherCheckoutError(root, checkout, package)


def default_variants(archs: Sequence[Arch] = tuple(map(Arch.parse, ARCHS))) -> list[tuple[KernelSpec, Arch]]:
    """The variants in the lock, or the same ones for other architectures."""
    return list(dict.fromkeys((spec, arch) for arch in archs for _, _, default in named() for spec in default.specs(arch)))


def path_of(spec: KernelSpec, arch: Arch) -> str:
    """Relative to generated/."""
    return f"{arch}/{spec.name}.cu"


@dataclass(frozen=True, slots=True)
class _Source:
    """A default variant as text. digest: sha256 of the text."""

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


def _texts(sources: Sequence[_Source], shown: Collection[str]) -> dict[str, bytes]:
    """The files next to the lock, by path. shown: the paths of these files."""
    return {source.path: source.text.encode() for source in sources if source.path in shown}


def _shown(sources: Sequence[_Source], old: Lock) -> frozenset[str]:
    """Paths of the variants whose text is committed. Together they contain every template line that a default variant renders. A committed
    text stays as long as it has a line that the other texts lack."""
    of_texts = [source for source in sources if str(source.arch) in TEXT_ARCHS]
    lines = {source.path: lines_of(source.spec, source.arch) for source in of_texts}
    lengths = {source.path: len(source.text) for source in of_texts}
    return frozenset(cover(lines, lengths, [name for name, row in old.variants.items() if row.shown]))


def _resources(source: _Source, cache: Cache) -> Resources:
    resources = cache.get(source.spec, source.arch)[0].resources
    if resources.spills:
        raise SpillError(str(source.spec), str(source.arch), resources.spills, resources.registers)
    return resources


def _fresh(sources: Sequence[_Source], old: Lock, shown: Collection[str]) -> Lock:
    """The lock of these sources. Resources for the installed compiler come from compiling or from the cache; resources for other compilers
    come from the old lock, for sources that have not changed.

    Raises SpillError.
    """
    build = nvrtc.build_id()
    major = major_of(build)
    cache = Cache.from_environment()  # the process's cache would keep 500 kernels in memory
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda source: _resources(source, cache), sources))
    variants = {}
    for source, resources in zip(sources, compiled, strict=True):
        known = old.variants.get(source.path)
        others = known.resources if known and known.source_sha256 == source.digest else {}
        variants[source.path] = Locked(str(source.spec), source.digest, {**others, major: resources}, source.path in shown)
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
    """Links, special files, and .cu files that ssmgen did not write, below a folder, with the reason."""
    found = []
    for name in _files(root):
        path, locked = root / name, old.variants.get(name)
        if path.is_symlink():
            found.append(f"{plain(name)} is a link")
        elif not path.is_file():
            found.append(f"{plain(name)} is not a regular file")
        elif path.suffix != ".cu" or texts.get(name) == path.read_bytes():
            continue
        elif locked is None:
            found.append(f"{plain(name)} is not in {LOCK}")
        elif not path.read_bytes().startswith(locked.header(name).encode()):
            found.append(f"{name} does not begin with {locked.header(name)!r}")
    return found


def write(root: Path) -> tuple[int, str]:
    """Renders, compiles and writes everything: (variants, note). Removes files that it wrote earlier and no longer writes, and no others.

    Raises SpillError; LockError; OtherCheckoutError, ForeignFilesError and FileError, before any file is removed.
    """
    _own(root)
    sources = _sources()
    with _folder(root):
        try:
            old = Lock.read(root / LOCK)
        except FileNotFoundError:
            old = Lock({}, {})
        shown = _shown(sources, old)
        texts = _texts(sources, shown)
        if foreign := _foreign(root, texts, old):
            raise ForeignFilesError(root, foreign)
    lock = _fresh(sources, old, shown)
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
    """The variants without resources under a compiler, in words."""
    words = "have no resources under {build}. Run `ssmgen generate` with that NVRTC too."
    return [f"{len(names)} {words.format(build=build)}" for build, names in lock.unasked().items()]


def check(root: Path, any_compiler: bool = False) -> tuple[int, str]:
    """(variants, note). Raises DriftError naming everything that `write` would change, and every file that it does not write; LockError;
    FileError; SpillError for a variant that spills.

    any_compiler: missing resources, under the installed compiler or for some variants under the other one, are reported in the note, not as
    drift. Raises OtherCheckoutError.
    """
    _own(root)
    try:
        old = Lock.read(root / LOCK)
    except FileNotFoundError as e:
        raise DriftError([f"{root / LOCK} is missing"]) from e
    sources, shown = _sources(), {name for name, row in old.variants.items() if row.shown}
    texts = _texts(sources, shown)
    new = _fresh(sources, old, shown)
    with _folder(root):
        problems = _changed_files(root, texts) + _changed_rows(old, new)
        if not problems and (root / LOCK).read_text() != str(old):
            problems.append(f"{LOCK} is not in the form that ssmgen writes: a name occurs twice, or the order or the spacing differs")
    notes = [f"{LOCK}: {words}" for words in _unasked(old)]
    if old.compilers != new.compilers:
        notes.append(
            f"resources were not compared: the lock is of {' and '.join(old.compilers.values()) or 'no compiler'}, this compiler is "
            f"{nvrtc.build_id()}"
        )
    if not any_compiler:
        problems += notes
    if problems:
        raise DriftError(problems)
    return len(sources), "; ".join(notes)


def _changed_files(root: Path, texts: Mapping[str, bytes]) -> list[str]:
    found = _files(root)
    problems = [f"{plain(name)} is not a generated file" for name in sorted({*found} - {LOCK, *texts})]
    for name, text in texts.items():
        path = root / name
        if name not in found:
            problems.append(f"{name} is missing")
        elif path.is_symlink() or not path.is_file():
            problems.append(f"{name} is not a regular file")
        elif path.read_bytes() != text:
            problems.append(f"{name} differs from what the template renders")
    return problems


def _changed_rows(old: Lock, new: Lock) -> list[str]:
    """Resources are compared for the compilers that both locks name. Others cannot be measured again here."""
    problems = [f"{name} is no longer a default variant" for name in sorted(old.variants.keys() - new.variants.keys())]
    same = [major for major, build in new.compilers.items() if old.compilers.get(major) == build]
    for name, row in new.variants.items():
        locked = old.variants.get(name)
        if locked is None:
            problems.append(f"{name} is missing from {LOCK}")
        elif (locked.spec, locked.source_sha256) != (row.spec, row.source_sha256):
            problems.append(f"{name}: {LOCK} records another source")
        else:
            pairs = ((locked.resources.get(major), row.resources.get(major)) for major in same)
            problems += [f"{name}: resources are {now}; expected {was}" for was, now in pairs if was and was != now]
    return problems
