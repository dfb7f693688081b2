"""Many threads use the package for the first time, all at once, in one fresh process after the other. Prints the errors that they saw.

python tests/attack/first_use.py TRIALS [SEED] [--own-torch]: torch is imported ahead, once for all processes; with --own-torch the threads
import it, too, which takes a second or two each time.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def public() -> list[str]:
    """The public names, as another process tells them: ssmgen is not imported here."""
    told = subprocess.run([sys.executable, "-c", "import ssmgen; print(*ssmgen.__all__)"], capture_output=True, text=True, check=True)
    return told.stdout.split()


def uses() -> list[Callable[[], object]]:
    """All first uses of a thread: look up a public name, import one by name, import a module."""
    init = Path(find_spec("ssmgen").origin)
    folders = ("", "cache", "calls", "compat", "engine", "tuned", "families", "families/*")
    files = [path for folder in folders for path in init.parent.glob(f"{folder}/*.py".lstrip("/"))]
    files = [path for path in files if path.stem not in ("bench", "trial")]  # commands', by one thread
    modules = [".".join(path.relative_to(init.parents[1]).with_suffix("").parts).removesuffix(".__init__") for path in files]
    transformers = ("__main__", "hf", "hf_functions", "hf_layers", "replacing")  # modules that run the command or import transformers
    return [
        *[lambda name=name: getattr(importlib.import_module("ssmgen"), name) for name in public()],
        *[lambda name=name: exec(f"from ssmgen import {name}", {}) for name in public()],
        *[lambda name=name: importlib.import_module(name) for name in sorted(modules) if name.rpartition(".")[2] not in transformers],
    ]


def trial(seed: int) -> list[str]:
    """The errors of 3 … 16 threads that began together."""
    rng = random.Random(seed)
    chosen = rng.choices(uses(), k=rng.randint(3, 16))
    barrier, wrong = threading.Barrier(len(chosen)), []

    def first(use: Callable[[], object]) -> None:
        barrier.wait()
        try:
            use()
        except BaseException as e:
            wrong.append(f"{type(e).__name__}: {e}")

    sys.setswitchinterval(1e-5)  # threads take turns inside each other's imports
    threads = [threading.Thread(target=first, args=[use], daemon=True) for use in chosen]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    return wrong + [f"{t.name} has not come back" for t in threads if t.is_alive()]


def in_a_process(seed: int) -> bool:
    """Whether a trial in a separate process succeeded."""
    pid = os.fork()
    if pid == 0:
        wrong = trial(seed)
        print("".join([f"trial {seed}: {line}\n" for line in wrong]), end="", flush=True)
        os._exit(bool(wrong))
    return os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:] if a.isdigit()]
    if "--own-torch" not in sys.argv:
        import torch  # noqa: F401
    assert len(public()) > 20
    count, start = numbers[0], numbers[1] if len(numbers) > 1 else 0
    good = sum([in_a_process(seed) for seed in range(start, start + count)])
    print(f"{count} trials, {count - good} wrong")
    sys.exit(good != count)
