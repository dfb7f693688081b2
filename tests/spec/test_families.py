"""Records of families are complete, and nothing else names a family."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT
from programs import succeeds

from ssmgen.calls.sharding_rules import RULES
from ssmgen.emulator.check import trial_of
from ssmgen.errors import SsmgenError
from ssmgen.select.catalog import SPECS
from ssmgen.select.models import OPTIONS
from ssmgen.spec.family import PACKAGE, Family, records
from ssmgen.spec.kernel import KernelSpec

FAMILIES = pytest.mark.parametrize("family", records(), ids=lambda family: family.name)


def places(family: Family) -> Iterator[str]:
    """All that its record names."""
    for kernels in family.kernels:
        yield from filter(None, (kernels.spec, kernels.problem))
    yield from (*family.functions.values(), *family.types.values(), *family.helpers.values(), *family.bench.values())
    yield from filter(None, (family.sharding, family.context, family.trials, family.models, family.asks, family.copies, family.defaults))


@FAMILIES
def test_every_place_of_a_record_has_something(family):
    missing = []
    for place in places(family):
        try:
            family.part(place)
        except (ImportError, AttributeError) as e:
            missing.append(f"{place}: {e}")
    assert not missing


@FAMILIES
def test_a_record_has_the_name_of_its_package_and_no_part_for_others(family):
    """Parts of another family would be lost, or would replace that family's parts, when all parts are put together."""
    assert importlib.import_module(f"{PACKAGE}.{family.name}").FAMILY is family
    kinds = {family.part(kernels.spec) for kernels in family.kernels}
    assert set(family.part(family.trials) if family.trials else ()) <= kinds
    assert set(family.part(family.sharding) if family.sharding else ()) <= set(family.functions)
    own = {family.part(kernels.spec).family for kernels in family.kernels if kernels.problem} | set(family.functions)
    asks = family.part(family.asks) if family.asks else {}
    assert set(asks) <= own and all(operator == ask.operator and ask.options <= OPTIONS for operator, ask in asks.items())


@FAMILIES
def test_kernels_have_a_trial_or_the_record_says_why_not(family):
    trials = family.part(family.trials) if family.trials else {}
    for kernels in family.kernels:
        kind = family.part(kernels.spec)
        assert (kind in trials) == (not kernels.unchecked), f"{kind.__name__}: a trial, or why there is none, and not both"
        assert kernels.problem is None or kind in trials, f"{kind.__name__} serves calls"


def test_what_cannot_be_checked_says_why():
    class NobodysSpec(KernelSpec):
        family = "nobodys"

    said = [(NobodysSpec, "nobodys", "no family has a trial of NobodysSpec")]
    for family in records():
        for kernels in family.kernels:
            spec = family.part(kernels.spec)
            said += [(spec, kind, why) for kind, why in kernels.parts.items()]
            said += [(spec, spec.family, kernels.unchecked)] if kernels.unchecked else []
    for spec, kind, why in said:
        made = object.__new__(spec)
        for name, value in spec.kinds()[kind].items():
            object.__setattr__(made, name, value)
        with pytest.raises(SsmgenError) as refused:
            trial_of(made, 1, 0)
        assert str(refused.value) == f"{kind} cannot be checked: {why}"


def depth(spec: type) -> int:
    """How many classes there are from KernelSpec's first heir down to this one, on the longest way."""
    return 1 + max((depth(base) for base in spec.__bases__ if issubclass(base, KernelSpec) and base is not KernelSpec), default=0)


def test_no_spec_has_more_than_three_levels_of_classes():
    """Variants differ by fields; a class per difference would hide them."""
    assert not {spec.__name__: depth(spec) for spec in SPECS.values() if depth(spec) > 3}


def test_every_function_has_a_sharding_rule():
    assert {name for family in records() for name in family.functions} == set(RULES)


def test_records_and_rules_are_read_without_torch():
    program = (
        "import sys, ssmgen.spec.family, ssmgen.calls.sharding_rules as rules\n"
        "assert rules.RULES and ssmgen.spec.family.public_names()\n"
        "assert not {'torch', 'cuda.bindings', 'jinja2'} & set(sys.modules)\n"
    )
    succeeds(program)


@FAMILIES
def test_a_family_with_functions_has_a_page_that_readers_find(family):
    if family.page is None:
        assert not family.functions
        return
    assert (DOCS / family.page).is_file()
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert re.search(rf"^ +- .*: {re.escape(family.page)}$", nav, re.MULTILINE)
    text = (DOCS / family.page).read_text()
    assert not [name for name in family.functions if not re.search(rf"\b{name}\b", text)]


# A family's name may occur in its folder, and in modules with other packages' signatures.
ALLOWED = ("families", "compat")


def test_nothing_else_names_a_family():
    kernels = {name for name, spec in SPECS.items() if not spec.__module__.startswith("ssmgen.engine.")}  # of the engine's own: no family's
    names = {*kernels, *(family.name for family in records()), *(name for family in records() for name in family.functions)}
    words, package = re.compile(rf"\b(?:{'|'.join(sorted(names))})\b"), ROOT / "ssmgen"
    found = {}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package)
        if module.parts[0] not in ALLOWED and (lines := words.findall(path.read_text())):
            found[module.as_posix()] = len(lines)
    assert not found, "these name families, so often: let them ask the records (ssmgen/spec/family.py)"


def imported(path: Path) -> Iterator[str]:
    """Modules that a file of the package imports, at its top or in a function, by their full names; and names in `from … import`."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{name.name}" for name in node.names)


def test_no_family_imports_another():
    """Shared parts stand in ssmgen/engine/, which imports no family."""
    found = []
    for path in sorted((ROOT / "ssmgen").glob("families/*/*.py")) + sorted((ROOT / "ssmgen" / "engine").rglob("*.py")):
        others = [name for name in imported(path) if name.startswith(f"{PACKAGE}.") and name.split(".")[2] != path.parent.name]
        found += [f"{path.relative_to(ROOT)} imports {name}" for name in others]
    assert not found


LINES = 400


def test_no_file_is_too_long_to_read():
    lengths = {
        path.relative_to(ROOT).as_posix(): path.read_text().count("\n")
        for top in ("ssmgen", "tests")
        for path in (ROOT / top).rglob("*.py")
    }
    longer = {name: count for name, count in lengths.items() if count > LINES}
    assert not longer, f"of more than {LINES} lines: give a part a module and a name of its own"
