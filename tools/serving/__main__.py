"""`python -m tools.serving`: parses, measures, prints."""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from pathlib import Path

import click

from ssmgen.cli import Command

from .models import MODELS, TIMED
from .report import answers, as_dict, steps, table
from .run import Options, pairs_of, run

DTYPES = ("bfloat16", "float16", "float32")


def _answered(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(one.partition(":")[::2]) for one in given]
    if unknown := [one for one, (model, dtype) in zip(given, pairs, strict=True) if model not in MODELS or dtype not in DTYPES]:
        raise click.BadParameter(f"{', '.join(unknown)}: it is MODEL:DTYPE, of {', '.join(MODELS)} and {', '.join(DTYPES)}")
    return tuple(dict.fromkeys(pairs))  # type: ignore[arg-type]


@click.command(cls=Command)
@click.option(
    "--model", "models", type=click.Choice([*MODELS, "none"]), multiple=True, help=f"To time; may repeat. Default: {' '.join(TIMED)}."
)
@click.option(
    "--answers", "answered", multiple=True, callback=_answered, metavar="MODEL:DTYPE", help="To compare answers of only; may repeat."
)
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help="May repeat. Default: 1, 8, 64 and 256.")
@click.option("--prompt", type=click.IntRange(32), default=2048, show_default=True, help="Tokens of a prompt; fewer where there are many.")
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Of decode, behind prompts of 16 tokens.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--layers", type=click.IntRange(0), default=0, help="Of each timed model. Default: 12 to 20, so that all engines find room in 140 GiB."
)
@click.option("--seconds", type=float, default=600, show_default=True, help="After these no further round begins.")
@click.option("--patience", type=float, default=300, show_default=True, help="Seconds until engines must be ready.")
@click.option("--compiled", is_flag=True, help="With torch.compile, as vLLM does unless told otherwise; takes minutes more.")
@click.option("--apart", is_flag=True, help="Build timed engines when the others have ended: later, and with less memory.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="For the engines' logs. Default: a temporary one.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was measured here.")
def serving(models, answered, batches, file, folder, **given) -> None:
    """vLLM with and without ssmgen: tokens a second of prompts and of decode steps, and whether greedy tokens are equal.

    Needs a GPU and vLLM 0.33. Builds two engines for each model, with random weights, as wide as a public one and with fewer layers;
    nothing is downloaded. All are built at once. Then one at a time has the GPU: each tunes its Triton kernels again, and rounds follow
    in which engines with and without ssmgen take turns. Last, torch's profiler says how long the GPU works in decode steps. An engine
    that fails does not stop the others. Its output is printed, and the exit code is 1.
    """
    timed = tuple(model for model in models or TIMED if model != "none")
    options = Options(timed=tuple(dict.fromkeys(timed)), answered=answered, batches=tuple(sorted(set(batches) or {1, 8, 64, 256})), **given)
    pairs = pairs_of(options)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            run(pairs, options, folder or Path(temporary), lambda text: click.echo(text, err=True))
        finally:  # partial results of an interrupted run
            if file:
                file.write_text(json.dumps(as_dict(pairs, vllm=metadata.version("vllm"), options=str(options)), indent=1), encoding="utf-8")
            click.echo(answers(pairs))
            click.echo(table(pairs))
            click.echo(steps(pairs))
    if any(pair.failures for pair in pairs):
        raise SystemExit(1)


if __name__ == "__main__":
    serving()
