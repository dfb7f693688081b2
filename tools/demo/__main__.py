"""`python -m tools.demo`: parses, measures, prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ssmgen.bench.progress import watching
from ssmgen.cli import Command

from . import ops
from . import run as demonstration
from .measure import Options
from .presets import chosen
from .table import as_markdown, kernel_lists, print_table


@click.command(cls=Command)
@click.option("--model", "names", multiple=True, help="A family of transformers, such as mamba2; may repeat. Default: all that are known.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help="May repeat. Default: 1 and 64; of prompts, 1.")
@click.option("--prompt", "prompts", type=click.IntRange(1), multiple=True, help="Measure prompts of so many tokens instead; may repeat.")
@click.option("--layers", type=click.IntRange(1), default=8, show_default=True, help="Of each model; at least one of each kind it has.")
@click.option("--tokens", type=click.IntRange(2), default=16, show_default=True, help="Steps per round, and tokens that are compared.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--longest", type=click.FloatRange(0), default=3.0, show_default=True, help="Seconds that transformers' own prompt may take.")
@click.option("--kernels", is_flag=True, help="Of patched prompts, list kernels by name, with launches and time; in the JSON too.")
@click.option("--ops", "launches", is_flag=True, help="List the launches of an accelerated model's token, by kind of layer.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was measured here.")
@click.option("--markdown", is_flag=True, help="Print the table in Markdown, as is done where the output is no terminal.")
def demo(names, batches, prompts, layers, tokens, rounds, longest, kernels, launches, file, markdown) -> None:
    """Decode with models of Hugging Face transformers: as they are, patched, and patched in a CUDA graph.

    Needs a GPU, except for --ops. Builds a model of each family with random weights, as wide as a public one and with fewer layers; nothing
    is downloaded. Shows milliseconds and kernels per token, and that greedy generation in f32 gives the same tokens; with --prompt,
    milliseconds, kernels and memory to the first token after a prompt. If mamba-ssm, causal-conv1d or flash-linear-attention are installed,
    transformers is also timed with them. A family that fails does not stop the others. It is named at the end, and the exit code is 1.
    """
    if file and not file.parent.is_dir():
        raise click.UsageError(f"--json: there is no directory {file.parent}")
    if kernels and not prompts:
        raise click.UsageError("--kernels is of prompts: name a length with --prompt")
    demonstration.need_transformers()
    presets = chosen(names)
    if launches:
        if prompts or file or kernels:
            raise click.UsageError("--ops lists one token of decoding; remove --prompt, --kernels and --json")
        demonstration.quiet()
        for batch in tuple(dict.fromkeys(batches)) or (1,):
            for text in ops.listings(presets, layers, batch):
                click.echo(text)
        return
    demonstration.need_device()
    demonstration.quiet()
    lengths = tuple(dict.fromkeys(prompts))
    options = Options(layers=layers, tokens=tokens, rounds=rounds, prompts=lengths, by_kernel=kernels, longest=longest)
    sizes = tuple(dict.fromkeys(batches)) or ((1,) if prompts else (1, 64))
    with watching() as watch:
        report = demonstration.run(presets, sizes, options, watch)
    if file:
        file.write_text(json.dumps(report.as_dict(), indent=1), encoding="utf-8")
    if markdown or not sys.stdout.isatty():
        click.echo(as_markdown(report))
    else:
        print_table(report)
    for text in kernel_lists(report):
        click.echo(text)
    report.check()


if __name__ == "__main__":
    demo(prog_name="python -m tools.demo")
