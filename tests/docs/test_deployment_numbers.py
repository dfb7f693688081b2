"""The numbers of variants in the guide to deployment are those of the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssmgen.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "deployment.md").read_text()
HEAD = "| `--caller` | calls | "
MODELS = re.search(rf"^{re.escape(HEAD)}(.*) \| compiled", PAGE, re.MULTILINE)
CELLS = [
    (caller.strip("`"), model, number)
    for caller, *numbers in re.findall(r"^\| (`[a-z-]+`|\(none\)) \| [^|]* \| (\d+|–) \| (\d+|–) \| [^\n]*\|$", PAGE, re.MULTILINE)
    for model, number in zip(MODELS[1].split(" | ") if MODELS else [], numbers, strict=True)
    if number != "–"
]


@pytest.mark.matrix
@pytest.mark.parametrize(("caller", "model", "number"), CELLS)
def test_a_build_has_as_many_variants_as_the_guide_says(caller, model, number):
    words = ["build", "--model", model, "--arch", "sm_90a", "--dry-run", *([] if caller == "(none)" else ["--caller", caller])]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and re.search(r"^(\d+) variants", result.output, re.MULTILINE)[1] == number


def test_the_table_was_read():
    assert len(CELLS) == 7
