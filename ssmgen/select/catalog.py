"""The kernels that there are: operators by name, the operator of a problem, and spec classes by the name that texts of specs begin with."""

from __future__ import annotations

import sys
from types import ModuleType

from ..spec.family import records
from ..spec.kernel import KernelSpec, Problem, parse_spec

SPECS: dict[str, type[KernelSpec]] = {}
OPERATORS: dict[str, ModuleType] = {}  # modules with `space` and `candidates`: what the registry asks
OPERATOR_OF: dict[type[Problem], str] = {}
SERVED_BY: dict[str, str] = {}  # {name of a spec class: the operator whose calls its variants serve}; parts and tools serve none
OLD_NAMES: dict[str, tuple[str, str]] = {}  # of specs and operators: {old name: (name, fields that its texts did not say)}

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


def name_of(name: str) -> str:
    """What an operator is called now."""
    return OLD_NAMES[name][0] if name in OLD_NAMES else name


def parse(text: str) -> KernelSpec:
    """The spec that a text of this release, or of one before it, says. Raises SpecError naming every unreadable part."""
    old, _, said = text.partition(":")
    if old in OLD_NAMES:
        name, unsaid = OLD_NAMES[old]
        text = f"{name}:{','.join(filter(None, (unsaid, said)))}"
    return parse_spec(text, SPECS)
