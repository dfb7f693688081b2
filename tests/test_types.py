"""A type checker's findings: on calls in a user's editor, and on the package itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT

from ssmgen.spec.family import records

FUNCTIONS = [name for family in records() for name in family.functions]
ONE_OR_TWO = "Tensor | tuple[torch._tensor.Tensor, torch._tensor.Tensor]"

# {source text: the checker's finding}
CALLS = {
    "reveal_type(ssmgen.selective_state_update(t, t, t, t, t, t))": 'type is "torch._tensor.Tensor"',
    "reveal_type(ssmgen.combine_splits(t, t))": ONE_OR_TWO,
    "reveal_type(ssmgen.supported(ssmgen.gla, t))": 'type is "tuple[bool, list[str]]"',
    "reveal_type(ssmgen.bind(ssmgen.kda, t)())": 'type is "torch._tensor.Tensor"',
    "reveal_type(ssmgen.explain(ssmgen.kda, t).chosen)": "Chosen | None",
    "ssmgen.selective_state_update(t, t, t, t, t)": "[call-arg]",
    "ssmgen.selective_state_update(t, t, t, t, t, t, stat_indices=t)": "[call-arg]",
    "ssmgen.gated_rms_norm(t, t, t, eps='small')": "[arg-type]",
    "ssmgen.selective_state_updates": "[attr-defined]",
    **{f"reveal_type(ssmgen.{name})": "Tensor" for name in FUNCTIONS},
}


@pytest.mark.matrix  # a run of 10 s
def test_calls_have_types_and_modules_are_clean(tmp_path: Path):
    pytest.importorskip("mypy")
    assert "ignore_errors" not in (ROOT / "pyproject.toml").read_text(), "no module is ignored"
    (tmp_path / "calls.py").write_text("\n".join(("import ssmgen, torch; t = torch.zeros(1)", *CALLS)))
    cache = os.environ.get("MYPY_CACHE_DIR", os.devnull)  # CI's steps share one
    arguments = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", cache, "--no-error-summary")
    command = [sys.executable, "-m", "mypy", *arguments, "ssmgen", str(tmp_path / "calls.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = {call: "\n".join(re.findall(rf"calls\.py:{n}: (.*)$", said, re.MULTILINE)) for n, call in enumerate(CALLS, 2)}
    assert not {call: line for call, line in lines.items() if CALLS[call] not in line}
    assert not [line for line in lines.values() if re.search(r"-> Any\W|\*args: Any", line)]

    assert not re.findall(r"^ssmgen/.*?\.pyi?:\d+: error:", said, re.MULTILINE), f"mend what `mypy` says of them:\n{said}"
