"""Errors name the parameters of the function that was called, and nothing that only its kernels know."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ssmgen.calls.operator import call_of
from ssmgen.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parents[1] / "attack"))
from fuzz import leaves, replaced
from fuzz_calls import Form, native

FORMS = [form for form in native() if form.public]
FAULTS = {
    "another axis": lambda t: t[None],
    "no such dtype": lambda t: t.to(torch.complex64),
    "elsewhere": lambda t: t.to("meta"),
    "half of it": lambda t: t[..., : t.shape[-1] // 2],
}
NAME = re.compile(r"^([A-Za-z_]\w*)(?:[.\[][\w\]]+)? (?:is|has|overlaps|requires|begins|shares|needs|does)\b|overlaps ([A-Za-z_]\w*)")


def raised(form: Form) -> Iterator[tuple[str, str]]:
    """(the mistake, a sentence of the error) of calls with each tensor wrong in turn."""
    for path, value in leaves(form.arguments):
        if not isinstance(value, torch.Tensor):
            continue
        for fault, wrong in FAULTS.items():
            try:
                form.function(**replaced(form.arguments, path, wrong(value)))
            except ArgumentError as e:
                yield from ((f"{path}: {fault}", sentence) for sentence in e.problems)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.function.__name__}-{form.id}")
def test_every_name_is_a_parameter(form):
    parameters = set(form.function.names)
    inner = set(call_of(form.function, **form.arguments).caller.names) - parameters
    found = [(what, re.sub(r"\bring\.(k|v|g|beta)\b", "ring", sentence)) for what, sentence in raised(form)]
    assert found, "no fault was found"
    wrong = [row for row in found for names in NAME.findall(row[1]) if set(filter(None, names)) - parameters]
    hidden = inner - {"read", "write", "erase", "checkpoints"}  # which are words, too: looked for above, where they stand for operands
    outside = [(what, sentence, re.sub(r"\[[^\]]*\]", "", sentence)) for what, sentence in found]  # of brackets, which have shapes
    wrong += [(what, sentence) for what, sentence, text in outside if hidden & set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))]
    assert not wrong, "\n".join(f"{what}: {sentence}" for what, sentence in dict(wrong).items())
