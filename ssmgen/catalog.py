"""The kernels that there are: operators by name, the operator of a problem, and spec classes by the name that texts of specs begin with."""

from __future__ import annotations

import sys
from types import ModuleType

from .family import records
from .spec import KernelSpec, Problem

SPECS: dict[str, type[KernelSpec]] = {}
OPERATORS: dict[str, ModuleType] = {}  # modules with `space` and `candidates`: what the registry asks
OPERATOR_OF: dict[type[Problem], str] = {}

for _family in records():
    for _kernels in _family.kernels:
        _spec = _family.part(_kernels.spec)
        SPECS[_spec.family] = _spec
        if _kernels.problem:
            _problem = _family.part(_kernels.problem)
            _module = sys.modules[_spec.__module__]
            OPERATORS[_spec.family] = _module
            OPERATOR_OF[_problem] = _spec.family
