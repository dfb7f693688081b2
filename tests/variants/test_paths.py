"""The committed texts show every path that default variants take through the templates, and are few."""

from __future__ import annotations

from pathlib import Path

import pytest

import ssmgen
from ssmgen.spec.kernel import Arch
from ssmgen.variants import generate
from ssmgen.variants.lock import LOCK, Lock
from ssmgen.variants.paths import cover, lines_of

GENERATED = Path(ssmgen.__file__).parents[1] / "generated"
MOST = 91  # texts that a reviewer may be asked to look at


def shown() -> set[str]:
    return {name for name, row in Lock.read(GENERATED / LOCK).variants.items() if row.shown}


def test_every_template_line_of_a_default_variant_is_in_a_committed_text():
    pairs = generate.default_variants(tuple(map(Arch.parse, generate.TEXT_ARCHS)))
    lines = {generate.path_of(*pair): lines_of(*pair) for pair in pairs}
    seen = frozenset().union(*(lines[name] for name in shown()))
    assert len(seen) > 3000  # of the templates' lines: a trace that sees nothing would pass
    missing = {name: rest for name, found in lines.items() if (rest := found - seen)}
    assert not missing, "run `ssmgen generate`"


def test_committed_texts_are_few_and_whole():
    names = {str(path.relative_to(GENERATED)) for path in GENERATED.glob("*/*.cu")}
    assert names == shown() and len(names) <= MOST


def test_a_variant_has_lines_that_another_lacks():
    """A tracer that reported whole templates, branches not taken included, would find no difference."""
    found = [spec for spec, arch in generate.default_variants() if str(arch) == "sm_90a" and spec.stem.startswith("ssu_")]
    one, other = (lines_of(spec, Arch.parse("sm_90a")) for spec in (found[0], next(s for s in found if s.template != found[0].template)))
    assert one - other and other - one and one & other
    assert lines_of(found[0], Arch.parse("sm_90a")) == one == lines_of(found[0], Arch.parse("sm_100a"))


@pytest.mark.parametrize(
    ("kept", "found"),
    [((), ["wide"]), (("a",), ["a", "b"]), (("same", "wide"), ["wide"]), (("gone",), ["wide"])],
)
def test_a_cover_keeps_what_adds_a_line_and_takes_what_adds_the_most(kept, found):
    one, two, three = (("t", n) for n in (1, 2, 3))
    lines = {"wide": {one, two, three}, "a": {one, two}, "b": {three}, "same": {one, two}}
    assert cover({n: frozenset(v) for n, v in lines.items()}, dict.fromkeys(lines, 1), kept) == sorted(found)


def test_of_two_that_add_as_many_lines_the_shorter_text_is_taken():
    lines = {name: frozenset({("t", 1)}) for name in ("long", "short")}
    assert cover(lines, {"long": 9, "short": 2}) == ["short"]
