"""The requests to the engines, and their order: all engines are built at once, and one at a time uses the GPU during timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from ssmgen.compat.shared.replacing import REPLACED

from .compare import Compared, compared
from .engines import Engine, EngineError
from .models import FEW, MODELS

TOGETHER = 16384  # most tokens of prompts that are timed together
SHORT = 16  # tokens of the prompts before timed decode steps
COMPARED = 16, 48  # prompts and tokens
STEP = 8192  # most tokens of an engine's step: half of vLLM's default for such a large GPU, to save memory
WATCHED = 16  # decode steps with profiled GPU time, after all rounds
NOISE = 10  # Philox rounds of 16-bit states
LINEAR = "UnquantizedLinearMethod.apply"  # whose replacement --linear is about
SMALL_STEP = 1024  # for engines that are not timed: prompts are split, and less memory is used


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """timed: models   answered: (model, dtype) with compared answers and no timing   batches: ascending   prompt: its tokens

    steps: timed decode steps   rounds: of timing, each with all cases of all engines   layers: 0 for each model's own number
    seconds: no further round begins after this time   patience: seconds until all engines must be ready, and for any later answer
    compiled: with torch.compile   apart: timed engines allocate memory after the others have ended   limit: seconds; no request that is
    timed or profiled begins after them   linear: both engines have the plugin, and the second one linear layers by ssmgen
    narrow: the engine with ssmgen has f16 states, rounded with noise
    """

    timed: tuple[str, ...]
    answered: tuple[tuple[str, str], ...] = ()
    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 2048
    steps: int = 64
    rounds: int = 5
    layers: int = 0
    seconds: float = 600
    patience: float = 300
    compiled: bool = False
    apart: bool = False
    limit: float = inf
    linear: bool = False
    narrow: bool = False

    @property
    def longest(self) -> int:
        """The longest sequence in tokens; compared answers have prompts of up to 700."""
        return max(self.prompt, 1024) + self.steps + 1

    @property
    def cases(self) -> list[Case]:
        prompts = [Case("prompts", batch, max(1, min(self.prompt, TOGETHER // batch)), 1) for batch in self.batches]
        return prompts + [Case("decode", batch, SHORT, self.steps) for batch in self.batches]


@dataclass(frozen=True, slots=True)
class Case:
    """what: "prompts" or "decode"   prompt: tokens of each prompt   steps: decode steps after the prompts"""

    what: str
    batch: int
    prompt: int
    steps: int

    def rate(self, engine: Engine, patience: float) -> tuple[float, float]:
        """Tokens per second, and seconds of the CPU: of all prompts, or of a decode step.

        For decode, the time to the first token is subtracted: steps with prompts, minus the prompts.
        """
        first = engine.ask("generate", patience, batch=self.batch, prompt=self.prompt, tokens=1)
        if self.what == "prompts":
            return self.batch * self.prompt / first["seconds"], first["cpu"]
        all_of_them = engine.ask("generate", patience, batch=self.batch, prompt=self.prompt, tokens=1 + self.steps)
        seconds, cpu = (all_of_them[what] - first[what] for what in ("seconds", "cpu"))
        return self.batch * self.steps / seconds, cpu / self.steps

    def busy(self, engine: Engine, patience: float) -> tuple[float, float] | None:
        """Seconds in which the GPU is busy, and its kernels and copies: of all prompts, or of a decode step. None without a GPU."""
        if self.what == "prompts":
            seen = engine.ask("busy", patience, batch=self.batch, prompt=self.prompt, tokens=1)
            return None if seen["seconds"] is None else (seen["seconds"], seen["kernels"])
        few, many = (engine.ask("busy", patience, batch=self.batch, prompt=self.prompt, tokens=n) for n in (1, 1 + WATCHED))
        if few["seconds"] is None or many["seconds"] is None:
            return None
        return (many["seconds"] - few["seconds"]) / WATCHED, (many["kernels"] - few["kernels"]) / WATCHED


@dataclass(slots=True)
class Pair:
    """A model without and with ssmgen. rates: {(case, with ssmgen): tokens per second in each round}; outcome: of the plugin's functions

    linear: "with ssmgen" means linear layers by ssmgen here, and both engines have the plugin   narrow: it also means f16 states with noise

    taken, refused: {function: calls} that ssmgen served, and that failed in it; counted where nothing is timed or compiled

    cpu: seconds of the CPU, by the same keys, for all prompts or a decode step   busy: seconds in which the GPU is busy, and its kernels
    and copies, for the same
    """

    model: str
    dtype: str
    layers: int
    timed: bool
    engines: dict[bool, Engine] = field(default_factory=dict)
    answers: dict[bool, dict[str, Any]] = field(default_factory=dict)
    rates: dict[tuple[Case, bool], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[Case, bool], list[float]] = field(default_factory=dict)
    busy: dict[tuple[Case, bool], tuple[float, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    outcome: Mapping[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    taken: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    linear: bool = False
    narrow: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}, {self.layers} layers{', linear layers' if self.linear else ''}{', f16 states' if self.narrow else ''}"

    @property
    def compared(self) -> Compared | None:
        return compared(self.answers[False], self.answers[True]) if len(self.answers) == 2 else None

    def attempt(self, with_ssmgen: bool, work: Callable[..., Any], *more: Any) -> Any:
        """The result of work(engine, *more); None if the engine has ended. A failure ends this engine only."""
        engine = self.engines.get(with_ssmgen)
        if engine is None:
            return None
        try:
            return work(engine, *more)
        except EngineError as e:
            self.failures.append(str(e))
            engine.end()
            del self.engines[with_ssmgen]
            return None

    def end(self) -> None:
        for engine in self.engines.values():
            engine.end()
        self.engines.clear()


def pairs_of(options: Options) -> list[Pair]:
    forms = {"linear": options.linear, "narrow": options.narrow}
    timed = [Pair(model, "bfloat16", options.layers or MODELS[model].layers, True, **forms) for model in options.timed]
    return timed + [Pair(model, dtype, FEW, False, **forms) for model, dtype in options.answered]


def run(
    pairs: list[Pair], options: Options, folder: Path, note: Callable[[str], None], start: Callable[..., Engine] = Engine,
    tell_case: Callable[[Pair, Case], None] = lambda pair, case: None,
) -> None:  # fmt: skip
    """Measures and compares; the pairs hold the results so far at any time.

    folder: for the engines' files   note: receives progress messages   start: makes engines, like Engine
    tell_case: is called when a case has been measured again, or profiled, in both engines
    """
    begin = time.monotonic()

    def tell(pair: Pair, with_ssmgen: bool, said: str | None) -> None:
        name = f"{pair.model} {pair.dtype} {'with ssmgen' if with_ssmgen else 'own'}"
        note(f"{time.monotonic() - begin:5.0f} s  {name:36} {said or 'FAILED'}")

    try:
        for pair, with_ssmgen in _sides(pairs):
            # without timing, Triton's first configurations: faster, and equal sums in every run
            variables = {} if pair.timed else {"VLLM_TRITON_FORCE_FIRST_CONFIG": "1"}
            if pair.linear:
                variables["SSMGEN_ENGINE_LINEAR"] = "allow" if with_ssmgen else "deny"
            if pair.narrow and with_ssmgen:
                variables["SSMGEN_ENGINE_NOISE"] = str(NOISE)
            pair.engines[with_ssmgen] = start(
                f"{pair.model}-{pair.dtype}", with_ssmgen, folder, variables, plugin=with_ssmgen or pair.linear
            )
        timed, answered = ([pair for pair in pairs if pair.timed is which] for which in (True, False))
        for together in (answered, timed) if options.apart else (answered + timed,):
            for pair, with_ssmgen in _sides(together):
                pair.attempt(with_ssmgen, _prepare, pair, options)
            for pair, with_ssmgen in _sides(together):
                tell(pair, with_ssmgen, pair.attempt(with_ssmgen, _prepared, pair, options, begin + options.patience))
                if with_ssmgen and not pair.timed:
                    pair.end()
        for pair, with_ssmgen in _sides(timed):
            tell(pair, with_ssmgen, pair.attempt(with_ssmgen, _tuned, options))
        for number in range(options.rounds if timed else 0):
            if number and time.monotonic() - begin > options.seconds:
                note(f"{options.seconds:.0f} s are over after {number} rounds of {options.rounds}")
                break
            for pair in timed:
                _round(pair, options, number, begin, tell_case)
            note(f"{time.monotonic() - begin:5.0f} s  round {number + 1} of {options.rounds}")
        for pair in timed:
            _watch(pair, options, begin, tell_case)
        note(f"{time.monotonic() - begin:5.0f} s  looked at what the GPU does in {WATCHED} steps")
    finally:
        for pair in pairs:
            pair.end()


def _sides(pairs: list[Pair]) -> list[tuple[Pair, bool]]:
    return [(pair, with_ssmgen) for pair in pairs for with_ssmgen in (False, True)]


def _prepare(engine: Engine, pair: Pair, options: Options) -> None:
    """All requests that engines can serve concurrently, sent at once: an engine is built, answers, and runs every case."""
    engine.say(
        "build", model=pair.model, layers=pair.layers, dtype=pair.dtype, longest=options.longest, compiled=options.compiled,
        graphs=sorted({*options.batches, COMPARED[0]}) if pair.timed else [1, COMPARED[0]], step=STEP if pair.timed else SMALL_STEP,
        folder=str(engine.folder / "model"), state="float16" if pair.narrow and engine.with_ssmgen else "",
        count=engine.with_ssmgen and not (pair.timed or options.compiled),
    )  # fmt: skip
    engine.say("answers", prompts=COMPARED[0], tokens=COMPARED[1])
    for case in options.cases if pair.timed else ():
        engine.say("generate", batch=case.batch, prompt=case.prompt, tokens=2)
    engine.say("state")


def _prepared(engine: Engine, pair: Pair, options: Options, until: float) -> str:
    """Waits for the answers to _prepare, up to a deadline that all engines share."""

    def hear() -> dict[str, Any]:
        return engine.hear(max(0.0, until - time.monotonic()))

    built, pair.answers[engine.with_ssmgen] = hear()["seconds"], hear()
    first = sum(hear()["seconds"] for _ in (options.cases if pair.timed else ()))
    state = hear()
    if engine.with_ssmgen:
        pair.outcome, pair.warnings, pair.taken, pair.refused = (state[name] for name in ("outcome", "warnings", "taken", "refused"))
        if REPLACED not in pair.outcome.values():
            pair.failures.append("the plugin has replaced nothing: both engines are vLLM's own")
        if pair.linear and REPLACED not in [what for place, what in pair.outcome.items() if place.endswith(LINEAR)]:
            pair.failures.append("the plugin has not replaced linear layers: both engines are alike")
    return f"built in {built:.1f} s, first requests {first:.1f} s"


def _tuned(engine: Engine, options: Options) -> str:
    tuned = engine.ask("tune", options.patience, prompt=options.prompt)
    return f"{tuned['kernels']} kernels tuned alone in {tuned['seconds']:.1f} s"


def _round(pair: Pair, options: Options, number: int, begin: float, tell_case: Callable[[Pair, Case], None]) -> None:
    """Runs every case once, with and without ssmgen in turn; the first one alternates from round to round."""
    for case in options.cases:
        if time.monotonic() - begin > options.limit:
            return
        for with_ssmgen in (number % 2 == 1, number % 2 == 0):
            measured = pair.attempt(with_ssmgen, case.rate, options.patience)
            if measured is not None:
                for kept, value in zip((pair.rates, pair.cpu), measured, strict=True):
                    kept.setdefault((case, with_ssmgen), []).append(value)
        tell_case(pair, case)


def _watch(pair: Pair, options: Options, begin: float, tell_case: Callable[[Pair, Case], None]) -> None:
    """Profiles the GPU, decode steps first, after all rounds, because the profiler costs time."""
    for case in reversed(options.cases):
        if time.monotonic() - begin > options.limit:
            return
        for with_ssmgen in (False, True):
            if (case, with_ssmgen) in pair.rates and (busy := pair.attempt(with_ssmgen, case.busy, options.patience)) is not None:
                pair.busy[case, with_ssmgen] = busy
        tell_case(pair, case)
