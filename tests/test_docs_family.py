"""The guide to a new family works as it stands: its files and diffs, put into a copy of the package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, blocks

PAGE = DOCS / "guides" / "new_family.md"


def patched(text: str, diff: str, path: str) -> str:
    """`text` with a diff that has no line numbers: its old lines must be there once."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] != mark) for mark in "+-")
    assert text.count(old) == 1, f"{path} has these lines {text.count(old)} times:\n{old}"
    return text.replace(old, new)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("ssmgen", "templates"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("conftest.py", "card_memory.py", "worker_memory.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests")
    for block in (b for language in ("python", "jinja") for b in blocks(PAGE, language)):
        (root / block.title).parent.mkdir(parents=True, exist_ok=True)
        (root / block.title).write_text(block.text)
    for block in blocks(PAGE, "diff"):
        path = root / block.title
        path.write_text(patched(path.read_text(), block.text, block.title))
    return root


def run(checkout: Path, *command: str, code: int = 0) -> str:
    env = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-m", *command], cwd=checkout, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_its_tests_pass(checkout):
    """Those that need a GPU or g++ are skipped without one."""
    shown = run(checkout, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests")
    assert re.search(r"\b[2-6] passed", shown), shown


def test_its_command_lines_work(checkout):
    lines = [shlex.split(line) for b in blocks(PAGE, "sh") for line in b.text.splitlines()]
    source, stats, checked = (run(checkout, *line) for line in lines)
    assert source.startswith("// token_shift for sm_90a") and "wait_for_upstream();" in source and "kVec = 8" in source
    assert "spill_stores           0" in stats and checked.startswith("ok     token_shift_d90")


def test_its_code_is_clean(checkout):
    files = [b.title for b in blocks(PAGE, "python")]
    run(checkout, "ruff", "check", *files)
    run(checkout, "ruff", "format", "--check", *files)


@pytest.mark.matrix  # 10 s
def test_its_code_has_types(checkout):
    pytest.importorskip("mypy")
    run(checkout, "mypy", "--cache-dir", os.devnull)
