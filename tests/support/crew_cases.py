"""`ssmgen` with a stand-in for a GPU, as a process of a crew: `python tests/support/crew_cases.py tune …`, under torchrun or not.

CREW_KILL=RANK:N kills the process of a rank by SIGKILL when it begins its N-th case or compilation, but not one that torchrun has started
again. Nobody begins before all are there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssmgen.cli import main
from ssmgen.compile import nvrtc
from ssmgen.families.selective_state_update.spec import SsuProblem
from ssmgen.select import registry
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import SM90, DType, Index, KernelSpec, PoolMode
from ssmgen.tune import cases, model, search
from ssmgen.tune import sharing as crew

GPU, OP, SIZES = "Test GPU 7", "selective_state_update", tuple(range(1, 13))
PROBLEM: SsuProblem = find_model("nemotron-h-8b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
CASE_SECONDS = 0.1


class FakeCall:
    def __init__(self, size: int):
        self.size = size

    def problem(self):
        return PROBLEM, self.size, None, True


def begin(own: list[int]) -> None:
    """Begins a case or a compilation: waits for the others, and dies if it is to."""
    folder, own_rank = Path(os.environ["SSMGEN_CACHE_DIR"]), os.environ.get("RANK", "0")
    (folder / f"rank{own_rank}").touch()
    while len(list(folder.glob("rank*"))) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.01)
    rank, _, number = os.environ.get("CREW_KILL", "").partition(":")
    own.append(len(own) + 1)
    if (rank, number) == (own_rank, str(own[-1])) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def slow_times(calls, sets, specs, rounds, captures) -> dict[KernelSpec, float]:
    """Times that depend on the variant and the size alone."""
    time.sleep(CASE_SECONDS / 2)
    return {spec: 2.0 + (7 * spec.tile + calls[0].size) % 13 / 10 for spec in specs}


def stand_in(put: Callable[[Any, str, Any], None]) -> None:
    """Replaces the card and the cases that `tune` uses with stand-ins for one operator. `begin` may kill it."""
    begun: list[int] = []
    variants = [s for s in registry.OPERATORS[OP].space(PROBLEM, SM90) if s.pdl.value != "off"][:6]
    bench = search.Bench(GPU, model.Card(SM90, 132, 4.2), "CUDA 13.0", "a build")

    def promising(call, rule, bench, pdl):
        begin(begun)
        return variants

    compile_cubin = nvrtc.compile_cubin

    def compiling(*words):
        begin(begun)
        return compile_cubin(*words)

    put(search, "_promising", promising)
    put(search, "_times", slow_times)
    put(search, "check_bits", lambda *_: None)
    put(search, "_never_spills", lambda *_: True)
    put(search.Bench, "here", classmethod(lambda cls: bench))
    put(cases, "cases", lambda *_: (cases.Case(f"size {n}", 2, lambda i, n=n: FakeCall(n), lambda: None) for n in SIZES))
    put(crew, "hold_card", lambda crew: None)
    put(nvrtc, "compile_cubin", compiling)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of processes whose caches lie in a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSMGEN_", "TORCHELASTIC"))}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return kept | {"SSMGEN_CACHE_DIR": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


if __name__ == "__main__":
    stand_in(setattr)
    sys.argv[0] = "ssmgen"
    main()
