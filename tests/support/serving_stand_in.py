"""Replaces tools.serving.worker: an engine that computes nothing, records when it was called, and may fail."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.serving.worker import serve

SLOW = 0.002  # seconds that a request takes


class StandIn:
    """Steps take 1 ms, with ssmgen 0.5 ms, and prompts 1 us a token. SERVING_FAILS: `MODEL REQUEST`, where an engine with ssmgen fails.

    Log-probabilities depend on the batch where the mode is off; SERVING_FAILS: `varies`, in the mode, too, `same`, never, and `no hit`.
    """

    def __init__(self) -> None:
        self.ours = "ssmgen" in os.environ["VLLM_PLUGINS"].split(",")
        self.journal = Path(os.environ["SERVING_JOURNAL"])
        self.model, self.counts = "", False

    def build(self, model: str, folder: str, count: bool = False, **more: Any) -> dict[str, Any]:
        self.model, self.counts = model, count
        told = {name: os.environ.get(f"SSMGEN_ENGINE_{name.upper()}") for name in ("linear", "noise")}
        return self._done("build", folder=folder, **told, **more)

    def answers(self, prompts: int, tokens: int) -> dict[str, Any]:
        self._done("answers")
        return {"tokens": [[i] * tokens for i in range(prompts)], "best": [[[-0.5, -1.0]] * tokens] * prompts}

    def generate(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        self._done("generate", batch=batch, prompt=prompt)
        seconds = batch * prompt * 1e-6 + (tokens - 1) * (0.5e-3 if self.ours else 1e-3)
        return {"seconds": seconds, "cpu": seconds / 2}

    def busy(self, batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        self._done("busy", batch=batch, prompt=prompt)
        if "blind" in os.environ.get("SERVING_FAILS", ""):
            return {"seconds": None, "kernels": None}
        return {"seconds": batch * 1e-6 + tokens * (0.25e-3 if self.ours else 0.75e-3), "kernels": 5 + 7 * tokens}

    def needles(self, lengths: list[int], batch: int, seed: int, tokens: int) -> dict[str, Any]:
        self._done("needles", batch=batch, seed=seed, mode=os.environ.get("VLLM_BATCH_INVARIANT"))
        fails = os.environ.get("SERVING_FAILS", "")
        varies = (os.environ.get("VLLM_BATCH_INVARIANT") != "1" and fails != "same") or (fails == "varies" and batch == 32)
        found = {
            str(n): [[i, [[i, -0.1 * n], [i + 1, -3.5]]] for i in range(tokens)] for n in lengths[: max(1, batch - 1) if batch else None]
        }
        if varies:
            found["1"][tokens - 1][1][0][1] -= 2**-20 * batch
        return {"said": found}

    def prefix(self, length: int, blocks: str, tokens: int) -> dict[str, Any]:
        self._done("prefix", blocks=blocks)
        hit = 0 if os.environ.get("SERVING_FAILS") == "no hit" else 64
        return {"said": self.needles([length], 0, 0, tokens)["said"], "cached": hit, "block": 64}

    def tune(self, prompt: int) -> dict[str, Any]:
        return self._done("tune") | {"kernels": 3}

    def state(self) -> dict[str, Any]:
        self._done("state")
        replaced = "kept: it is another one" if "idle" in os.environ.get("SERVING_FAILS", "") else "replaced"
        outcome = dict.fromkeys(("engine.f", "engine.UnquantizedLinearMethod.apply"), replaced)
        return {"outcome": outcome if self.ours else {}, "warnings": [], "taken": {"f": 7} if self.counts else {}, "refused": {}}

    def _done(self, what: str, **more: Any) -> dict[str, Any]:
        begin = time.monotonic()
        if self.ours and os.environ.get("SERVING_FAILS") == f"{self.model} {what}":
            print("what it wrote last")
            raise ValueError("no such kernel")
        if self.ours and os.environ.get("SERVING_FAILS") == f"{self.model} {what} silently":
            time.sleep(600)
        time.sleep(SLOW)
        entry = {"what": what, "model": self.model, "ours": self.ours, "begin": begin, "end": time.monotonic(), **more}
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return {"seconds": SLOW}


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        serve(StandIn(), sys.stdin, lambda what: print(json.dumps(what), file=answers))
