"""Laws of specs and of kernels' texts, for every family; and mistakes that are planted in a text, which the emulator must find."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from compiled import compiled

from ssmgen.compile.nvrtc import compile_cubin
from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator import EmulatorError
from ssmgen.errors import SsmgenError
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, Pdl, parse_spec
from ssmgen.variants.inspect import sass

SM80, SM90 = Arch.parse("sm_80"), Arch.parse("sm_90a")


# Specs.


def says_its_violation(spec: Any, change: dict[str, Any], words: str, changed: Callable[..., Any] = replace) -> None:
    assert not spec.violations(SM90)
    found = changed(spec, **change).violations(SM90)
    assert any(words in problem for problem in found), found


def says_its_architectures(spec: Any) -> None:
    assert "arch is sm_80; expected sm_90 or later, or pdl=off" in replace(spec, pdl=Pdl.WAIT).violations(SM80)
    assert not spec.violations(SM80) and "arch is sm_75; expected sm_80 or later for bf16 arithmetic" in spec.violations(
        Arch.parse("sm_75")
    )


def spilled(pairs: Iterable[tuple[Any, Arch]]) -> list[str]:
    """Specs that do not fit the registers of an architecture."""
    pairs = list(pairs)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # NVRTC releases the GIL
        done = pool.map(lambda pair: compiled(*pair).resources, pairs)
        found = zip(pairs, done, strict=True)
        return [f"{p}: {r}" for p, r in found if r.spills or r.stack or r.registers * p[0].threads_per_block > 65536]


# Texts.


def is_well_formed(spec: Any) -> None:
    """The text names its spec, its parameter list is the spec's, and nothing of the template is left in it."""
    text = render(spec, SM90)
    assert text.startswith(f"// {spec.family} for sm_90a") and parse_spec(str(spec), SPECS) == spec
    parameters = re.search(rf"{spec.name}\((.*?)\) \{{", text, re.S)
    assert parameters and [p.split()[-1].lstrip("*") for p in parameters[1].split(",")] == [p.name for p in spec.parameters()]
    assert not any(line != line.rstrip() or "\t" in line or "{%" in line or "{{ " in line for line in text.splitlines())


def waits_first(spec: Any, pdl: Pdl, accesses: str = "load|store") -> None:
    """The wait precedes every access, and the launch attribute follows the text."""
    if pdl is Pdl.TRIGGER_FIRST and not spec.triggers_first:
        return says_its_violation(spec, {"pdl": pdl}, "pdl is trigger_first; expected a trigger after the wait")
    text = render(replace(spec, pdl=pdl), SM90)
    body = text[text.index('extern "C"') :]
    assert uses_pdl(text) == (pdl is not Pdl.OFF) and "__restrict__" not in body and "__ldg" not in body
    if pdl is Pdl.OFF:
        assert "wait_for_upstream" not in text
        return
    wait = body.index("wait_for_upstream();")
    assert all(m.start() > wait for m in re.finditer(rf"\b({accesses})\w*[(<]", body))
    assert ("allow_dependents();" in body) == (pdl is not Pdl.WAIT)
    assert ("allow_dependents();" in body[:wait]) == (pdl is Pdl.TRIGGER_FIRST)


def waits_before_any_of(spec: Any, *words: str) -> str:
    """A kernel that triggers has none of these words before its wait. Returns the kernel's text."""
    text = render(spec, SM90)
    body = text[text.index('extern "C"') :]
    before = body[: body.index("wait_for_upstream();")]
    assert not [word for word in words if word in before]
    assert "__restrict__" not in body and "allow_dependents();" in body
    return body


def has_none_of(spec: Any, *words: str) -> None:
    """A kernel's text has none of the words of switched-off operands and options."""
    text = render(spec, SM90).split("#define DEVICE")[1]
    assert not [word for word in words if word in text]


def operations_before(spec: Any, first: tuple[str, ...]) -> list[str]:
    """The machine's operations on memory before the first of some. No access comes before the PDL wait, and none is to local memory."""
    try:
        text = sass(compile_cubin(render(spec, SM90), SM90, str(spec)).cubin)
    except SsmgenError as e:
        pytest.skip(str(e))
    ops = re.findall(r"\b(ACQBULK|PREEXIT|LDG[.\w]*|STG[.\w]*|SHFL[.\w]*|MUFU[.\w]*|LDL[.\w]*|STL[.\w]*)\b", text)
    assert ops[0] == "ACQBULK" and not any(o.startswith(("LDL", "STL")) for o in ops)
    return ops[: next(i for i, o in enumerate(ops) if o.startswith(first))]


# Mistakes.


def edited(old: str, new: str, where: str = "", count: int = -1) -> Callable[[str], str]:
    """A `change` that plants a mistake in every text that has `where`."""

    def change(source: str) -> str:
        if where not in source:
            return source
        assert old in source, "the edit no longer applies"
        return source.replace(old, new, count)

    return change


@contextmanager
def found(words: str) -> Iterator[None]:
    """A mistake is an EmulatorError with these words or, for the word "off", results that break a law. | separates alternatives."""
    try:
        yield
    except EmulatorError as e:
        assert any(word in str(e) for word in words.split("|")), str(e)
    except AssertionError as e:
        assert "off" in words.split("|") and "no longer applies" not in str(e), str(e)
    else:
        pytest.fail("nothing was found")


@contextmanager
def found_in_words(words: str) -> Iterator[None]:
    """A mistake is an error of the emulator, or of the comparison with bounds, with these words."""
    with pytest.raises((EmulatorError, AssertionError)) as e:
        yield
    assert words in str(e.value)


def found_when_planted(text: str, bug: tuple[str, str, str], run: Callable[[str], Any], count: int = 1) -> None:
    """A kernel's text with one mistake, (text to replace, replacement, words of the error), fails in one of its threads."""
    old, new, words = bug
    with pytest.raises(EmulatorError) as e:
        run(edited(old, new, count=count)(text))
    assert words in str(e.value) and "thread" in str(e.value)
