"""CI's steps: `python -m tools.ci [STEP …]`, or all but ON_REQUEST. `.ci/run` makes an environment and runs all.

Steps of FIRST run before the others, group by group; two steps run at a time, each in a process. After a failure no further step begins. A
step is a function of STEPS; its docstring states the condition for passing. It runs in the checkout with this Python's packages,
`.[cu12,test,docs]`, and needs no GPU. `tests`, `matrix` and `build` are the README's own commands and use `.venv`, as these say.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# Tests that must have passed, of either command: raise them with the suite.
AT_LEAST = {"tests": 9900, "matrix": 2960}
NEW = "channel_mix"  # a family's name, of none that there is
# Test files that a new family cannot affect: kernels of other families, their callers, and code that knows no family. Without them, and
# without the longest such tests in other files, the suite takes a fourth of its time.
OTHERS = (
    "accelerate", "bench_combine", "bench_conv", "bench_files", "bench_formats", "bench_layers", "bench_mamba3", "bench_norm",
    "bench_replay", "bench_trees", "build_out", "cache*", "callers", "cards_of_tests", "causal_*", "chain", "check", "chunk_*", "combine_*",
    "compat*", "constraints", "context", "copies", "crew", "decode_*", "demo*", "emulator*", "engine_*", "engines", "fast_path",
    "first_use", "gated_*",
    "generated_files", "hf*", "inspect", "layer*", "linear_*", "live", "mamba3*", "models_scans", "narrow_*", "native", "norm_*", "nvrtc",
    "occupancy", "odd_sizes", "plots", "products*", "prompt*", "remote*", "replay*", "report*", "ring", "rms_norm", "sanitize", "selection",
    "selective_*", "serving*", "skinny_*", "state_accuracy", "stochastic", "tuned_tables", "wheel", "worker_memory",
)  # fmt: skip
LONG = (
    "test_build_of_linear_attention", "test_its_tests_pass", "test_the_guides_command_lines_work", "test_two_ranks_agree_with_one",
)  # fmt: skip
FETCHED = re.compile(r"<link[^>]*(stylesheet|preconnect)[^>]*https?:|<(script|img|iframe)[^>]*src=.?https?:")


def tests() -> None:
    """The README's test command passes, with no fewer tests than there were."""
    _suite(r"^python3 -m venv .*pytest.*", AT_LEAST["tests"])


def matrix() -> None:
    """The README's command for the widest parametrisations passes, with no fewer tests than there were."""
    _suite(r"^\.venv/bin/python -m pytest .*-m matrix", AT_LEAST["matrix"])


def lint() -> None:
    """Code is as ruff has it."""
    _python("ruff", "check", ".")
    _python("ruff", "format", "--check", ".")


def types() -> None:
    """mypy finds nothing."""
    _python("mypy")


def generated() -> None:
    """generated/ equals the rendered templates, and the lock equals the compilers' results."""
    _python("ssmgen", "generate", "--check")


def docs() -> None:
    """The documentation builds, every link and anchor is there, and no page fetches anything."""
    if find_spec("mkdocs") is None:
        _python("pip", "install", "-q", "-e", ".[docs]")
    with tempfile.TemporaryDirectory() as site:
        _python("mkdocs", "build", "-q", "--strict", "-d", site, env={"NO_MKDOCS_2_WARNING": "1"})
        fetching = [str(page.relative_to(site)) for page in Path(site).rglob("*.html") if FETCHED.search(page.read_text())]
    if fetching:
        raise SystemExit(f"these pages fetch something: {', '.join(fetching)}")


def family() -> None:
    """In a copy of the checkout, a family made by tools.new_family passes lints, all tests except OTHERS, and its commands."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".*venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")
        )
        inside = {"cwd": copy, "env": {"PYTHONPATH": str(copy)}}
        _python("tools.new_family", NEW, **inside)
        _python("tools.ci", "lint", "docs", **inside)
        _python("ssmgen", "generate", "--check", "--any-compiler", **inside)
        _python("ssmgen", "check", f"{NEW}:dim=90,x=f16,mix=f32,index=i64,loads=element,vec=1,pdl=trigger_loaded", **inside)
        _python("ssmgen", "bench", NEW, "--help", **inside)
        ignored = [f"--ignore-glob=**/test_{name}.py" for name in OTHERS]
        _python("pytest", "-q", "-n", "2", "-m", "not matrix", "-k", f"not ({' or '.join(LONG)})", *ignored, **inside)


def build() -> None:
    """The README's build command builds a model's kernels."""
    with tempfile.TemporaryDirectory() as cache:
        _shell(_of_readme(r"^python3 -m venv .*ssmgen build.*").rpartition("&& ")[2], env={"SSMGEN_CACHE_DIR": cache})


def engine() -> None:
    """A live vLLM on the CPU, installed for this, gives equal greedy tokens with the plugin, and equal bits in its batch-invariant mode."""
    _python("tools.live", "--model", "mamba2")


def engine_kda() -> None:
    """The same with layers of Kimi delta attention, whose interpreted kernels take minutes."""
    _python("tools.live", "--model", "kimi_linear")


def engines() -> None:
    """The releases of vLLM and SGLang that the plugins name have the recorded signatures. Reads Python files of wheels; 375 MB."""
    _python("tools.engines")


def newest_engines() -> None:
    """The newest releases of vLLM and SGLang have them, too. Fails with the names of functions that have drifted."""
    _python("tools.engines", "--newest")


def newest() -> None:
    """Tests that depend on other packages, with the newest releases; torch stays. Reports failures and always passes."""
    _report("newest")


def newest_torch() -> None:
    """The same tests with the newest release of everything, torch too (gigabytes for a CUDA build). Always passes."""
    _report("newest_torch")


def oldest() -> None:
    """The same tests with the oldest releases that pyproject.toml promises (gigabytes for a CUDA build). Always passes."""
    _report("oldest")


_STEPS = (
    tests,
    docs,
    matrix,
    lint,
    types,
    generated,
    engine,
    family,
    newest,
    build,
    engines,
    engine_kda,
    newest_torch,
    oldest,
    newest_engines,
)
STEPS = {step.__name__: step for step in _STEPS}
# Too long, too much to download, or failures that no change here caused: run them when a release is made, or by a schedule.
ON_REQUEST = ("engine_kda", "newest_torch", "oldest", "newest_engines")
FIRST = (("tests",), ("docs", "types", "lint"))  # groups; the first step of a group installs packages into this environment


def _report(step: str) -> None:
    from . import releases

    print(getattr(releases, step)(), flush=True)


def _of_readme(pattern: str) -> str:
    """The README's line, as it stands there."""
    (found,) = re.finditer(pattern, (ROOT / "README.md").read_text(), re.MULTILINE)
    return found[0]


def _suite(pattern: str, at_least: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        _shell(f"{_of_readme(pattern)} -rs --junitxml={report}")
        suite = ElementTree.parse(report).getroot().find("testsuite").attrib
    passed = int(suite["tests"]) - int(suite["skipped"])
    print(f"{passed} passed in {float(suite['time']):.0f} s, {suite['skipped']} skipped; at least {at_least} must pass")
    if passed < at_least:
        raise SystemExit("tests have gone")


def _shell(line: str, **how: object) -> None:
    _run(["bash", "-ec", line], **how)


def _python(*words: str, **how: object) -> None:
    """`python -m …`, with this Python."""
    _run([sys.executable, "-m", *words], **how)


def _run(command: list[str], cwd: Path = ROOT, env: Mapping[str, str] = {}) -> None:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env})
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {' '.join(command)}")


def main() -> None:
    told = "\n".join(f"  {name:14} {step.__doc__}" for name, step in STEPS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.ci", description=__doc__, epilog=f"steps:\n{told}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"Default: all but {', '.join(ON_REQUEST)}.")
    steps = parser.parse_args().steps or [name for name in STEPS if name not in ON_REQUEST]
    if unknown := [name for name in steps if name not in STEPS]:
        parser.error(f"no step is called {' or '.join(unknown)}; there are {', '.join(STEPS)}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("SSMGEN_CACHE_DIR", cache)  # one for all steps: three of them need the kernels of generated/
        os.environ.setdefault("MYPY_CACHE_DIR", f"{cache}/mypy")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process compiles the modules and the tests again
        if failed := _one(steps[0]) if len(steps) == 1 else _all(steps):
            raise SystemExit(failed)


def _one(name: str) -> None:
    print(f"== {name}: {STEPS[name].__doc__}", flush=True)
    start = time.monotonic()
    STEPS[name]()
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)


def _all(steps: Sequence[str]) -> str:
    """Runs steps, two at a time. Returns which have failed, in words."""
    failed: list[str] = []

    def run(name: str) -> None:
        if failed:
            return
        print(f"== {name} begins", flush=True)
        code, said = _process(name, captured=name != "tests")
        print(said, end="", flush=True)
        failed.extend([f"{name} failed"] * bool(code))

    first = [name for group in FIRST for name in group]
    for group in (*FIRST, [name for name in steps if name not in first]):
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(run, [name for name in group if name in steps]):
                pass
    return "; ".join(failed)


def _process(name: str, captured: bool) -> tuple[int, str]:
    """Runs a step in a process. Returns its exit code and its output, which is empty unless it is captured."""
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if captured else {}
    done = subprocess.run([sys.executable, "-u", "-m", "tools.ci", name], cwd=ROOT, text=True, **how)
    return done.returncode, done.stdout or ""


if __name__ == "__main__":
    main()
