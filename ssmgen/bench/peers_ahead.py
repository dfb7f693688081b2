"""Processes that compile the peers' kernels before `ssmgen bench models` times them.

Triton compiles one kernel at a time in a process, so the first run on a machine would mostly wait for it. These processes fill the peers'
caches of compiled kernels. Their autotuners launch every choice once and time none, because the processes share the GPU.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

import torch

from . import case
from .autotuners import untimed
from .models import cells

LIMIT_S = 150.0  # of waiting; the measurement compiles the rest itself
SMALL = 1e6  # bytes that inputs rotate over: nothing is timed
ALONE = {"TRITON_CACHE_AUTOTUNING": "0", "FLA_CACHE_RESULTS": "0"}  # choices are not kept


@contextlib.contextmanager
def compiling(names: Sequence[str], columns: Sequence[str], jobs: int, limit_s: float = LIMIT_S, module: str = __name__) -> Iterator[None]:
    """Starts `jobs` processes, waits for them at the end, and kills them after `limit_s` seconds. names, columns: none for all."""
    command = [sys.executable, "-m", module]
    none, env, began = subprocess.DEVNULL, os.environ | ALONE, time.monotonic()
    given = [",".join(columns), *names]
    started = [subprocess.Popen([*command, f"{i}/{jobs}", *given], env=env, stdout=none, stderr=none) for i in range(jobs)]
    try:
        yield
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, began + limit_s - time.monotonic()))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def call_peers(share: str, columns: str = "", names: Sequence[str] = (), device: torch.device | str = "cuda") -> int:
    """Calls each peer once at every n-th cell, from the i-th on, as "i/n" says; the number of calls that did not raise."""
    first, _, step = share.partition("/")
    case.MOST = SMALL
    done = 0
    for cell in cells(names, [name for name in columns.split(",") if name])[int(first) :: int(step)]:
        with contextlib.suppress(Exception):  # the measurement reports it
            made = cell.bench.made(cell.at, device)
            for peer in cell.bench.peers.values():
                with contextlib.suppress(Exception):
                    launch = peer(made)
                    if launch is not None:
                        launch(0)
                        done += 1
    return done


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    untimed()
    call_peers(sys.argv[1], sys.argv[2], sys.argv[3:])
