"""`ssmgen bench all`: every operator's benchmark in turn, in full, quickly, or of what one model uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..families.gated_rms_norm.bench import FORMS
from ..families.linear_attention.bench_recurrences import OPS
from ..models import LinearAttention, Mamba, find_model
from ..spec import DType
from . import HOMES, LAYERS, LINEAR_ATTENTION, TOLD, home
from . import report as reports
from .progress import PRINTING, Watch
from .rows import Failure, Row, failures_of, rows_of

QUICK_ROUNDS = 3
FEW = {"batches": (1, 16, 128)}
PROMPT = 2048  # tokens of a model's prompts

# What --quick makes of an operator's defaults.
QUICK: dict[str, dict[str, Any]] = {
    "selective_state_update": FEW | {"names": ("nemotron-h-8b", "mamba-130m")},
    **dict.fromkeys(LINEAR_ATTENTION, FEW),
    "replay_selective_state_update": {"batches": (1, 64)},
    "causal_conv1d": {"shapes": ((1, 1536, 2048), (4, 4096, 4096))},
    "causal_conv1d_update": FEW,
    "combine_splits": {"shapes": ((128, 16), (1024, 8)), "widths": (512,), "dtypes": (DType.BF16,)},
    "gated_rms_norm": {"rows": (1, 128), "hot": False},
    **dict.fromkeys(LAYERS, {"batches": (1, 64), "states": (DType.BF16,)}),
}
assert QUICK.keys() == HOMES.keys()


@dataclass
class Suite:
    """What a run of several benchmarks leaves, and what a file of them holds."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)  # operators that made no report: {"op", "error"}

    def as_dict(self) -> dict[str, Any]:
        return {"reports": self.reports, "failed": self.failed}


def tasks(quick: bool = False, model: str | None = None, tp: int = 1) -> dict[str, dict[str, Any]]:
    """operator -> options of its `run`. Raises ModelError for a model that is not known or cannot be divided."""
    options = {op: dict(QUICK[op]) if quick else {} for op in HOMES}
    if model is None:
        return options
    return {op: options[op] | own for op, own in _of_model(model, tp, quick).items()}


def _of_model(name: str, tp: int, quick: bool) -> dict[str, dict[str, Any]]:
    """The shapes of a model, for the operators that it uses. Which of them merges splits of its attention, models.toml does not say."""
    model = find_model(name).divided(tp)
    found: dict[str, dict[str, Any]] = {}
    if isinstance(model, Mamba):
        found["selective_state_update"] = {"names": (name,), "tp": tp}
        if model.kind == "mamba2":
            shape = (model.nheads, model.headdim, model.d_state, model.ngroups)
            found["replay_selective_state_update"] = {"shape": shape, "states": (model.state,)}
    if isinstance(model, LinearAttention):
        own = {"heads": model.nheads, "dim": model.dim_k, "value_dim": model.dim_v, "states": (model.state,)}
        found[model.function] = own | ({"key_heads": model.key_heads} if OPS[model.function].groups else {})
    if channels := model.conv_channels:
        sizes = (1, 4) if quick else (1, 4, 16, 64)
        found["causal_conv1d"] = {"shapes": tuple((n, channels, PROMPT) for n in sizes), "width": model.conv_width}
        found["causal_conv1d_update"] = {"dim": channels, "width": model.conv_width}
    if model.norm_shape:
        found["gated_rms_norm"] = {"forms": (FORMS[model.kind],), "shapes": (model.norm_shape,)}
    if model.layer_function:
        found[model.layer_function] = {"names": (name,), "tp": tp}
    return found


def run(work: Mapping[str, Mapping[str, Any]], rounds: int = 7, peers: bool = True, watch: Watch = PRINTING) -> Suite:
    """Runs what `tasks` gives. An operator whose benchmark raises is one of the failed, with the reason, and the next goes on; an
    interruption by the keyboard ends all of it, and keeps the reports that are there.

    Raises SsmgenError without a GPU.
    """
    reports.need_device()
    suite, ops = Suite(), list(work)
    for i, op in enumerate(ops):
        fixed = {"op": op} if op in TOLD else {}
        try:
            suite.reports.append(home(op).run(**fixed, **work[op], rounds=rounds, peers=peers, watch=watch))
        except KeyboardInterrupt:
            suite.failed += [{"op": left, "error": "interrupted"} for left in ops[i:]]
            break
        except Exception as e:  # whatever it is, a lost device included: the others' results are worth having
            suite.failed.append({"op": op, "error": f"{type(e).__name__}: {e}"})
            watch.say(f"{op}: FAILED: {suite.failed[-1]['error']}")
        torch.cuda.empty_cache()
    return suite


def stitched(suites: Sequence[Suite]) -> Suite:
    """Several in one."""
    return Suite([r for s in suites for r in s.reports], [f for s in suites for f in s.failed])


def rows_and_failures(suite: Suite) -> tuple[list[Row], list[Failure]]:
    failures = [failure for report in suite.reports for failure in failures_of(report)]
    failures += [Failure(entry["op"], "", "", "", entry["error"]) for entry in suite.failed]
    return [row for report in suite.reports for row in rows_of(report)], failures
