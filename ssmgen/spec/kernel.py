"""Kernel specs: small frozen dataclasses that hold everything the generated code depends on, and nothing else.

A spec has one canonical text, ``family:field=value,...``, which parses back to it. Batch size, pool size, strides and slot ids
are run-time arguments and never appear here, so a change of batch size compiles nothing.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar, cast, get_args, get_type_hints

from ..errors import SpecError
from .element_types import DType as DType
from .element_types import Narrow as Narrow
from .element_types import stored_type as stored_type
from .needs import Needs
from .parameters import MAP_BYTES as MAP_BYTES
from .parameters import Param as Param

T = TypeVar("T")


class Index(Enum):
    """Type of a slot index tensor; NONE means slot = position in the batch."""

    NONE = "none"
    I32 = "i32"
    I64 = "i64"


class Loads(Enum):
    """How an operand is read: whole 16-byte (or narrower, if the row is) vectors, or element by element at any stride."""

    VECTOR = "vector"
    ELEMENT = "element"


class PoolMode(Enum):
    """SINGLE: the state is written to the slot it was read from. SPLIT: to a separate slot (`dst_state_indices`)."""

    SINGLE = "single"
    SPLIT = "split"


class Layout(Enum):
    """Order of the state's last two axes. VK: key channels are contiguous. KV: value channels are."""

    VK = "vk"
    KV = "kv"


class Ring(Enum):
    """A buffer, by slot, of the raw k, v, g and beta of a call's tokens: absent, written, or replayed by a commit. READY: written, with log
    decays and step sizes in f32. REPLAY: of keys, errors and log decays, through which a step of one token reads its state."""

    NONE = "none"
    STORE = "store"
    READY = "ready"
    COMMIT = "commit"
    REPLAY = "replay"


class Update(Enum):
    """The states written to the pool: none, the state after the last token, or the state after each token, each in a separate slot."""

    NONE = "none"
    FINAL = "final"
    EACH = "each"


class Pdl(Enum):
    """Programmatic dependent launch: no wait at all, or a wait at the top and a choice of where dependents may start.

    TRIGGER_FIRST is for kernels whose successor reads only constants before its own wait. Every kernel waits before it ends: its end proves
    that all kernels before it have ended.
    OFF also lets dependents start once the first loads are issued (from sm_90 on): it costs nothing, and it keeps ptxas from moving
    those loads down.
    """

    OFF = "off"
    WAIT = "wait"  # wait; dependents start when the last block ends
    TRIGGER_FIRST = "trigger_first"  # dependents may start once every block has begun; then the wait
    TRIGGER_TOP = "trigger_top"  # wait; dependents may start once every block has begun
    TRIGGER_SLOT = "trigger_slot"  # wait; dependents may start once every block has loaded its slot index
    TRIGGER_LOADED = "trigger_loaded"  # wait; dependents may start once every block has issued its first loads


@dataclass(frozen=True, order=True, slots=True)
class Arch:
    """A compile target such as sm_90a. Ordered by compute capability."""

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Arch:
        match = re.fullmatch(r"sm_(\d{2,3})([af]?)", text)
        if not match:
            raise SpecError(text, ["this is not an architecture; expected one such as sm_80, sm_90a, sm_100a or sm_120"])
        return cls(int(match[1]), match[2])

    @classmethod
    def of_capability(cls, major: int, minor: int) -> Arch:
        """The target for a device. 9.x and 10.x have architecture-specific instructions, which need the suffix `a`."""
        return cls(major * 10 + minor, "a" if major in (9, 10) else "")

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


FP8 = Arch(89)  # the first with conversions to and from FP8
SM90 = Arch(90)


def must(holds: bool, otherwise: str) -> list[str]:
    """[] when the constraint holds, else its violation in words."""
    return [] if holds else [otherwise]


def is_pow2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


# For a field added later to its family: it appears in a text only if it is not its default, so that variants without it keep their names
# and texts.
LATER = {"later": True}
NAMED = {"named": True}  # for a field that is implied by the first word of a text (`KernelSpec.kinds`) and is not an item of it
BARE = {"bare": True}  # for a field of a part: its name in texts is the part's name


@dataclass(frozen=True, slots=True)
class Part:
    """Base of a group of fields that several specs share, as one field whose default is the group's default. It is frozen.

    Texts list its fields one by one, with the group's name as prefix: `conv_width` is `width` of `conv`.
    """


class Entry(NamedTuple):
    """A field as it appears in texts; part: the field that holds it, or empty."""

    field: Field[Any]
    part: str

    def of(self, given: Any) -> Any:
        return getattr(getattr(given, self.part) if self.part else given, self.field.name)


def _by_class(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """functools.cache for functions of classes. For mypy the class of a frozen dataclass is not hashable, since its instances are."""
    return functools.cache(function)


@_by_class
def entries(kind: Any) -> dict[str, Entry]:
    """The fields of a spec class, or a problem's, by their names in texts."""
    found: dict[str, Entry] = {}
    for f in fields(kind):
        if isinstance(f.default, Part):
            own = fields(f.default)
            found |= {f.name if "bare" in inner.metadata else f"{f.name}_{inner.name}": Entry(inner, f.name) for inner in own}
        else:
            found[f.name] = Entry(f, "")
    return found


def flat(given: Any) -> dict[str, Any]:
    """{name in texts: value} of a spec, or of a problem."""
    return {name: entry.of(given) for name, entry in entries(type(given)).items()}


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """The spec, or the problem, with these values by their names in texts; the other fields have their defaults."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    known = entries(kind)
    for name, value in values.items():
        entry = known.get(name)
        if entry is not None and entry.part:
            parts.setdefault(entry.part, {})[entry.field.name] = value
        else:
            own[name] = value
    groups: dict[str, Any] = {f.name: f.default for f in fields(cast(Any, kind)) if f.name in parts}
    return kind(**own, **{name: replace(groups[name], **inner) for name, inner in parts.items()})


def changed(given: T, **values: Any) -> T:
    """The same spec, or problem, with these values replaced, by their names in texts."""
    return made(type(given), flat(given) | values)


@dataclass(frozen=True, slots=True)
class Problem:
    """Base of every family's problem: the properties of a call that its kernel depends on."""

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Base of every family's spec."""

    family: ClassVar[str]
    triggers_first: ClassVar[bool] = False  # may let dependents start before its own wait
    table: ClassVar[Any]  # the operand table (`spec/operands.py`) of its kernels

    @property
    def kind(self) -> str:
        """The first word of its text: the family's name, unless fields choose another one."""
        return self.family

    @classmethod
    def kinds(cls) -> Mapping[str, Mapping[str, Any]]:
        """{each such name: the fields that texts with it leave out}"""
        return {cls.family: {}}

    @property
    def template(self) -> str:
        """A file in `templates`. It is the same for all specs of a class, unless a field selects one."""
        raise NotImplementedError

    @property
    def pdl(self) -> Pdl:
        """A field of every spec."""
        raise NotImplementedError

    @property
    def needs(self) -> Needs:
        """The parts of the library that the template includes. Default: exponentials, and gathered vectors if a field is Loads.ELEMENT."""
        return Needs(math=True, elements=any(value is Loads.ELEMENT for value in flat(self).values()))

    @property
    def ahead(self) -> tuple[KernelSpec, ...]:
        """The kernels of a call that are launched before this one."""
        return ()

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """All kernels of a call, in the order of their launch."""
        return (*self.ahead, self)

    @property
    def order(self) -> tuple[str | int, ...]:
        """The choices that change the order of its sums. Tuning only compares variants with equal values, which give the same bits."""
        return ()

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a thread-block cluster; 1 if there are no clusters."""
        return 1

    @property
    def stays(self) -> bool:
        """Whether blocks are persistent and take over the work of blocks that do not fit: a launch then has at most one block per SM."""
        return False

    def operands(self) -> list[str]:
        """The tensors whose pointers a launch takes, in this order."""
        names: list[str] = self.table.of(self)
        return names

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a launch, in addition to the memory declared in the text: all memory above 48 KiB must be dynamic."""
        return 0

    def early_operands(self) -> list[str]:
        """The operands that may be touched before the wait for the upstream kernel, for a reason that the kernel states."""
        return []

    @property
    def traffic(self) -> tuple[int, int] | None:
        """(bytes of state that a block reads, the bytes of them in flight at once); None if this says little about the time."""
        return None

    def with_early_triggers(self) -> KernelSpec:
        """The same variant for small calls: the next kernel starts as early as the contracts of the call's kernels allow."""
        return self

    def violations(self, arch: Arch) -> list[str]:
        """Every broken constraint in words; the only place that knows what is legal."""
        raise NotImplementedError

    def arch_violations(self, arch: Arch, needs: str = "bf16 arithmetic") -> list[str]:
        """Constraints on the architecture that most kernels have. needs: features that begin with sm_80."""
        return [
            *must(arch >= Arch(80), f"arch is {arch}; expected sm_80 or later for {needs}"),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"arch is {arch}; expected sm_90 or later, or pdl=off"),
            *must(self.triggers_first or self.pdl is not Pdl.TRIGGER_FIRST, "pdl is trigger_first; expected a trigger after the wait"),
        ]

    def check(self, arch: Arch) -> None:
        """Raises SpecError with every violation."""
        try:
            problems = self.violations(arch)
        except ArithmeticError as e:  # divisions by fields of 0 happen before those fields are checked
            problems = [f"a field is 0 where another one is divided by it ({e}); expected 1 or more"]
        if problems:
            raise SpecError(f"{self} for {arch}", problems)

    @property
    def stem(self) -> str:
        """Readable part of the name, without a digest."""
        raise NotImplementedError

    @property
    def threads_per_block(self) -> int:
        raise NotImplementedError

    def parameters(self) -> list[Param]:
        """Kernel arguments in order."""
        raise NotImplementedError

    def constants(self) -> dict[str, Any]:
        """Derived values that the template names."""
        return {}

    def said(self) -> Iterator[str]:
        """The fields of its text."""
        told = ((name, entry.field, entry.of(self)) for name, entry in entries(type(self)).items() if "named" not in entry.field.metadata)
        return (f"{name}={text_of(value)}" for name, f, value in told if value != f.default or "later" not in f.metadata)

    def __str__(self) -> str:
        return f"{self.kind}:" + ",".join(self.said())

    @property
    def name(self) -> str:
        """Readable and unique: file name in generated/, and the kernel's symbol."""
        return f"{self.stem}_{hashlib.sha256(str(self).encode()).hexdigest()[:8]}"


def text_of(value: Any) -> str:
    """A field's value as it stands in a spec's text."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _value(kind: Any, text: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(text)
    if kind is bool:
        return bool(("no", "yes").index(text))
    if kind is int:
        return int(text)
    if text == "none" and type(None) in get_args(kind):
        return None
    enums = [enum for enum in get_args(kind) if enum is not type(None)]  # DType | Narrow | None
    found = [member for enum in enums for member in enum if member.value == text]
    if not found:
        raise ValueError(text)
    return found[0]


def _choices(kind: Any) -> str:
    """The values that `_value` reads, in words."""
    plain = {bool: "yes, no", int: "a whole number", type(None): "none"}
    return ", ".join(plain.get(one) or ", ".join(str(member.value) for member in one) for one in get_args(kind) or (kind,))


_hints = _by_class(get_type_hints)  # 0.4 ms, which a table of some hundred rows would take for each row


def _kind(cls: type[KernelSpec], entry: Entry) -> Any:
    """The type of a field."""
    return _hints(_hints(cls)[entry.part] if entry.part else cls)[entry.field.name]


def parse_spec(text: str, families: dict[str, type[KernelSpec]]) -> KernelSpec:
    """Reads a canonical text back. Fields with a default may be left out. Raises SpecError naming every unreadable part."""
    family, _, rest = text.partition(":")
    if family not in families:
        raise SpecError(text, [f"the family is {family!r}; expected one of {', '.join(sorted(families))}"])
    known, named = entries(cls := families[family]), set()
    values: dict[str, Any] = dict(cls.kinds()[family])
    problems = []
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        named.add(key)
        if key not in known:
            problems.append(f"field {key!r} is unknown; expected one of {', '.join(known)}")
            continue
        try:
            values[key] = _value(kind := _kind(cls, known[key]), value)
        except ValueError:
            problems.append(f"{key} is {value!r}; expected one of {_choices(kind)}")
    missing = [name for name, entry in known.items() if name not in named and entry.field.default is MISSING]
    problems += must(not missing, f"{', '.join(missing)} is missing; expected a value for each field without a default")
    if problems:
        raise SpecError(text, problems)
    return made(cls, values)
