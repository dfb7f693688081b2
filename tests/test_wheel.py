"""The wheel, away from the checkout, and the source distribution."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ssmgen

ROOT = Path(ssmgen.__file__).parent.parent


@pytest.mark.matrix
def test_wheel_holds_the_templates_and_builds_kernels_from_another_directory(tmp_path):
    wheels, site, elsewhere = tmp_path / "dist", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    templates = {f"ssmgen/_templates/{p.relative_to(ROOT / 'templates')}" for p in (ROOT / "templates").rglob("*.j2")}
    assert (
        templates
        and templates <= names
        and {"ssmgen/select/models.toml", "ssmgen/emulator/emulator.hpp"} <= names
        and {"ssmgen/emulator/machine.cpp", "ssmgen/bench/page.html.j2"} <= names
    )
    assert {n.partition("/")[0] for n in names} == {"ssmgen", f"ssmgen-{ssmgen.__version__}.dist-info"}
    program = (
        "import sys, ssmgen, ssmgen.compile.render\n"
        f"assert ssmgen.__file__.startswith({str(site)!r}) and str(ssmgen.compile.render.templates_dir()).endswith('_templates')\n"
        "sys.argv[1:] = ['build', '--model', 'mamba2-130m', '--op', 'selective_state_update', '--arch', 'sm_80', '--json']\n"
        "from ssmgen.cli import main; main()\n"
    )
    env = {"PYTHONPATH": str(site), "HOME": str(elsewhere), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)["variants"]
    assert built and not any(v["error"] for v in built)


def test_the_source_distribution_holds_what_its_checkout_is_worked_on_with(tmp_path):
    """The tests read the documentation, and run the tools."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {
        path: {str(p.relative_to(ROOT)) for p in (ROOT / path).rglob("*") if p.is_file()} for path in ("tools", "templates", "tests")
    }
    missing = {name for found in folders.values() for name in found - names if "__pycache__" not in name}
    assert all(folders.values()) and not missing
    assert {"pyproject.toml", "mkdocs.yml", "CONTRIBUTING.md", "docs/guides/new_family.md", "generated/ssmgen.lock"} <= names
