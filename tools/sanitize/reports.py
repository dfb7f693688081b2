"""The result of one run of compute-sanitizer, in a line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ENDED = re.compile(r"^ran \S+ (\S+)$", re.MULTILINE)
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
NOTHING = re.compile(r"^0 (?:errors|hazards displayed \(0 errors, 0 warnings\))$")
PLACE = re.compile(r"\b(\w+)\+0x[0-9a-f]+ in ssmgen\.cu:(\d+)")
PAIRS = re.compile(r"\[(\d+) hazards?\]")


@dataclass(frozen=True)
class Row:
    """One case under one tool. digest: of its output, empty if it did not end; log: all printed text."""

    case: str
    tool: str
    verdict: str
    seconds: float
    digest: str
    log: str

    @property
    def clean(self) -> bool:
        return self.verdict == "nothing"

    def __str__(self) -> str:
        return f"{self.tool:9}  {self.seconds:6.1f} s  {self.verdict:44}  {self.digest:16}  {self.case}"


def row(case: str, tool: str, log: str, code: int | None, seconds: float) -> Row:
    """code: the process's exit code, None where it was ended at its limit of time."""
    ended, summary = ENDED.search(log), SUMMARY.findall(log)
    digest = ended[1] if ended else ""
    if code is None:
        verdict = "did not end" + (", but the kernels had" if ended else "")
    elif summary and not NOTHING.match(summary[-1]):
        pairs = [*map(int, PAIRS.findall(log))]
        verdict = summary[-1].replace(" displayed", "") + (f": {sum(pairs)} of {len(pairs)} pairs" if pairs else "")
    elif code or not ended or (tool != "none" and not summary):
        last = [line for line in log.splitlines() if line.strip("= ")][-1:]
        verdict = f"failed, exit code {code}: {''.join(last)[:100]}"
    else:
        verdict = "nothing"
    return Row(case, tool, verdict, seconds, digest, log)


def located(log: str, texts: Mapping[str, str]) -> str:
    """The lines that a log names, of kernels' texts by name."""
    places = sorted({(kernel, int(line)) for kernel, line in PLACE.findall(log) if kernel in texts})
    return "".join(f"{kernel}:{line}: {texts[kernel].splitlines()[line - 1].strip()}\n" for kernel, line in places)
