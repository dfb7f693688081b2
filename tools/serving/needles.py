"""Prompts of the proof of batch invariance, and the part of an answer that is compared. Runs in the process of an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

LONGEST_OTHER = 2048  # tokens of prompts around the needles
Answer = list[Any]  # for each token: [its number, [[number, log-probability] of the best tokens]]


def prompt_of(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """A prompt without repetitions that depends on its length and a seed only."""
    numbers = random.Random(f"{length} {seed}")
    return [numbers.randrange(8, vocabulary - 8) for _ in range(length)]


def batch_of(lengths: Sequence[int], size: int, seed: int, vocabulary: int) -> tuple[list[list[int]], dict[int, int]]:
    """(prompts of a batch, {length of a needle: its place}). Needles are at random places among other prompts, of 1 to 2048 tokens.

    A batch that is too small for all needles has some of them, which change with the seed, and one other prompt at least.
    """
    numbers = random.Random(f"batch {size} {seed}")
    chosen = [lengths[(seed + i) % len(lengths)] for i in range(min(len(lengths), max(1, size - 1)))]
    needles: list[tuple[int, list[int]]] = [(n, prompt_of(n, vocabulary)) for n in chosen]
    others = [int(2 ** numbers.uniform(0, 11)) for _ in range(size - len(chosen))]
    mixed = needles + [(0, prompt_of(min(n, LONGEST_OTHER), vocabulary, 1 + i + 1000 * seed)) for i, n in enumerate(others)]
    numbers.shuffle(mixed)
    return [prompt for _, prompt in mixed], {n: i for i, (n, _) in enumerate(mixed) if n}


def said(answer: Any) -> Answer:
    """The tokens of an engine's answer, and the log-probabilities of the best tokens at each place, with all bits."""
    output = answer.outputs[0]
    best = [sorted([number, p.logprob] for number, p in step.items()) for step in output.logprobs]
    return [list(pair) for pair in zip(output.token_ids, best, strict=True)]


def of_batch(
    generate: Callable[..., Any], vocabulary: int, lengths: Sequence[int], batch: int, seed: int, tokens: int,
    said: Callable[[Any], Answer] = said,
) -> dict[str, Answer]:  # fmt: skip
    """{length: answer} of needles in a batch; batch 0: each needle alone. generate: as Server._generate   said: reads one of its answers"""
    if batch == 0:
        return {str(n): said(generate([prompt_of(n, vocabulary)], tokens, logprobs=5)[0]) for n in lengths}
    prompts, places = batch_of(lengths, batch, seed, vocabulary)
    answers = generate(prompts, tokens, logprobs=5)
    return {str(n): said(answers[i]) for n, i in places.items()}


def after_prefix(llm: Any, generate: Callable[..., Any], vocabulary: int, length: int, blocks: str, tokens: int) -> dict[str, Any]:
    """A needle whose first blocks another prompt has left in the cache. blocks: "one", "half" or "all"

    Returns {"said": {length: answer}, "cached": tokens that the engine took from the cache, "block": tokens of a block}.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine has not emptied its cache of prefixes")
    size = llm.llm_engine.vllm_config.cache_config.block_size
    needle = prompt_of(length, vocabulary)
    kept = {"one": 1, "half": max(1, length // size // 2), "all": length // size}[blocks] * size
    before = needle if blocks == "all" else needle[:kept] + prompt_of(size // 2, vocabulary, 7)
    generate([before], 1)
    (answer,) = generate([needle], tokens, logprobs=5)
    return {"said": {str(length): said(answer)}, "cached": answer.num_cached_tokens or 0, "block": size}
