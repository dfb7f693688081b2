"""The plugin that SGLang loads in engines of this comparison, in every process. tools.serving_sglang.worker writes its entry point."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tools.serving.calls import Calls
from tools.serving.worker import Warnings, weights_as_trained

NAME = "ssmgen_compared"  # in SGLANG_PLUGINS: other entry points, ssmgen's own included, are not loaded
WITH = "SERVING_WITH_SSMGEN"  # the variable that says whether to load ssmgen's plugin, too
calls, warnings = Calls(), Warnings()
filled: list[int] = []  # the number of parameters of each model that got weights in this process
outcome: dict[str, str] = {}


def register() -> None:
    """Gives models ordinary random weights and the scheduler two methods; registers ssmgen's plugin if the variable asks for it.

    Does nothing in SGLang's processes that have neither scheduler nor model.
    """
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = _fill
    Scheduler.write_counts, Scheduler.forget_prefixes = _write_counts, _forget_prefixes
    if os.environ.get(WITH) == "1":
        from ssmgen.compat import sglang

        logging.getLogger("sglang.ssmgen").addFilter(warnings)
        calls.count(sglang)
        outcome.update(sglang.register())


def _fill(model: Any) -> None:
    weights_as_trained(model)
    filled.append(sum(1 for _ in model.parameters()))


def _forget_prefixes(scheduler: Any) -> None:
    """A method of SGLang's scheduler, for Engine.collective_rpc. Engine.flush_cache would also free PyTorch's memory, so that the next
    request allocates it again."""
    if not scheduler.flush_cache(empty_cache=False):
        raise RuntimeError("the scheduler is not idle")


def _write_counts(scheduler: Any, file: str) -> None:
    """A method of SGLang's scheduler, for Engine.collective_rpc."""
    if outcome:
        from ssmgen.compat import sglang

        outcome.update(sglang.register())  # functions that were imported since
    told = {"outcome": outcome, "warnings": warnings.said, "taken": calls.taken, "refused": calls.refused, "filled": filled}
    Path(file).write_text(json.dumps(told), encoding="utf-8")
