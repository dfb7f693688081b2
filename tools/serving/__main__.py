"""`python -m tools.serving`: parses, measures, prints."""

from __future__ import annotations

import json
import tempfile
import time
from importlib import metadata
from math import inf
from pathlib import Path

import click

from ssmgen.cli import Command

from .models import MODELS, TIMED
from .proof import Proof, Row, prove_all
from .proof import table as proof_table
from .report import HEAD, answers, as_dict, row, steps, table
from .run import Case, Options, Pair, pairs_of, run

DTYPES = ("bfloat16", "float16", "float32")
# With --limit, seconds kept for the proofs: to start their processes, and for each model; and for the profiles before them.
PROOFS, EACH, WATCHES = 20, 90, 45
ONE_ROUND = 90  # to build the timed engines and to run each case once


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
@click.option("--linear", is_flag=True, help="Both engines have the plugin, one with linear layers by ssmgen: what those gain.")
@click.option("--narrow", is_flag=True, help="The engine with ssmgen has f16 states, rounded with noise: what fewer bytes gain.")
@click.option("--apart", is_flag=True, help="Build timed engines when the others have ended: later, and with less memory.")
@click.option("--prove", "proved", type=click.Choice(MODELS), multiple=True, help="To prove batch invariance of; may repeat.")
@click.option("--limit", type=click.FloatRange(60), help="Seconds for all of it: timing gets what the proofs leave. Default: none.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="For the engines' logs. Default: a temporary one.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all that was measured here.")
def serving(models, answered, batches, file, folder, proved, limit, **given) -> None:
    """vLLM with and without ssmgen: tokens a second of prompts and of decode steps, and whether greedy tokens are equal.

    Needs a GPU and vLLM 0.33. Builds two engines for each model, with random weights, as wide as a public one and with fewer layers;
    nothing is downloaded. All are built at once. Then one at a time has the GPU: each tunes its Triton kernels again, and rounds follow
    in which engines with and without ssmgen take turns. Last, torch's profiler says how long the GPU works. With --prove, engines in
    vLLM's batch-invariant mode follow, which must give the same bits for a request alone, in batches, in pieces, after cached prefixes,
    and with and without CUDA graphs; vLLM alone, without the mode, must not. Each line is printed when it is known, and the JSON
    file is written again. An engine that fails does not stop the others. Its output is printed, and the exit code is 1.
    """
    begin, timed, proved = time.monotonic(), tuple(model for model in models or TIMED if model != "none"), tuple(dict.fromkeys(proved))
    if given["narrow"] and (wide := [model for model in MODELS if model in {*timed, *dict(answered)} and not MODELS[model].narrow]):
        raise click.UsageError(f"--narrow is given with {', '.join(wide)}; expected models whose states vLLM keeps in f16")
    if limit is not None:
        rest = limit - (PROOFS + EACH * len(proved) if proved else 0)
        if timed and rest < (least := WATCHES + ONE_ROUND):
            problem = f"--limit {limit:.0f} leaves {rest:.0f} s to timing; expected {limit - rest + least:.0f} or more, or --model none"
            raise click.UsageError(problem)
        seconds, patience = min(given["seconds"], rest - WATCHES), min(given["patience"], max(rest - WATCHES, 1))
        given |= {"limit": rest, "seconds": seconds, "patience": patience}
    options = Options(timed=tuple(dict.fromkeys(timed)), answered=answered, batches=tuple(sorted(set(batches) or {1, 8, 64, 256})), **given)
    pairs, proofs = pairs_of(options), dict[str, Proof]()

    def keep() -> None:
        if file:
            about = {"vllm": metadata.version("vllm"), "options": str(options), "proofs": [each.as_dict() for each in proofs.values()]}
            whole = file.with_name(f"{file.name}.part")
            whole.write_text(json.dumps(as_dict(pairs, **about), indent=1), encoding="utf-8")
            whole.replace(file)  # a run that is cut leaves a whole file

    def tell_case(pair: Pair, case: Case) -> None:
        click.echo(row(pair, case))
        keep()

    def tell_proof(proof: Proof, found: Row | str) -> None:
        proofs[proof.model] = proof
        click.echo(str(found), err=isinstance(found, str))
        keep()

    until = inf if limit is None else begin + limit
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        try:
            click.echo(HEAD)
            run(pairs, options, place, lambda text: click.echo(text, err=True), tell_case=tell_case)
            prove_all(proved, place, until, tell_proof)
        finally:  # partial results of an interrupted run
            keep()
            click.echo(answers(pairs))
            click.echo(table(pairs))
            click.echo(steps(pairs))
            if proofs:
                click.echo(proof_table(list(proofs.values())))
    if any(pair.failures for pair in pairs) or len(proofs) < len(proved) or any(each.problems for each in proofs.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    serving()
