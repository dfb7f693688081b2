"""Adds a family of kernels to this checkout: `python -m tools.new_family NAME`.

Writes a complete family that works, a token shift under the name that is given, for you to change: record, spec, template, reference,
public function, trial, sharding, benchmark, default variants, tests, a page; and its lines in the stub, the documentation and the
changelog. Then renders generated/. docs/guides/new_family.md goes through the files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .scaffold import ScaffoldError, write

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.new_family", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", help="of the family, its public function and its operator: a Python name in lower case")
    name = parser.parse_args().name
    try:
        written, extended = write(ROOT, name)
    except ScaffoldError as e:
        sys.exit(str(e))
    run = [sys.executable, "-m"]
    python = [path for path in (*written, *extended) if path.endswith((".py", ".pyi"))]
    subprocess.run([*run, "ruff", "check", "-q", "--select", "I", "--fix", *python], cwd=ROOT, check=True)
    subprocess.run([*run, "ruff", "format", "-q", *python], cwd=ROOT, check=True)
    print("written:", *written, sep="\n  ")
    print("extended:", *extended, sep="\n  ")
    print("Rendering generated/ and compiling its kernels: seconds with a warm cache, minutes otherwise.", flush=True)
    subprocess.run([*run, "ssmgen", "generate"], cwd=ROOT, check=True)
    print(
        f"Now change what it computes, and after each change: python -m pytest -q tests/families/{name}/test_{name}.py && ssmgen generate"
    )


if __name__ == "__main__":
    main()
