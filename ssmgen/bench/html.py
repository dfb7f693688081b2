"""The page of a suite: one file without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import charts
from .charts import Curve
from .rows import Failure, Row, by_case, failures_of, op_of, peers_of, rows_of
from .suite import Suite

TEMPLATE = "page.html.j2"
OURS = ("ours", "circle")
THEIRS = [("peer0", "square"), ("peer1", "triangle"), ("peer2", "diamond"), ("peer3", "circle")]  # by appearance; a fifth starts over


@dataclass(frozen=True)
class Panel:
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Case:
    words: str
    rows: Sequence[Row]
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Section:
    """An operator's part of the page. Several reports of one operator share it, if they are of one machine and of different cases."""

    name: str  # of the operator, with a number if that has several sections
    op: str
    where: str  # device and date, if the page is of several machines or has several sections of the operator
    methods: Sequence[str]
    rows: Sequence[Row]
    cases: Sequence[Case]
    peers: Sequence[str]
    overview: Sequence[Panel]
    failures: Sequence[Failure]

    def span(self, name: str, peer: str | None = None) -> tuple[float, float] | None:
        """The minimum and the maximum of one number over rows, or over a peer's rows."""
        of = [row.peers.get(peer) if peer else row for row in self.rows]
        values = [v for v in (getattr(found, name) for found in of if found is not None) if v is not None]
        return (min(values), max(values)) if values else None


def as_html(suite: Suite) -> str:
    marks = {peer: THEIRS[i % len(THEIRS)] for i, peer in enumerate(peers_of(row for r in suite.reports for row in rows_of(r)))}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"MARKS": charts.MARKS, "OURS": OURS}
    heads, sections = _heads(suite.reports), _sections(suite, marks)
    failed = any(section.failures for section in sections)
    return environment.get_template(TEMPLATE).render(heads=heads, sections=sections, marks=marks, peers=list(marks), any_failed=failed)


def _machine(report: Mapping[str, Any]) -> tuple[str, ...]:
    return report["device"], report["torch"], report["compiler"], report.get("ssmgen", "")


def _heads(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The lines that say where and when was measured: once for all reports that agree on it."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for report in reports:
        found.setdefault(_machine(report), []).append(report)
    heads = []
    for (device, torch, compiler, version), group in found.items():
        dates = sorted(r["date"] for r in group if "date" in r)
        facts = {"device": device, "torch": torch, "NVRTC": compiler, "ssmgen": version}
        facts["measured"] = " … ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""
        for name in group[0]["ceilings_tbs"]:
            values = [r["ceilings_tbs"][name] for r in group]
            words = " … ".join(dict.fromkeys(f"{v:.2f}" for v in (min(values), max(values))))
            facts[f"ceiling, {name.replace('_', ' ')}"] = f"{words} TB/s"
        heads.append({name: value for name, value in facts.items() if value})
    return heads


def _groups(reports: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Reports that share a section. A curve has one point per size: a repeated case or another machine starts a new section."""
    groups: list[list[Mapping[str, Any]]] = []
    for report in reports:
        alike = [g for g in groups if (op_of(g[0]), _machine(g[0])) == (op_of(report), _machine(report))]
        fitting = [g for g in alike if all(_points(report).isdisjoint(_points(other)) for other in g)]
        if fitting:
            fitting[-1].append(report)
        else:
            groups.append([report])
    return groups


def _sections(suite: Suite, marks: Mapping[str, tuple[str, str]]) -> list[Section]:
    """A section for each report, in their order; then one for each operator that made none."""
    groups = [(op_of(group[0]), group) for group in _groups(suite.reports)]
    groups += [(op, []) for op in dict.fromkeys(entry["op"] for entry in suite.failed) if op not in dict(groups)]
    ops, machines = [op for op, _ in groups], set(map(_machine, suite.reports))
    count: Counter[str] = Counter()
    sections = []
    for op, group in groups:
        count[op] += 1
        failures = [failure for report in group for failure in failures_of(report)]
        if count[op] == 1:
            failures += [Failure(op, "", "", "", entry["error"]) for entry in suite.failed if entry["op"] == op]
        several = group and (len(machines) > 1 or ops.count(op) > 1)
        where = ", ".join(filter(None, (group[0]["device"], group[0].get("date")))) if several else ""
        sections.append(_section(op if count[op] == 1 else f"{op}-{count[op]}", op, where, group, failures, marks))
    return sections


def _points(report: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(row.case, row.size) for row in rows_of(report)}


def _section(name: str, op: str, where: str, reports: Sequence[Any], failures: Sequence[Failure], marks: Mapping[str, Any]) -> Section:
    rows = [row for report in reports for row in rows_of(report)]
    return Section(
        name=name,
        op=op,
        where=where,
        methods=list(dict.fromkeys(report["method"] for report in reports if "method" in report)),
        rows=rows,
        cases=[Case(words, group, _panels(group, marks)) for words, group in by_case(rows).items()],
        peers=peers_of(rows),
        overview=_overview(rows, marks) if rows else [],
        failures=failures,
    )


def _panels(rows: Sequence[Row], marks: Mapping[str, tuple[str, str]]) -> list[Panel]:
    """Share of the ceiling, where there is one, and time; over the sizes of one case."""
    labels, over = [row.size for row in rows], rows[0].size_of
    peers = peers_of(rows)
    panels = []
    if all(row.share is not None for row in rows):
        lines = [Curve(peer, *marks[peer], [_share(row, peer) for row in rows]) for peer in peers]
        lines.append(Curve("ssmgen", *OURS, [row.share for row in rows]))
        axis = charts.share_axis([v for line in lines for v in line.values if v is not None])
        caption = f"share of the ceiling, over {over}"
        panels.append(Panel(caption, charts.curves(f"{rows[0].case}: {caption}", labels, lines, axis, percent=True)))
    lines = [Curve(row.copy, "copy", None, [r.copy_us for r in rows]) for row in rows[:1] if row.copy]
    lines += [Curve(peer, *marks[peer], [row.peers[peer].us if peer in row.peers else None for row in rows]) for peer in peers]
    lines.append(Curve("ssmgen", *OURS, [row.us for row in rows]))
    axis = charts.log_axis([v for line in lines for v in line.values if v is not None])
    caption = f"us per call, over {over}"
    return [*panels, Panel(caption, charts.curves(f"{rows[0].case}: {caption}", labels, lines, axis))]


def _share(row: Row, peer: str) -> float | None:
    """A peer moves the same bytes, in its time."""
    assert row.share is not None
    return row.share * row.peers[peer].ratio if peer in row.peers else None


def _overview(rows: Sequence[Row], marks: Mapping[str, tuple[str, str]]) -> list[Panel]:
    """The host time of a call, and the time to compile."""
    panels = []
    times = [(row.host_us, row.host_bound_us) for row in rows if row.host_us is not None and row.host_bound_us is not None]
    timed = [row for row in rows if row.host_us is not None and row.host_bound_us is not None]
    if timed:
        calls = {"ssmgen": [eager for eager, _ in times], "ssmgen, bound": [bound for _, bound in times]}
        styles = {"ssmgen": "ours", "ssmgen, bound": "ours"}
        for peer in peers_of(timed):
            theirs = [row.peers[peer].host_us for row in timed if peer in row.peers]
            if values := [us for us in theirs if us is not None]:
                calls[peer], styles[peer] = values, marks[peer][0]
        caption = "host us per eager call: median and range of the cases"
        panels.append(Panel(caption, charts.bars(caption, list(calls), list(styles.values()), list(calls.values()))))
    seconds = list({row.spec: row.compile_s for row in rows}.values())
    caption = f"compiling, s: {len(seconds)} variants, median {statistics.median(seconds):.2f}, at most {max(seconds):.2f}"
    return [*panels, Panel(caption, charts.strip(caption, seconds, "s"))]
