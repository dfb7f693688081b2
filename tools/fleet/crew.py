"""The cost of sharing work: `torchrun --nproc-per-node N -m tools.fleet.crew ITEMS SECONDS`; each item is a sleep of SECONDS."""

from __future__ import annotations

import subprocess
import sys
import time

from ssmgen.work_sharing import Crew, seat

from .processes import ROOT


def shared(items: int, seconds: float, processes: int) -> str:
    """The output of processes started by torchrun, with their shares. Raises CalledProcessError."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    work = [*command, "-m", "tools.fleet.crew", str(items), str(seconds)]
    return subprocess.run(work, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    items, seconds, here = int(sys.argv[1]), float(sys.argv[2]), seat()
    if here is None:
        raise SystemExit("start it by torchrun")
    with Crew(here, f"{items} sleeps of {seconds} s") as crew:
        start = time.perf_counter()
        for number, _ in crew.take(lambda: range(items)):
            begin = time.perf_counter()
            time.sleep(seconds)
            crew.done(number, {"seconds": time.perf_counter() - begin})
        took = time.perf_counter() - start

        def publish(told: dict) -> int:
            ideal = items * seconds / here.world
            print(
                crew.account(told, took, "items"), f"  {100 * ideal / took:.1f} % of {here.world} times one process", sep="\n", flush=True
            )
            return 0

        crew.finish(publish)


if __name__ == "__main__":
    main()
