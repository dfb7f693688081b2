"""`python -m tools.serving_sglang`: parses, measures, prints."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from ssmgen.cli import Command
from ssmgen.compat.shared.replacing import REPLACED
from tools.serving.engines import Engine, EngineError
from tools.serving.models import FEW, MODELS, TIMED
from tools.serving.proof import PROVED, Proof, Row
from tools.serving.proof import table as proof_table
from tools.serving.report import answers, as_dict, table
from tools.serving.run import COMPARED, SHORT, Case, Pair

from .plugin import NAME, WITH
from .proof import prove_all

PROMPTS = 8  # that are timed together
GONE = 30.0  # seconds until killed processes must be gone
WITH_US, OWN = "ssmgen", "own"


class Arm(Engine):
    """A process with SGLang, with or without ssmgen's plugin, and the processes that SGLang starts."""

    lines = 60

    def __init__(self, model: str, with_ssmgen: bool, folder: Path, module: str = "tools.serving_sglang.worker"):
        super().__init__(model, with_ssmgen, folder, {"SGLANG_PLUGINS": NAME, WITH: str(int(with_ssmgen))}, module)

    def end(self) -> None:
        """Ends the whole group of processes, and waits until the kernel has taken their memory back."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        super().end()
        until = time.monotonic() + GONE
        while living(self.process.pid) and time.monotonic() < until:
            time.sleep(0.1)


def living(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(file.parent.name))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """models, batches: ascending   layers: of each model, a few more where it has more kinds of layers   seconds: for each engine"""

    models: tuple[str, ...]
    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 2048
    steps: int = 64
    rounds: int = 3
    layers: int = FEW
    seconds: float = 300
    first: str = WITH_US

    @property
    def cases(self) -> list[Case]:
        return [Case("prompts", PROMPTS, self.prompt, 1), *(Case("decode", batch, SHORT, self.steps) for batch in self.batches)]

    @property
    def order(self) -> tuple[bool, bool]:
        """Whether ssmgen is in the first engine, and in the second."""
        return (True, False) if self.first == WITH_US else (False, True)

    @property
    def build(self) -> dict[str, Any]:
        """The arguments of each engine's construction."""
        longest = max(self.prompt, 1024) + self.steps + 1
        return {"layers": self.layers, "dtype": "bfloat16", "longest": longest, "graphs": sorted({*self.batches, COMPARED[0], PROMPTS})}


def measure(
    options: Options, pairs: list[Pair], folder: Path, note: Callable[[str], None], keep: Callable[[], None], start: Any = Arm
) -> None:
    """Builds one engine after the other and fills the pairs, one of each model.

    keep: called after each case of each engine   start: makes engines, like Arm
    """
    for pair in pairs:
        for with_ssmgen in options.order:
            until, name = time.monotonic() + options.seconds, f"{pair.model} {WITH_US if with_ssmgen else OWN}"
            try:
                with _ended(start(pair.model, with_ssmgen, folder)) as engine:
                    _one(engine, pair, options, until, partial(_say, note, name), keep)
            except EngineError as e:
                pair.failures.append(str(e).partition("\n")[0])
                _say(note, name, f"FAILED: {e}")
            keep()


def _say(note: Callable[[str], None], name: str, text: str) -> None:
    note(f"{name:20} {text}")


@contextmanager
def _ended(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.end()


def _one(engine: Engine, pair: Pair, options: Options, until: float, note: Callable[[str], None], keep: Callable[[], None]) -> None:
    """All requests to one engine, within its time."""

    def ask(do: str, **more: Any) -> dict[str, Any]:
        return engine.ask(do, max(0.0, until - time.monotonic()), **more)

    side = engine.with_ssmgen
    built = ask("build", model=pair.model, folder=str(engine.folder), **options.build)
    note(f"built in {built['seconds']:.1f} s")
    pair.answers[side] = ask("answers", prompts=COMPARED[0], tokens=COMPARED[1])
    _look(ask("state"), pair, side)
    keep()
    for case in options.cases:
        ask("generate", batch=case.batch, prompt=case.prompt, tokens=1 + min(case.steps, 8))
    note("has answered, and is warm")
    for number in range(options.rounds):
        for case in options.cases:
            rate, cpu = case.rate(engine, max(0.0, until - time.monotonic()))
            pair.rates.setdefault((case, side), []).append(rate)
            pair.cpu.setdefault((case, side), []).append(cpu)
            keep()
        note(f"round {number + 1} of {options.rounds}")
    _look(ask("state"), pair, side)
    ask("end")


def _look(state: dict[str, Any], pair: Pair, side: bool) -> None:
    """Keeps what the plugin has counted. Raises EngineError if it is not at work where it should be, or is where it should not."""
    if side:
        pair.outcome, pair.warnings, pair.taken, pair.refused = (state[name] for name in ("outcome", "warnings", "taken", "refused"))
    if (bool(state["taken"]) and REPLACED in state["outcome"].values()) is not side:
        raise EngineError(f"the plugin has served {'no call' if side else 'calls'}; refused: {state['refused']}")


@click.command(cls=Command)
@click.option(
    "--model", "models", type=click.Choice(MODELS), multiple=True, help=f"May repeat. Default: {' '.join(TIMED)}, or none with --prove."
)
@click.option("--prove", "proved", type=click.Choice(PROVED), multiple=True, help="To prove deterministic inference of; may repeat.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help="Of decode; may repeat. Default: 1, 8, 64 and 256.")
@click.option("--prompt", type=click.IntRange(32), default=2048, show_default=True, help=f"Tokens of each of {PROMPTS} prompts.")
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help=f"Of decode, behind prompts of {SHORT} tokens.")
@click.option("--rounds", type=click.IntRange(0), default=3, show_default=True, help="Of timing; 0 compares answers only.")
@click.option("--layers", type=click.IntRange(1), default=FEW, show_default=True, help="Of each model; more if it has more kinds of them.")
@click.option("--seconds", type=click.FloatRange(1), default=300, show_default=True, help="For each engine, and for all proofs.")
@click.option("--first", type=click.Choice([WITH_US, OWN]), default=WITH_US, show_default=True, help="The engine that runs first.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="New, for the engines' logs. Default: a temporary one.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was measured here.")
def serving(models, proved, batches, file, folder, **given) -> None:
    """SGLang with and without ssmgen: tokens a second of prompts and of decode steps, and whether greedy tokens are equal.

    Needs a GPU and SGLang 0.5.23. Builds a live sglang.Engine with ssmgen's plugin, ends it, and builds one without, with the same random
    weights, for each model; nothing is downloaded. Both answer the same prompts, with log-probabilities. Rounds of timing follow.
    The JSON file is written again after each case. An engine that fails, or takes longer than --seconds, does not stop the others. Its
    last output is printed, and the exit code is 1. SGLang alone tunes Triton kernels of gated delta rules for more than 100 s.
    With --prove, engines with --enable-deterministic-inference follow, all of a model at once. They must give the same bits for a request
    alone, in batches, in pieces, and with and without CUDA graphs; SGLang alone, without the mode, must not.
    """
    options = Options(
        models=tuple(dict.fromkeys(models or (() if proved else TIMED))), batches=tuple(sorted(set(batches) or {1, 8, 64, 256})), **given
    )
    pairs, proofs = [Pair(model, "bfloat16", options.layers, True) for model in options.models], dict[str, Proof]()

    def keep() -> None:
        if file:
            about = {"sglang": metadata.version("sglang"), "options": str(options), "proofs": [each.as_dict() for each in proofs.values()]}
            whole = file.with_name(f"{file.name}.part")
            whole.write_text(json.dumps(as_dict(pairs, **about), indent=1), encoding="utf-8")
            whole.replace(file)  # a run that is cut leaves a whole file

    begin = time.monotonic()

    def note(text: str) -> None:
        click.echo(f"{time.monotonic() - begin:5.0f} s  {text}", err=True)

    def tell(proof: Proof, found: Row | str) -> None:
        proofs[proof.model] = proof
        note(str(found))
        keep()

    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        try:
            measure(options, pairs, place, note, keep)
            prove_all(tuple(dict.fromkeys(proved)), place, time.monotonic() + options.seconds, tell, Arm)
        finally:  # partial results of an interrupted run
            keep()
            if pairs:
                click.echo(answers(pairs))
                click.echo(table(pairs))
            if proofs:
                click.echo(proof_table([*proofs.values()]))
    if any(pair.failures for pair in pairs) or any(each.problems for each in proofs.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    serving()
