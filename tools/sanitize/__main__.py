"""`python -m tools.sanitize [WORD …]`: kernels under compute-sanitizer, each by itself, with one line per kernel and tool.

A kernel runs without the sanitizer first; its output must be the same under each tool. Exits with 1 if a tool reports anything, or if
racecheck misses an error that an edit plants.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

from ssmgen.errors import SsmgenError

from . import images
from .cases import Case, chosen, edited
from .edits import EDITS
from .reports import Row, located, row

TOOLS = ("memcheck", "synccheck", "racecheck")
ALWAYS = ("--report-api-errors=no", "--target-processes=application-only", "--launch-timeout=120", "--show-backtrace=device")
OF_TOOL = {"memcheck": ("--padding=1024",), "synccheck": (), "racecheck": ()}
PORTS = 16  # per run of the sanitizer, which uses some itself
MOST = 60  # lines of a run's output that are kept


def sanitizer(given: str | None) -> str:
    """The program: the given one, the one on PATH, or the one in the wheel nvidia-cuda-sanitizer-api. Exits if there is none."""
    if found := shutil.which(given or "compute-sanitizer"):
        return found
    try:
        import nvidia

        for root in nvidia.__path__:
            for path in sorted(Path(root).glob("**/bin/compute-sanitizer")):
                return str(path)
    except ImportError:
        pass
    sys.exit("compute-sanitizer was not found. It is in CUDA's toolkit, and in the wheel nvidia-cuda-sanitizer-api")


class Runs:
    """Concurrent runs of images, within a time limit."""

    def __init__(self, given: argparse.Namespace, rows: list[Row]):
        self.given, self.rows, self.start = given, rows, time.monotonic()
        self.slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(given.jobs):
            self.slots.put(slot)

    @property
    def left(self) -> float:
        return self.given.within - (time.monotonic() - self.start)

    def of(self, case: Case, folder: Path) -> None:
        """All tools, one after the other, once the kernels run without any; an edit is there for racecheck alone."""
        if self.one(case, "none", folder).clean:
            for tool in self.given.tool:
                if tool == "racecheck" or not case.edit:
                    self.one(case, tool, folder)
        shutil.rmtree(folder, ignore_errors=True)

    def one(self, case: Case, tool: str, folder: Path) -> Row:
        slot = self.slots.get()
        try:
            command = [sys.executable, "-m", "tools.sanitize.replay", str(folder)]
            if tool != "none":
                port = ("--port", str(self.given.port + slot * PORTS))
                command = [self.given.sanitizer, "--tool", tool, *ALWAYS, *OF_TOOL[tool], *port, *self.given.pass_on, *command]
            begin, limit = time.monotonic(), min(self.given.seconds, self.left)
            log, code = run(command, limit) if limit > 0 else ("not run: no time was left", 1)
            made = row(case.name, tool, log, code, time.monotonic() - begin)
        finally:
            self.slots.put(slot)
        if self.given.log and not made.clean:
            texts = {path.stem: path.read_text() for path in folder.glob("*.cu")}
            head = "\n".join(log.splitlines()[:MOST])
            with self.given.log.open("a") as file:
                file.write(f"{made}\n{head}\n{located(log, texts)}\n")
        self.add(made)
        return made

    def add(self, made: Row) -> None:
        self.rows.append(made)
        if made.tool != "none" or not made.clean:
            print(made, flush=True)


def run(command: Sequence[str], limit: float) -> tuple[str, int | None]:
    """Its output and its exit code; None if it was killed, with all processes that it had started."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of names, calls or specs (all)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="one of several (all)")
    parser.add_argument("--edit", action="append", choices=EDITS, default=[], help="instead of kernels as they are, with this edit")
    parser.add_argument("--sanitizer", help="the program")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="runs at once")
    parser.add_argument("--seconds", type=float, default=150, help="that a run may take")
    parser.add_argument("--port", type=int, default=49152, help=f"the first of {PORTS} for each run at once")
    parser.add_argument("--within", type=float, default=24 * 3600, help="seconds for everything")
    parser.add_argument("--log", type=Path, help="a file to which what was reported is added")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--pass-on", action="append", default=[], metavar="OPTION", help="to the sanitizer, such as --racecheck-report=all")
    given = parser.parse_args()
    given.tool = given.tool or list(TOOLS)
    return given


def main() -> None:
    given = arguments()
    try:
        cases = chosen(given.words)
    except SsmgenError as e:
        sys.exit(str(e))
    cases = edited(cases, given.edit) if given.edit else cases
    if given.list:
        print("\n".join(f"{case.name:80} {case.call}" for case in cases))
        return
    given.sanitizer = sanitizer(given.sanitizer)
    rows: list[Row] = []
    runs = Runs(given, rows)
    with tempfile.TemporaryDirectory() as root, ProcessPoolExecutor(given.jobs) as making, ThreadPoolExecutor(given.jobs) as running:
        made = {making.submit(images.write, case, Path(root, str(i))): (case, Path(root, str(i))) for i, case in enumerate(cases)}
        try:
            for image in as_completed(made, timeout=given.within):
                case, folder = made[image]
                if problem := image.exception():
                    runs.add(Row(case.name, "none", f"no image: {str(problem).splitlines()[0][:100]}", 0.0, "", str(problem)))
                else:
                    running.submit(runs.of, case, folder)
        except TimeoutError:
            for image in made:
                image.cancel()
    finish(given, cases, rows, time.monotonic() - runs.start)


def finish(given: argparse.Namespace, cases: Sequence[Case], rows: Sequence[Row], seconds: float) -> None:
    """Says what there is to say of all, and exits."""
    planted = {case.name for case in cases if case.edit and EDITS[case.edit].planted}
    runs = [r for r in rows if r.tool != "none"]
    missed = [r for r in runs if r.case in planted and r.clean]
    found = [r for r in rows if r.case not in planted and not r.clean]
    unseen = {case.name for case in cases} - {r.case for r in rows}
    plain = {r.case: r.digest for r in rows if r.tool == "none"}
    others = [r for r in runs if r.digest and r.digest != plain[r.case] and r.case not in planted]
    print(
        f"{len(cases)} kernels, {len(runs)} runs under {given.sanitizer} in {seconds:.0f} s: {len(found)} with something to say, "
        f"{len(others)} with other results, {len(missed)} of planted errors with nothing; {len(unseen)} kernels not run"
    )
    sys.exit(bool(found or missed or others or unseen))


if __name__ == "__main__":
    main()
