"""The measurements as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from .run import Case, Pair

HEAD = """| model | | own, tokens/s | with ssmgen | | of single rounds | the GPU works, own | with ssmgen | it waits, own | with ssmgen |
|---|---|--:|--:|--:|---|--:|--:|--:|--:|"""
STEPS = """| model | sequences | | a step, ms | the shortest | the GPU works | its kernels | the CPU works |
|---|--:|---|--:|--:|--:|--:|--:|"""


def table(pairs: list[Pair]) -> str:
    """In Markdown: medians of rounds, their ratio, and the least and greatest ratio of a round. A missing measurement is a dash.

    The last columns are shares of the time, from a profile after the rounds: the GPU is busy, and it waits, which is the host's share.
    """
    return "\n".join([HEAD, *(row(pair, case) for pair in pairs for case in dict.fromkeys(case for case, _ in pair.rates))])


def row(pair: Pair, case: Case) -> str:
    """A case's line of the table."""
    own, ours = (pair.rates.get((case, with_ssmgen), []) for with_ssmgen in (False, True))
    ratios = [b / a for a, b in zip(own, ours, strict=False)]
    what = f"{case.batch} prompt{'s' * (case.batch > 1)} of {case.prompt}" if case.what == "prompts" else f"decode, {case.batch}"
    ratio = f"{median(ours) / median(own):.2f}" if ratios else "–"
    spread = f"{min(ratios):.2f} … {max(ratios):.2f}" if ratios else "–"
    works = [share(pair, case, with_ssmgen) for with_ssmgen in (False, True)]
    shares = [_percent(one) for one in works] + [_percent(None if one is None else 1 - one) for one in works]
    return f"| {pair.name} | {what} | {_rate(own)} | {_rate(ours)} | {ratio} | {spread} | {' | '.join(shares)} |"


def share(pair: Pair, case: Case, with_ssmgen: bool) -> float | None:
    """The part of a case's time in which the GPU is busy, at most 1; None if it was not profiled. The time is that of the rounds."""
    rates, (busy, _) = pair.rates.get((case, with_ssmgen)), pair.busy.get((case, with_ssmgen), (None, None))
    if not rates or busy is None:
        return None
    tokens = case.batch * case.prompt if case.what == "prompts" else case.batch
    return min(1.0, busy * median(rates) / tokens)


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.0f} %"


def steps(pairs: list[Pair]) -> str:
    """The time of decode steps, in Markdown, in ms: median and minimum over rounds, busy time of the GPU, and time of the CPU.

    If a step gets longer with equal busy time of the GPU, the host is the cause. A GPU busy for less than the step waited for the host.
    """
    lines = [STEPS]
    for pair in pairs:
        for (case, with_ssmgen), rates in pair.rates.items():
            if case.what != "decode":
                continue
            gpu, kernels = pair.busy.get((case, with_ssmgen), (None, None))
            times = [case.batch / rate for rate in rates]
            cells = [_ms(median(times)), _ms(min(times)), _ms(gpu), "–" if kernels is None else f"{kernels:.0f}"]
            who = "with ssmgen" if with_ssmgen else "own"
            lines.append(f"| {pair.model} | {case.batch} | {who} | {' | '.join(cells)} | {_ms(median(pair.cpu[case, with_ssmgen]))} |")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f}"


def _rate(rates: list[float]) -> str:
    return f"{median(rates):,.0f}".replace(",", " ") if rates else "–"


def answers(pairs: list[Pair]) -> str:
    """One line per pair: whether both engines gave the same tokens; then counted calls, and the functions that ssmgen left to vLLM."""
    lines = []
    for pair in pairs:
        lines.append(f"{pair.name}, {pair.dtype}: {pair.compared or 'not compared'}")
        left = [f"{place.rpartition('.')[2]} {what}" for place, what in pair.outcome.items() if what.startswith("kept")]
        counts = [f"{word}: {_calls(calls)}" for word, calls in (("served", pair.taken), ("refused", pair.refused)) if calls]
        lines += [f"  {text}" for text in (*counts, *left, *pair.warnings, *pair.failures)]
    return "\n".join(lines)


def _calls(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count} times" for name, count in sorted(calls.items()))


def as_dict(pairs: list[Pair], **about: Any) -> dict[str, Any]:
    """All results, with the rates of every round, and the fields of `about`."""
    return about | {
        "models": [
            {
                "model": pair.model, "dtype": pair.dtype, "layers": pair.layers, "failures": pair.failures, "outcome": dict(pair.outcome),
                "warnings": pair.warnings, "taken": dict(pair.taken), "refused": dict(pair.refused),
                "answers": pair.compared and pair.compared.as_dict(),
                "rates": [_rates(pair, case) for case in dict.fromkeys(case for case, _ in pair.rates)],
            }
            for pair in pairs
        ]
    }  # fmt: skip


def _rates(pair: Pair, case: Case) -> dict[str, Any]:
    sides = {"own": (case, False), "ssmgen": (case, True)}
    rates = {name: pair.rates.get(side, []) for name, side in sides.items()}
    rates |= {"gpu_share": {name: share(pair, *side) for name, side in sides.items()}}  # type: ignore[dict-item]
    return asdict(case) | rates | {"cpu": {name: pair.cpu.get(side, []) for name, side in sides.items()},
                                   "busy": {name: pair.busy.get(side) for name, side in sides.items()}}  # fmt: skip
