"""The proof of batch invariance with live engines: log-probabilities that are equal bit for bit, and a control that must differ.

Engines of vLLM, unless a caller passes its own settings, and functions that start an engine and ask it to build itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .engines import Engine, EngineError
from .models import FEW, MODELS

NEEDLES = (1, 130, 700, 3000)  # tokens of the prompts that are compared: on both sides of all pieces
BATCHES, ORDERS = (2, 8, 32, 128), 2
TOKENS = 16  # of an answer
LONGEST = NEEDLES[-1] + TOKENS + 1
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS = {"one": "its first block", "half": "half of its blocks", "all": "all of its blocks"}  # that another prompt left in the cache
PROVED = ("mamba2", "qwen3_5")


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine. step: tokens of its step, so of a prompt's piece   eager: without CUDA graphs   prefixes: with a cache of them

    proves: whether it is in the batch-invariant mode, with ssmgen; the control is neither
    """

    name: str
    step: int
    eager: bool = False
    prefixes: bool = False
    proves: bool = True


SETTINGS = (
    Setting("pieces of 8192, graphs", 8192),  # the first one: its answers to single requests are compared with all others
    Setting("pieces of 2048, eager", 2048, eager=True),
    Setting("pieces of 256, graphs", 256),
    Setting("cached prefixes, graphs", 4096, prefixes=True),
    Setting("control: without ssmgen and mode", 8192, proves=False),
)


@dataclass(slots=True)
class Row:
    """The answers of one request, compared. what: "alone", a batch, or a cached prefix   compared, equal: answers

    tokens: answers with other tokens   worst: the largest difference of a log-probability that both have   cached: tokens from the cache
    """

    model: str
    setting: str
    what: str
    compared: int
    equal: int
    tokens: int = 0
    worst: float = 0.0
    cached: int | None = None

    def __str__(self) -> str:
        if self.compared == self.equal:
            found = "equal in every bit"
        else:
            found = f"{self.tokens} with other tokens; log-probabilities differ by up to {self.worst:.2g}"
        cached = "" if self.cached is None else f"; {self.cached} tokens from the cache"
        return f"| {self.model} | {self.setting} | {self.what} | {self.equal} of {self.compared} | {found}{cached} |"


HEAD = "| model | engine | request | equal | |\n|---|---|---|--:|---|"


@dataclass(slots=True)
class Proof:
    """A model's proof. rows: in the order of the requests   finished: all requests were made   settings: of its engines"""

    model: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    finished: bool = False
    settings: Sequence[Setting] = SETTINGS

    @property
    def problems(self) -> list[str]:
        """Why the proof does not hold, in words."""
        names = {setting.name: setting.proves for setting in self.settings}
        proving, control = ([row for row in self.rows if names[row.setting] is which] for which in (True, False))
        prefixes = [row for row in proving if row.cached is not None]
        found = [
            (not self.finished, "not all requests were made"),
            (not any(row.compared for row in proving), "nothing was compared"),
            (any(row.equal < row.compared for row in proving), "answers depend on the batch, pieces, the cache or graphs"),
            (
                control and all(row.equal == row.compared for row in control),
                "the control's answers are equal, too, so that this proves nothing",
            ),
            (prefixes and not all(row.cached for row in prefixes), "no prefix was taken from the cache"),
        ]
        return [*self.failures, *(words for wrong, words in found if wrong)]

    @property
    def verdict(self) -> str:
        return f"{self.model}: " + ("proved" if not self.problems else "; ".join(["NOT proved", *self.problems]))

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "proved": not self.problems, "problems": self.problems, "rows": [asdict(row) for row in self.rows]}


def compare(model: str, setting: str, what: str, want: dict[str, Any], got: dict[str, Any], cached: int | None = None) -> Row:
    """Compares the answers of `got` with those to the same needles in `want`. Bits of floats survive JSON."""
    row = Row(model, setting, what, len(got), sum(want[n] == answer for n, answer in got.items()), cached=cached)
    for n, answer in got.items():
        row.tokens += [step[0] for step in answer] != [step[0] for step in want[n]]
        for (a, best_a), (b, best_b) in zip(want[n], answer, strict=True):
            other = dict(map(tuple, best_b))
            row.worst = max([row.worst, *(abs(p - other[number]) for number, p in best_a if number in other)])
            if a != b:  # from here on, answers continue other texts
                break
    return row


def started(
    models: Iterable[str], folder: Path, engine: Callable[..., Engine], settings: Sequence[Setting] = SETTINGS
) -> dict[str, dict[Setting, Engine]]:  # fmt: skip
    """The processes of all proofs, which import the engine's package while others work."""
    return {
        model: {
            each: engine(f"proof-{model}-{i}", each.proves, folder, {"VLLM_BATCH_INVARIANT": "1"} if each.proves else {})
            for i, each in enumerate(settings)
        }
        for model in models
    }


def requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(words, method of the engine, arguments) in their order: first each needle alone."""
    common = {"lengths": NEEDLES, "tokens": TOKENS}
    yield "alone", "needles", {"batch": 0, "seed": 0, **common}
    for batch in BATCHES:
        for seed in range(ORDERS):
            yield f"in a batch of {batch}, order {seed + 1}", "needles", {"batch": batch, "seed": seed, **common}
    for blocks, words in BLOCKS.items():
        yield f"after {words}", "prefix", {"length": NEEDLES[-1], "blocks": blocks, "tokens": TOKENS}


def build(engine: Engine, setting: Setting, model: str) -> None:
    """Asks an engine to build itself."""
    engine.say(
        "build", model=model, layers=FEW, dtype="bfloat16", longest=LONGEST, compiled=False, graphs=GRAPHS, step=setting.step,
        eager=setting.eager, prefixes=setting.prefixes, wide=True, folder=str(engine.folder / "model"),
    )  # fmt: skip


def prove(
    model: str, engines: dict[Setting, Engine], until: float, tell: Callable[[Proof, Row | str], None],
    build: Callable[[Engine, Setting, str], None] = build,
) -> Proof:  # fmt: skip
    """Builds a model's engines and asks them. until: no request begins after this time   tell: gets each row, and words, at once

    build: asks an engine of a setting to build a model. Engines answer at the same time: nothing here is timed. An engine that fails ends
    alone, and the proof does not hold then.
    """
    settings = [*engines]
    proof, alone = Proof(model, settings=settings), dict[Setting, dict[str, Any]]()

    def attempt(setting: Setting, work: Callable[[Engine], Any]) -> Any:
        if setting not in engines:
            return None
        try:
            return work(engines[setting])
        except EngineError as e:
            proof.failures.append(f"{setting.name}: {e}")
            engines.pop(setting).end()
            return None

    def patience() -> float:
        return max(0.0, until - time.monotonic())

    def hear(engine: Engine) -> dict[str, Any]:
        return engine.hear(patience())

    try:
        for each in settings:
            attempt(each, lambda engine, each=each: build(engine, each, model))
        for each in settings:
            if (built := attempt(each, hear)) is not None:
                tell(proof, f"{model}, {each.name}: built in {built['seconds']:.1f} s")
        for words, method, arguments in requests():
            if not patience() or not engines:
                return proof
            asked = [each for each in settings if method == "needles" or each.prefixes]
            for each in asked:
                attempt(each, partial(Engine.say, do=method, **arguments))
            for each in asked:
                if (got := attempt(each, hear)) is not None:
                    _compared(proof, each, words, got, alone, tell)
        proof.finished = True
        return proof
    finally:
        tell(proof, proof.verdict)
        for engine in engines.values():
            engine.end()


def prove_all(
    models: Sequence[str], folder: Path, until: float, tell: Callable[[Proof, Row | str], None], start: Callable[..., Engine] = Engine,
    settings: Sequence[Setting] = SETTINGS, build: Callable[[Engine, Setting, str], None] = build,
) -> list[Proof]:  # fmt: skip
    """Proves one model after the other; the processes of all of them start at once. start: makes engines, like Engine"""
    engines = started(models, folder, start, settings)
    try:
        return [prove(model, engines[model], until, tell, build) for model in models]
    finally:
        for each in engines.values():
            for engine in each.values():
                engine.end()


def _compared(proof: Proof, setting: Setting, words: str, got: dict[str, Any], alone: dict[Any, Any], tell: Callable[..., None]) -> None:
    """Adds a row. The control is compared with itself, all others with the first engine's answers to single requests."""
    if words == "alone":
        alone[setting] = got["said"]
    first = proof.settings[0] if setting.proves else setting
    if first not in alone or (words == "alone" and setting is first):
        return
    proof.rows.append(compare(proof.model, setting.name, words, alone[first], got["said"], got.get("cached")))
    tell(proof, proof.rows[-1])


def table(proofs: Sequence[Proof]) -> str:
    """All rows in Markdown, and the verdicts."""
    return "\n".join([HEAD, *(str(row) for proof in proofs for row in proof.rows), "", *(proof.verdict for proof in proofs)])


assert set(PROVED) <= set(MODELS)
