"""No name in a kernel hides another name: parts of a template share a scope, and code could read the wrong variable."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from emulated_calls import SM90, needs_emulator

from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.variants import generate

# (template's folder, name): names that still hide another. None may be added.
KNOWN = {
    *(("chunk_linear_attention", name) for name in ("lane", "quad", "piece", "fourth", "first_row")),  # declared again, for ptxas
    ("chunk_linear_attention", "slot"),  # so is this
    *(("linear_attention", name) for name in ("raw", "part")),
    *(("delta_layer", name) for name in ("raw", "part")),
    ("replay_selective_state_update", "sums"),
    *(("selective_scan", name) for name in ("apart", "there", "group")),  # by roles
}


def hidden(folder: Path, texts: dict[str, str]) -> list[tuple[str, str, str]]:
    """(file, name, line) of every declaration that hides another one of the same text; all files are compiled in one call."""
    words = emulator._workplace() / emulator.WORDS[0]  # compiled ahead
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / f"{name}.cpp").write_text(f'#include "{words}"\n#include "{name}"\n')
    command = ["g++", *emulator.FLAGS, "-Wshadow", "-fsyntax-only", *(f"{name}.cpp" for name in texts)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr[:4000]
    found = re.findall(r"^(.+?):(\d+):\d+: warning: declaration of '([^']+)' shadows", done.stderr, re.MULTILINE)
    assert len(found) == done.stderr.count("[-Wshadow")
    lines = {name: text.splitlines() for name, text in texts.items()}
    return [(file, re.sub(r" ?\[.*", "", typed).split()[-1], lines[file][int(number) - 1].strip()) for file, number, typed in found]


@pytest.mark.matrix
@needs_emulator
def test_no_name_hides_another_one(tmp_path):
    specs = {spec.name: spec for spec, _ in generate.default_variants([SM90])}
    found = hidden(tmp_path, {name: render(spec, SM90) for name, spec in specs.items()})
    folder = {name: spec.template.split("/")[0] for name, spec in specs.items()}
    new = sorted({f"{folder[file]}: {name}: {line}" for file, name, line in found if (folder[file], name) not in KNOWN})
    assert not new, "give these other names"


@needs_emulator
def test_a_hidden_name_is_found(tmp_path):
    text = 'extern "C" __global__ void f(float* out, int begin) {\n  { const int NAME = 1; out[NAME] = begin; }\n}'
    found = hidden(tmp_path, {"a": text.replace("NAME", "begin"), "b": text.replace("NAME", "at")})
    assert found == [("a", "begin", "{ const int begin = 1; out[begin] = begin; }")]
