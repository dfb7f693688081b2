"""Replaces tools.serving_sglang.worker: an engine that computes nothing, and may fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from tools.serving.worker import serve
from tools.serving_sglang.plugin import NAME, WITH


class StandIn:
    """Steps take 1 ms, with ssmgen 0.5 ms, and prompts 1 us a token.

    SERVING_FAILS: `MODEL REQUEST`, where the engine with ssmgen raises; `MODEL REQUEST silently`, where it waits; `idle`: ssmgen serves no
    call there; `both`: it serves calls in the other engine, too; `depends`: log-probabilities depend on the batch in all engines;
    `same`: in none. Otherwise they do in engines that are not deterministic.
    """

    def __init__(self) -> None:
        assert os.environ["SGLANG_PLUGINS"] == NAME
        self.ours, self.fails = os.environ[WITH] == "1", os.environ.get("SERVING_FAILS", "")
        self.model, self.deterministic = "", False

    def build(self, model: str, **more: Any) -> dict[str, Any]:
        self.model, self.deterministic = model, more.get("enable_deterministic_inference", False)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}")
        print(f"built {sorted(more)}" + "!" * 1000, *range(100), sep="\n", flush=True)
        return self._done("build")

    def answers(self, prompts: int, tokens: int) -> dict[str, Any]:
        return self._done("answers") | {"tokens": [[i] * tokens for i in range(prompts)], "best": [[[-0.5, -1.0]] * tokens] * prompts}

    def needles(self, lengths: list[int], batch: int, seed: int, tokens: int) -> dict[str, Any]:
        """Answers as tools.serving.needles has them."""
        self._done("needles")
        depends = self.fails == "depends" or (self.fails != "same" and not self.deterministic)
        best = [[3, -1.0 - depends * batch * 2.0**-20], [5, -2.0]]
        return {"said": {str(n): [[3, best]] * tokens for n in lengths}}

    def generate(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        self._done("generate")
        return {"seconds": batch * prompt * 1e-6 + (tokens - 1) * (0.5e-3 if self.ours else 1e-3), "cpu": 0.0}

    def state(self) -> dict[str, Any]:
        at_work = self.fails == "both" or (self.ours and self.fails != "idle")
        told = {"outcome": {"engine.scan": "replaced"}, "warnings": ["scan refuses 7"], "taken": {"scan": 3}, "refused": {"scan": 1}}
        return (told if at_work else {name: type(value)() for name, value in told.items()}) | {"filled": [7]}

    def end(self) -> dict[str, Any]:
        return self._done("end")

    def _done(self, what: str) -> dict[str, Any]:
        if self.ours and self.fails == f"{self.model} {what}":
            raise ValueError("no such kernel")
        if self.ours and self.fails == f"{self.model} {what} silently":
            time.sleep(600)
        return {"seconds": 0.0}


if __name__ == "__main__":
    os.setpgid(0, 0)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        serve(StandIn(), sys.stdin, lambda what: print(json.dumps(what), file=answers))
