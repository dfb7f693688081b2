"""`python -m tools.demo`: measures one family after the other, and reports."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ssmgen import __version__
from ssmgen.bench.progress import PRINTING, Watch
from ssmgen.compile import nvrtc
from ssmgen.errors import bullets

from . import DemoError
from . import measure as measuring
from . import prompts as prompting
from .measure import ACCELERATED, FUSED, FUSED_GRAPH, GRAPH, PATCHED, PLAIN, Options, Row
from .packages import PACKAGES
from .presets import Preset
from .prompts import PromptRow

INSTALLED = ("mamba_ssm", "causal_conv1d", "fla", "kernels")  # transformers calls these, if installed, instead of PyTorch operations


@dataclass(frozen=True, slots=True)
class Failure:
    """A family that was not measured, at one batch size or at any."""

    family: str
    batch: int | None
    error: str

    @property
    def words(self) -> str:
        return self.family if self.batch is None else f"{self.family}, batch {self.batch}"


@dataclass
class Report:
    """The results of a run. facts: device, versions and the method."""

    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    prompts: list[PromptRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        lists = {"rows": self.rows, "prompts": self.prompts, "failed": self.failed}
        return {**self.facts, **{name: [asdict(entry) for entry in entries] for name, entries in lists.items()}}

    def check(self) -> None:
        """Raises DemoError that names the families that failed, and the families whose tokens differ."""
        wrong = [f"{failure.words}: {failure.error}" for failure in self.failed]
        differing = {row.family: row for row in self.rows if row.same < row.tokens}
        wrong += [f"{name}: {row.same} of {row.tokens} tokens are the same" for name, row in differing.items()]
        if wrong:
            raise DemoError(f"{len(wrong)} failed:\n{bullets(wrong)}")


def need_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise DemoError("transformers is not installed: pip install 'ssmgen[hf]'")


def need_device() -> None:
    if not torch.cuda.is_available():
        raise DemoError("the demonstration needs a CUDA device, and torch sees none")


def quiet() -> None:
    """Keeps transformers from advising to install packages, which it does once per function and family."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def facts(options: Options) -> dict[str, Any]:
    """The first fields of a report."""
    import transformers

    return {
        "ssmgen": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernel_packages": [name for name in INSTALLED if importlib.util.find_spec(name) is not None],
        "compiler": nvrtc.build_id(),
        "options": asdict(options),
        "method": " ".join(((prompting if options.prompts else measuring).__doc__ or "").split()),
    }


def run(presets: Sequence[Preset], batches: tuple[int, ...], options: Options, watch: Watch = PRINTING) -> Report:
    """Measures all families. A family that raises is recorded as failed, with the reason, and the next one follows. Raises DemoError
    without a GPU."""
    need_device()
    report = Report(facts(options))
    watch.begins("demo", len(presets))
    for preset in presets:
        watch.case(f"{preset.name}, like {preset.like}")
        rows, failed = family(preset, batches, options)
        report.rows += [row for row in rows if isinstance(row, Row)]
        report.prompts += [row for row in rows if isinstance(row, PromptRow)]
        report.failed += failed
        watch.ends("\n".join([line(row) for row in rows] + [f"{failure.words}: FAILED: {failure.error}" for failure in failed]))
    return report


Rows = list[Row | PromptRow]


def family(preset: Preset, batches: tuple[int, ...], options: Options, device: str = "cuda") -> tuple[Rows, list[Failure]]:
    """Rows of a family, and its failures."""
    try:
        rows, failed = (_prompted if options.prompts else _measured)(preset, batches, options, device)
    except Exception as e:  # the other families are still worth measuring
        rows, failed = [], [Failure(preset.name, None, measuring.first_line(e))]
    measuring.release()
    return rows, failed


def _measured(preset: Preset, batches: tuple[int, ...], options: Options, device: str) -> tuple[Rows, list[Failure]]:
    same, tokens = measuring.same_tokens(preset, options.tokens, device)
    measuring.release()
    model = measuring.prepared(preset, batches, options, device)
    served, layers = preset.served(options.layers)
    named = {"family": preset.name, "like": preset.like, "served": served, "layers": layers, "same": same, "tokens": tokens}
    rows: Rows = []
    failed = []
    for batch in batches:
        try:
            rows.append(Row(**named, batch=batch, **measuring.decoded(model, batch, options)))
        except Exception as e:  # too little memory, say: a smaller batch may do
            failed.append(Failure(preset.name, batch, measuring.first_line(e)))
        measuring.release()
    return rows, failed


def _prompted(preset: Preset, batches: tuple[int, ...], options: Options, device: str) -> tuple[Rows, list[Failure]]:
    model = preset.for_prompts.build(options.layers, torch.bfloat16, device)
    served, layers = preset.served(options.layers)
    rows: Rows = []
    failed = []
    for batch, length in itertools.product(batches, options.prompts):
        named = {"family": preset.name, "like": preset.like, "served": served, "layers": layers, "batch": batch, "length": length}
        try:
            rows.append(PromptRow(**named, **prompting.measured(model, batch, length, options)))
        except Exception as e:  # too little memory, say: a shorter prompt may do
            failed.append(Failure(preset.name, batch, f"a prompt of {length}: {measuring.first_line(e)}"))
        measuring.release()
    return rows, failed


def line(row: Row | PromptRow) -> str:
    """A line for a row, printed while other rows are measured."""
    if isinstance(row, PromptRow):
        ms = ", ".join(f"{way} {row.ms[way]:.1f}" for way in (PLAIN, PACKAGES, PATCHED, FUSED) if way in row.ms)
        return f"{row.family}, batch {row.batch}, a prompt of {row.length}: ms to the first token {ms}"
    ways = (PLAIN, PACKAGES, PATCHED, FUSED, GRAPH, FUSED_GRAPH, ACCELERATED)
    ms = ", ".join(f"{way} {row.ms[way]:.2f}" for way in ways if way in row.ms)
    return f"{row.family}, batch {row.batch}: ms per token {ms}; {row.same} of {row.tokens} tokens the same"
