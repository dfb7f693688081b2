"""All kernels: operators by name, the operator of a problem, and spec classes by the first word of spec texts."""

from __future__ import annotations

import sys
from types import ModuleType

from ..spec.family import records
from ..spec.kernel import KernelSpec, Problem, parse_spec

SPECS: dict[str, type[KernelSpec]] = {}
OPERATORS: dict[str, ModuleType] = {}  # modules with `space` and `candidates`, which the registry calls
OPERATOR_OF: dict[type[Problem], str] = {}
SERVED_BY: dict[str, str] = {}  # {name of a spec class: the operator whose calls its variants serve}; without parts and tools
LAUNCHED_BY: dict[type[KernelSpec], dict[type[Problem], str]] = {}  # {spec class: {problem whose calls launch it: its part, or empty}}
OLD_NAMES: dict[str, tuple[str, str]] = {}  # of specs and operators: {old name: (name, fields that its texts left out)}

for _family in records():
    for _kernels in _family.kernels:
        _spec = _family.part(_kernels.spec)
        SPECS |= dict.fromkeys(_spec.kinds(), _spec)
        OLD_NAMES |= {old: (_spec.family, fields) for old, fields in _kernels.old_names.items()}
        if _kernels.problem:
            _problem = _family.part(_kernels.problem)
            _module = _family.part(_kernels.rules) if _kernels.rules else sys.modules[_spec.__module__]
            OPERATORS[_spec.family] = _module
            OPERATOR_OF[_problem] = _spec.family
            SERVED_BY |= dict.fromkeys(_family.variants_of(_problem), _spec.family)

for _family in records():
    _parts = {_family.part(_kernels.spec): "" for _kernels in _family.kernels}
    _parts |= {SPECS[kind]: part for kind, part in _family.launches.items()}
    for _problem in (_family.part(_kernels.problem) for _kernels in _family.kernels if _kernels.problem):
        for _spec, _part in _parts.items():
            LAUNCHED_BY.setdefault(_spec, {})[_problem] = _part


def name_of(name: str) -> str:
    """The current name of an operator."""
    return OLD_NAMES[name][0] if name in OLD_NAMES else name


def parse(text: str) -> KernelSpec:
    """The spec of a text from this release or an earlier one. Raises SpecError naming every unreadable part."""
    old, _, said = text.partition(":")
    if old in OLD_NAMES:
        name, unsaid = OLD_NAMES[old]
        text = f"{name}:{','.join(filter(None, (unsaid, said)))}"
    return parse_spec(text, SPECS)
