"""Processes with one engine each, which wait for requests: tools.serving.worker."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = "tools.serving.worker"
WIDTH = 400  # characters of a line that an error shows
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the requesting process, so that its weights can be filled
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_KIMI_K3_GEMM_AR": "0",  # of tensor parallelism on sm_100; on one GPU it only imports CuTe DSL, which may be missing
}  # fmt: skip


class EngineError(RuntimeError):
    """An engine failed, ended or took too long; the message includes its last output."""


class Engine:
    """One process. with_ssmgen: whether vLLM loads the plugin there, and the side of a comparison   plugin: the former, if it is not the
    latter   folder: a subfolder in it gets its files; `log` is its output

    variables: added to this process's environment   module: the module to run
    """

    lines = 25  # of the output that an error shows

    def __init__(
        self, name: str, with_ssmgen: bool, folder: Path, variables: Mapping[str, str], module: str = WORKER, plugin: bool | None = None
    ):  # fmt: skip
        self.with_ssmgen = with_ssmgen
        self.folder = folder / f"{name}-{'ssmgen' if with_ssmgen else 'own'}"
        self.folder.mkdir(parents=True)
        plugins = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name not in ("", "ssmgen")]
        own = {
            "VLLM_PLUGINS": ",".join(plugins + ["ssmgen"] * (with_ssmgen if plugin is None else plugin)),
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
        }
        self._answers, theirs = os.pipe()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs)], cwd=ROOT, env={**os.environ, **OFFLINE, **variables, **own},
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(theirs,),
            )  # fmt: skip
        os.close(theirs)
        self._read = b""

    def say(self, do: str, **more: Any) -> None:
        """Sends a request without waiting. Raises EngineError if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as e:
            raise self._failed("has ended") from e

    def hear(self, seconds: float) -> dict[str, Any]:
        """The next answer. Raises EngineError for an error, an end, and if none comes within `seconds`."""
        until = time.monotonic() + seconds
        while b"\n" not in self._read:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._failed(f"has not answered in {seconds:.1f} s")
            if not (more := os.read(self._answers, 1 << 16)):
                self.process.wait(seconds)  # it may still be writing the reason
                raise self._failed("has ended")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def ask(self, do: str, seconds: float, **more: Any) -> dict[str, Any]:
        self.say(do, **more)
        return self.hear(seconds)

    def end(self) -> None:
        """Ends the process in any state, which frees its memory on the GPU."""
        self.process.kill()
        self.process.wait()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _failed(self, what: str) -> EngineError:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()[-self.lines :]
        return EngineError("\n  | ".join([f"{self.folder.name} {what}", *(line[:WIDTH] for line in lines)]))
