"""The wheel, away from the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import ssmgen

ROOT = Path(ssmgen.__file__).parent.parent


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
        and {"ssmgen/models.toml", "ssmgen/emulator/emulator.hpp", "ssmgen/emulator/machine.cpp", "ssmgen/bench/page.html.j2"} <= names
    )
    pages = {str(p.relative_to(ROOT)) for kind in ("templates", "static") for p in (ROOT / "ssmgen/site" / kind).iterdir()}
    assert len(pages) > 8 and pages <= names
    assert not any(n.startswith(("tests/", "generated/", "tools/")) for n in names)
    program = (
        "import sys, ssmgen, ssmgen.render\n"
        f"assert ssmgen.__file__.startswith({str(site)!r}) and str(ssmgen.render.templates_dir()).endswith('_templates')\n"
        "sys.argv[1:] = ['build', '--model', 'mamba2-130m', '--arch', 'sm_90a', '--max-batch', '1', '--json']\n"
        "from ssmgen.cli import main; main()\n"
    )
    env = {"PYTHONPATH": str(site), "HOME": str(elsewhere), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)["variants"]
    assert built and not any(v["error"] for v in built)
