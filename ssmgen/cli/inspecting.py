"""Looking at variants: list, show, diff, check, explain."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from typing import Any

import click

from ..bench import benchmarks
from ..cache.store import shared_cache
from ..select.catalog import OPERATOR_OF
from ..spec.kernel import Arch
from .options import EXIT_FAILURE, arch_option, device_arch_option, json_option, pdl_choices, problems_of, wanted_of, with_model


@click.command("list")
@json_option
def list_variants(as_json: bool) -> None:
    """List the default variants and the cached ones.

    Columns: architecture; default; cached; name, for `ssmgen show`, `check`, `diff` and --spec.
    """
    from ..variants.generate import default_variants

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for spec, arch in default_variants():
        rows[spec.name, str(arch)] = {"name": spec.name, "arch": str(arch), "spec": str(spec), "default": True, "cached": None}
    for layer in shared_cache().layers:
        for _, e in layer.entries():
            row = rows.setdefault((e.symbol, e.arch), {"name": e.symbol, "arch": e.arch, "spec": e.spec, "default": False})
            row["cached"] = str(layer.root)
    if as_json:
        click.echo(json.dumps(list(rows.values()), indent=1))
        return
    for row in sorted(rows.values(), key=lambda r: (r["arch"], r["name"])):
        click.echo(f"{row['arch']:8} {'default' if row['default'] else '':8}{'cached' if row['cached'] else '':7} {row['name']}")


@click.command()
@click.argument("spec")
@click.option("--cu", "form", flag_value="cu", default=True, help="CUDA source (the default).")
@click.option("--ptx", "form", flag_value="ptx")
@click.option("--sass", "form", flag_value="sass", help="SASS; needs nvdisasm.")
@click.option(
    "--stats", "form", flag_value="stats", help="Registers, memory, spills, occupancy; with nvdisasm, instruction counts of the SASS."
)
@arch_option
@json_option
def show(spec: str, form: str, archs: list[Arch], as_json: bool) -> None:
    """Print a variant as CUDA, PTX, SASS or statistics.

    SPEC is the variant's text, its name or a part of its name."""
    from ..variants import inspect

    cache = shared_cache()
    found = inspect.resolve(spec, cache)
    if form != "stats":
        _print_code(inspect.text_of(found, form, archs[0], cache), form)
        return
    stats = inspect.stats(found, archs[0], cache)
    click.echo(json.dumps(stats, indent=1) if as_json else "\n".join(f"{k:22} {v}" for k, v in stats.items()))


def _print_code(text: str, form: str) -> None:
    """Coloured in a terminal, and page by page if it is longer than that."""
    if not sys.stdout.isatty():
        click.echo(text)
        return
    from . import highlight

    shown = highlight.for_terminal(text, form) if highlight.wanted() else text
    if text.count("\n") < shutil.get_terminal_size().lines:
        click.echo(shown)
    else:
        click.echo_via_pager(shown)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--ptx", "form", flag_value="ptx")
@click.option("--sass", "form", flag_value="sass")
@click.option("--cu", "form", flag_value="cu", default=True)
@arch_option
def diff(a: str, b: str, form: str, archs: list[Arch]) -> None:
    """Compare two variants; exits with 1 if they differ."""
    from ..variants import inspect

    cache = shared_cache()
    specs = [inspect.resolve(text, cache) for text in (a, b)]
    before, after = (inspect.comparable(inspect.text_of(spec, form, archs[0], cache), form, spec).splitlines() for spec in specs)
    lines = list(difflib.unified_diff(before, after, fromfile=a, tofile=b, lineterm=""))
    if lines:
        _print_code("\n".join(lines), "diff")
    sys.exit(1 if lines else 0)


@click.command()
@click.argument("specs", nargs=-1, required=True)
@click.option("--batch", type=click.IntRange(1), default=3, show_default=True)
@arch_option
def check(specs: tuple[str, ...], batch: int, archs: list[Arch]) -> None:
    """Check variants in the CPU emulator against the reference.

    Compares with float64 results. Needs g++ and no GPU."""
    from ..emulator.check import check as run
    from ..variants.inspect import resolve

    failed = 0
    for spec in [resolve(text, shared_cache()) for text in specs]:  # all names first: a wrong one should not cost the others' time
        outcome = run(spec, archs[0], batch)
        failed += not outcome.passed
        word = "ok    " if outcome.passed else "WRONG "
        click.echo(
            f"{word} {spec.name}: {outcome.blocks} blocks, state error {outcome.state_error:.1e}, output error {outcome.out_error:.1e}"
        )
        for words in outcome.wrong:
            click.echo(f"       {words}")
    sys.exit(EXIT_FAILURE if failed else 0)


@click.command()
@click.argument("op", type=click.Choice(list(benchmarks())))
@with_model
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--gpu", help="Use the tuned table of this GPU, such as 'NVIDIA H200'. Default: this machine's GPU, if it is of --arch.")
@device_arch_option
@json_option
def explain(
    op: str, model: str, tp: int, pdl: str, no_pdl: bool, batch: int, gpu: str | None, archs: list[Arch], as_json: bool, **call: Any
) -> None:
    """Print which variant serves a model, and why.

    Names the rule that chose it, and the reason why each other rule did not apply.

    --tokens is the prompt's length for operators over prompts. Default: 2048.
    """
    from ..launch import runtime
    from ..select import registry
    from ..select.models import ask_for, find_model

    if not model:
        raise click.UsageError("give --model")
    known = find_model(model).divided(tp)
    ask = ask_for(known, op)
    size = ask.size(known, wanted_of(**call)[0], batch)
    problems = problems_of(model, ask.operator, tp, **call)
    here = dict.fromkeys(archs, gpu) if gpu else {arch: runtime.name_of_gpu(arch) for arch in archs}
    asked = [(arch, overlaps, p) for arch in archs for overlaps in pdl_choices(pdl, no_pdl) for p in problems]
    found = [registry.explain(OPERATOR_OF[type(p)], p, size, arch, overlaps, here[arch]) for arch, overlaps, p in asked]
    if as_json:
        click.echo(json.dumps([e.as_dict() for e in found], indent=1))
    else:
        click.echo("\n\n".join(map(str, found)))
