"""What was measured, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from .run import Case, Pair

HEAD = """| model | | own, tokens/s | with ssmgen | | of single rounds |
|---|---|--:|--:|--:|---|"""


def table(pairs: list[Pair]) -> str:
    """In Markdown: medians of rounds, their ratio, and the least and greatest ratio of a round. What was not measured is a dash."""
    lines = [HEAD]
    for pair in pairs:
        for case in dict.fromkeys(case for case, _ in pair.rates):
            own, ours = (pair.rates.get((case, with_ssmgen), []) for with_ssmgen in (False, True))
            ratios = [b / a for a, b in zip(own, ours, strict=False)]
            what = f"{case.batch} prompt{'s' * (case.batch > 1)} of {case.prompt}" if case.what == "prompts" else f"decode, {case.batch}"
            ratio = f"{median(ours) / median(own):.2f}" if ratios else "–"
            spread = f"{min(ratios):.2f} … {max(ratios):.2f}" if ratios else "–"
            lines.append(f"| {pair.model}, {pair.layers} layers | {what} | {_rate(own)} | {_rate(ours)} | {ratio} | {spread} |")
    return "\n".join(lines)


def _rate(rates: list[float]) -> str:
    return f"{median(rates):,.0f}".replace(",", " ") if rates else "–"


def answers(pairs: list[Pair]) -> str:
    """A line a pair: whether both gave the same tokens, and what ssmgen left to vLLM."""
    lines = []
    for pair in pairs:
        lines.append(f"{pair.model} {pair.dtype}, {pair.layers} layers: {pair.compared or 'not compared'}")
        left = [f"{place.rpartition('.')[2]} {what}" for place, what in pair.outcome.items() if what.startswith("kept")]
        lines += [f"  {text}" for text in (*left, *pair.warnings, *pair.failures)]
    return "\n".join(lines)


def as_dict(pairs: list[Pair], **about: Any) -> dict[str, Any]:
    """All of it, rates of every round included; what `about` says beside."""
    return about | {
        "models": [
            {
                "model": pair.model, "dtype": pair.dtype, "layers": pair.layers, "failures": pair.failures, "outcome": dict(pair.outcome),
                "warnings": pair.warnings, "answers": pair.compared and pair.compared.as_dict(),
                "rates": [_rates(pair, case) for case in dict.fromkeys(case for case, _ in pair.rates)],
            }
            for pair in pairs
        ]
    }  # fmt: skip


def _rates(pair: Pair, case: Case) -> dict[str, Any]:
    return asdict(case) | {"own": pair.rates.get((case, False), []), "ssmgen": pair.rates.get((case, True), [])}
