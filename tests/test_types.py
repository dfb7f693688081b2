"""What a type checker says: to a user's editor of calls, and of the package itself, but for the modules that pyproject.toml lists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT

from ssmgen.spec.family import records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FUNCTIONS = [name for family in records() for name in family.functions]
ONE_OR_TWO = "Tensor | tuple[torch._tensor.Tensor, torch._tensor.Tensor]"

# {what is written: what the checker says of it}
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
def test_calls_have_types_and_modules_are_clean_but_for_a_list_that_only_shrinks(tmp_path: Path):
    pytest.importorskip("mypy")
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count("ignore_errors = true") == 1, "one list, and no other way to be ignored"
    (tmp_path / "pyproject.toml").write_text(text.replace("ignore_errors = true", "ignore_errors = false"))
    (tmp_path / "calls.py").write_text("\n".join(("import ssmgen, torch; t = torch.zeros(1)", *CALLS)))
    arguments = ("--config-file", str(tmp_path / "pyproject.toml"), "--cache-dir", os.devnull, "--no-error-summary")
    command = [sys.executable, "-m", "mypy", *arguments, "ssmgen", str(tmp_path / "calls.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = {call: "\n".join(re.findall(rf"calls\.py:{n}: (.*)$", said, re.MULTILINE)) for n, call in enumerate(CALLS, 2)}
    assert not {call: line for call, line in lines.items() if CALLS[call] not in line}
    assert not [line for line in lines.values() if re.search(r"-> Any\W|\*args: Any", line)]

    overrides = tomllib.loads(text)["tool"]["mypy"]["overrides"]
    (listed,) = (set(override["module"]) for override in overrides if "ignore_errors" in override)
    assert listed.isdisjoint(name for name in listed if "*" in name), "modules by name"
    unclean = {_module(path) for path in re.findall(r"^(ssmgen/.*?\.pyi?):\d+: error:", said, re.MULTILINE)}
    assert not unclean - listed, f"mend what `mypy` says of them:\n{said}"
    assert not listed - unclean, "these are clean, or no more: take them out of the list in pyproject.toml"


def _module(path: str) -> str:
    return re.sub(r"(/__init__)?\.pyi?$", "", path).replace("/", ".")
