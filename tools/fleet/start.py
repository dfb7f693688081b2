"""A process of a fleet, from its start until it has its kernels: `python -m tools.fleet.start KERNELS SECONDS`.

Compiling one takes SECONDS, which are slept. Prints a line of JSON. All else is the same as in a serving process: the cache that the
environment describes, its directory, locks, store and signatures.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

from ssmgen.cache import store
from ssmgen.compile import nvrtc
from ssmgen.compile.nvrtc import Compiled

from .kernels import ARCH, BUILD, OPTIONS, made, spec


def use_slept_compiler(seconds: float) -> list[float]:
    """Puts a sleep in the compiler's place for the rest of this process; the list gets a number per kernel compiled."""
    compiled: list[float] = []

    def compile_cubin(source: str, arch: object, spec: str) -> Compiled:
        time.sleep(seconds)
        compiled.append(seconds)
        entry = made(int(source.split()[2]))
        return Compiled(entry.cubin, entry.resources, seconds)

    store.render = lambda spec, arch: made(spec.slot_bytes // 512).source
    nvrtc.compile_cubin, nvrtc.build_id = compile_cubin, lambda: BUILD
    nvrtc.options_for, nvrtc.library_path = lambda arch: OPTIONS, lambda: "/dev/null"
    return compiled


def main() -> None:
    kernels, seconds = int(sys.argv[1]), float(sys.argv[2])
    compiled, hits = use_slept_compiler(seconds), 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(1, kernels + 1):
            entry, hit = store.shared_cache().get(spec(number), ARCH)
            hits += hit
            if entry.cubin != made(number).cubin:
                raise SystemExit(f"kernel {number} is a wrong one")
    print(json.dumps({"compiled": len(compiled), "fetched": hits, "warnings": [str(w.message) for w in told]}), flush=True)


if __name__ == "__main__":
    main()
