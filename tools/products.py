"""Times every linear layer of the demonstration's models and cuBLAS, the worst ratio first: python -m tools.products [--json FILE]

The models of transformers have the width of public ones (presets.toml), and are built on the meta device. Layers that `accelerate` leaves
alone are not timed. Heads have public vocabularies. The benchmark of skinny_linear times each shape, with weights that come from memory.
A ratio is ssmgen's time over cuBLAS's. The exit code is 1 if a ratio is above 1 or missing. Ctrl-C shows the results so far.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from ssmgen.bench import bench_of
from ssmgen.bench.progress import watching
from ssmgen.bench.report import Interrupted
from ssmgen.cli import Command
from ssmgen.compat.hf.linears import objection

from .demo.presets import Preset, chosen, presets

ROWS = (1, 2, 4, 8, 16)
FEW = 4  # layers of a model; more if it has more kinds of layers
HEADS = ((32768, 4096), (65024, 4096), (131072, 4096), (248320, 2048), (248320, 5120))  # vocabulary x hidden size
Shape = tuple[int, int]


def shapes_of(preset: Preset) -> dict[Shape, list[str]]:
    """{(N, K): names of its layers}, without the head, whose vocabulary is not the public one."""
    model: Any = preset.build(FEW, torch.bfloat16, "meta")
    head = model.get_output_embeddings()
    found: dict[Shape, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head and not objection(module):
            names = found.setdefault((module.out_features, module.in_features), [])
            if (last := name.rpartition(".")[2]) not in names:
                names.append(last)
    return found


def shapes(given: Iterable[Preset]) -> dict[Shape, list[str]]:
    """{(N, K): its layers, in words}, the smallest first. Presets that the installed transformers lacks are left out."""
    found: dict[Shape, list[str]] = {}
    for preset in given:
        for shape, names in shapes_of(preset).items():
            found.setdefault(shape, []).append(f"{preset.like} {', '.join(names)}")
    for shape in HEADS:
        found.setdefault(shape, []).append("head")
    return dict(sorted(found.items(), key=lambda item: item[0][0] * item[0][1]))


def load(path: Path) -> dict[str, Any]:
    """A report of --json, compressed or not."""
    data = path.read_bytes()
    report: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return report


def ratio(row: Mapping[str, Any]) -> float | None:
    """ssmgen's time over cuBLAS's; None if that was not timed."""
    theirs = row["us"].get("cublas")
    return None if theirs is None else row["served_us"] / theirs


def table(report: Mapping[str, Any], words: Mapping[Shape, Sequence[str]]) -> list[str]:
    """A line per shape, the worst ratio first: us, and the ratio in brackets, for each number of rows."""
    rows = list(dict.fromkeys(row["rows"] for row in report["rows"]))
    cells: dict[Shape, dict[int, Mapping[str, Any]]] = {}
    for row in report["rows"]:
        cells.setdefault(tuple(row["shape"]), {})[row["rows"]] = row
    lines = ["| N x K |" + "".join(f" rows: {n}, us |" for n in rows) + " layers |", "|---|" + "---:|" * len(rows) + "---|"]
    for shape, found in sorted(cells.items(), key=lambda item: -max((ratio(row) or 0 for row in item[1].values()), default=0)):
        told = [_cell(found.get(n)) for n in rows]
        lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(told)} | {'; '.join(words.get(shape, ()))} |")
    return lines


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    found = ratio(row)
    return f"{row['served_us']:.2f}" + ("" if found is None else f" ({found:.2f})")


def losses(report: Mapping[str, Any]) -> list[str]:
    """Every case in which cuBLAS is faster, in words, the worst first; and before them every case without a time of cuBLAS."""
    alone = [f"{_words(row)}: cuBLAS was not timed" for row in report["rows"] if ratio(row) is None]
    lost = [(found, row) for row in report["rows"] if (found := ratio(row)) is not None and found > 1]
    lost.sort(key=lambda item: -item[0])
    return alone + [f"{_words(row)}: {found:.3f} of cuBLAS's time" for found, row in lost]


def _words(row: Mapping[str, Any]) -> str:
    return f"{row['shape'][0]} x {row['shape'][1]}, {row['rows']} rows"


@click.command(cls=Command, help=__doc__)
@click.option("--model", "names", multiple=True, help=f"A family, or several. Default: all of {', '.join(presets())}.")
@click.option("--rows", type=click.IntRange(1, 16), multiple=True, default=ROWS, show_default=True, help="Of x; may repeat.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--list", "only_listed", is_flag=True, help="Only list the shapes. Needs no GPU.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
@click.option(
    "--saved", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Print this file's report instead: JSON, or its .gz."
)
def products(names: tuple[str, ...], rows: tuple[int, ...], rounds: int, only_listed: bool, file: Path | None, saved: Path | None) -> None:
    words = shapes(chosen(names))
    if saved:
        click.echo("\n".join(table(load(saved), words)))
        return
    if only_listed:
        for (n, k), who in words.items():
            click.echo(f"{n} x {k}: {'; '.join(who)}")
        return
    with watching() as watch:
        try:
            report = bench_of("skinny_linear").run(shapes=tuple(words), rows=rows, rounds=rounds, watch=watch)
        except Interrupted as e:
            report = e.report
    if file:
        file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    click.echo("\n".join(table(report, words)))
    lost = losses(report)
    click.echo("\n".join([*(f"not timed: {case}" for case in report["failed"]), *lost]))
    raise SystemExit(1 if lost or report["failed"] else 0)


if __name__ == "__main__":
    products()
