"""Processes that start at once, each like a separate machine, with separate cache directory and locks, and one store for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ssmgen.cache.signing import Signer

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Started:
    """The result of one process."""

    compiled: int
    fetched: int
    warnings: list[str]
    seconds: float  # from its start until it had all kernels, the interpreter's own start included


def start_all(count: int, kernels: int, seconds: float, folder: Path, remote: dict[str, str]) -> list[Started]:
    """Starts `count` processes and waits for them. Raises RuntimeError with the output of a failed one."""
    begin = time.perf_counter()
    processes = []
    for number in range(count):
        own = folder / f"machine{number}"
        (own / "run").mkdir(parents=True, mode=0o700)
        variables = {"SSMGEN_CACHE_DIR": str(own / "cache"), "XDG_RUNTIME_DIR": str(own / "run"), "PYTHONPATH": path_here()}
        env = {name: value for name, value in os.environ.items() if not name.startswith("SSMGEN_")} | variables | remote
        command = [sys.executable, "-m", "tools.fleet.start", str(kernels), str(seconds)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    def ended(process: subprocess.Popen[str]) -> Started:
        out, error = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(error)
        return Started(**json.loads(out), seconds=time.perf_counter() - begin)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ended, processes))


def path_here() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def remote_of(url: str, folder: Path, writes: bool) -> dict[str, str]:
    """The environment of processes that trust one key, and write back with it or only read."""
    file = folder / "key.pem"
    signer = Signer.load(file) if file.exists() else Signer.make(file)
    variables = {"SSMGEN_CACHE_REMOTE": url, "SSMGEN_CACHE_REMOTE_KEYS": signer.public}
    return variables | ({"SSMGEN_CACHE_REMOTE_SIGN": str(file), "SSMGEN_CACHE_REMOTE_WRITE": "allow"} if writes else {})


def summary(started: list[Started]) -> str:
    times = sorted(one.seconds for one in started)
    return (
        f"{sum(one.compiled for one in started):6} compiled {sum(one.fetched for one in started):6} fetched   "
        f"ready after {times[0]:.1f} … {times[len(times) // 2]:.1f} … {times[-1]:.1f} s   "
        f"{sum(map(len, (one.warnings for one in started)))} warnings"
    )
