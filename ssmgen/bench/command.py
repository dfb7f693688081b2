"""`ssmgen bench`: a command per operator, whose options are the arguments of its benchmark's `run`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from . import bench_of, benchmarks

Command = TypeVar("Command", bound=Callable[..., object])


class Benches(click.Group):
    """A group with a command for each benchmark beside its own. A benchmark's options stand in its module, which imports torch: the
    command is made when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [*benchmarks(), *super().list_commands(context)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return _command(name) if name in benchmarks() else super().get_command(context, name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        own = [(name, self.commands[name].get_short_help_str()) for name in super().list_commands(context)]
        with formatter.section("Commands"):
            formatter.write_dl([*((name, f"Time {name}.") for name in benchmarks()), *own])


@click.group(cls=Benches)
def bench() -> None:
    """Time operators, a copy of the same bytes and every installed peer.

    Needs a GPU.

    `ssmgen bench OPERATOR --help` lists an operator's options. `all` times all operators, `models` the shapes of every model. `render`
    shows saved results, without a GPU. A case with a wrong result is not timed: it is named at the end, and the exit code is 1.
    """


NO_PEERS = click.option("--no-peers", is_flag=True, help="Do not time other packages.")
OUTPUTS = (
    click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON, for `ssmgen bench render` and scripts."),
    click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per case."),
    click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page of tables and plots to this file."),
)


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """The command with these options, shown in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def with_outputs(command: Command) -> Command:
    return with_options(command, *OUTPUTS)


def _form(as_json: bool, as_csv: bool, page: Path | None) -> str:
    """The form of output that is asked for."""
    chosen = [name for name, given in (("json", as_json), ("csv", as_csv), ("html", page)) if given]
    if len(chosen) > 1:
        raise click.UsageError(f"expected only one of {', '.join(f'--{name}' for name in chosen)}")
    if page and not page.parent.is_dir():
        raise click.UsageError(f"--html is in {page.parent}, which does not exist; expected a directory")
    return chosen[0] if chosen else "table"


@functools.cache
def _command(name: str) -> click.Command:
    """The command that calls `run` of a benchmark with the values of the options, and prints its results."""

    benchmark = bench_of(name)

    def command(rounds: int, no_peers: bool, as_json: bool, as_csv: bool, page: Path | None, **chosen: Any) -> None:
        from .formats import check, show
        from .progress import watching
        from .report import Interrupted
        from .suite import Suite

        form = _form(as_json, as_csv, page)
        if wrong := benchmark.mistakes(**chosen):
            raise click.UsageError("; ".join(wrong))
        with watching() as watch:
            try:
                found = benchmark.run(**chosen, rounds=rounds, peers=not no_peers, watch=watch)
            except Interrupted as e:
                found = e.report
        suite = Suite([found])
        show(suite, form, alone=True, page=page)
        check(suite)

    rounds = click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds of measurements.")
    return click.command(name, help=f"Time {name}.\n\nCtrl-C ends the run and shows the results so far.")(
        with_options(command, *(axis.option for axis in benchmark.axes), rounds, NO_PEERS, *OUTPUTS)
    )


@bench.command("all")
@click.option("--quick", is_flag=True, help="Time few batches and shapes, in three rounds.")
@click.option("--model", help="Time only the operators of this model of `ssmgen models`, in its shapes.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Number of tensor-parallel ranks, with --model.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of measurements. Default: 7, or 3 with --quick.")
@NO_PEERS
@with_outputs
def every(
    quick: bool, model: str | None, tp: int, rounds: int | None, no_peers: bool, as_json: bool, as_csv: bool, page: Path | None
) -> None:
    """Time every operator in its default cases.

    An operator whose benchmark fails does not stop the others. It is named at the end, and the exit code is 1.
    """
    from . import suite as suites
    from .formats import check, show
    from .progress import watching

    form = _form(as_json, as_csv, page)
    if tp > 1 and not model:
        raise click.UsageError("--tp is given without --model; expected both")
    work = suites.tasks(quick, model, tp)
    with watching() as watch:
        suite = suites.run(work, rounds or (suites.QUICK_ROUNDS if quick else 7), not no_peers, watch)
    show(suite, form, page=page)
    check(suite)


@bench.command("models")
@click.option("--model", "names", multiple=True, help="Time only this model of `ssmgen models`; may repeat.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    type=click.Choice(["step_1", "step_64", "prompt", "packed"]),
    help="Time only this case; may repeat.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of measurements.")
@click.option(
    "--jobs", type=click.IntRange(0), default=8, show_default=True, help="Number of processes that compile the peers' kernels in advance."
)
@click.option(
    "--saved", type=click.Path(path_type=Path), help="Show the results in this file, saved with --json, plain or .json.gz. Needs no GPU."
)
@NO_PEERS
@with_outputs
def models(
    names: tuple[str, ...], columns: tuple[str, ...], rounds: int, jobs: int, saved: Path | None, no_peers: bool, as_json: bool,
    as_csv: bool, page: Path | None,
) -> None:  # fmt: skip
    """Time every model and its peers.

    Times decode steps and prompts. The worst ratio comes first.

    Decode steps of 1 and of 64 sequences, a prompt of 4096 tokens, and 16 packed prompts of 256. Models of one shape are timed once.
    Ctrl-C ends the run and shows the results so far.
    """
    from . import models as work
    from . import models_page
    from .progress import watching

    form = _form(as_json, as_csv, page)
    if saved and (names or columns or no_peers):
        raise click.UsageError("--saved measures nothing. Leave out --model, --column and --no-peers.")
    if saved:
        report = models_page.load(saved)
    else:
        from .peers_ahead import compiling
        from .report import need_device

        need_device()
        ahead = compiling(names, columns, 0 if no_peers else jobs)
        with watching() as watch:
            report = work.run(names, columns=columns, rounds=rounds, peers=not no_peers, watch=watch, ahead=ahead)
    models_page.show(report, form, page)


@bench.command("render")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@with_outputs
def render(files: tuple[Path, ...], as_json: bool, as_csv: bool, page: Path | None) -> None:
    """Show results saved with --json.

    FILES are plain or .json.gz. Prints a table, or the form of the options. Needs no GPU."""
    from .formats import load, show

    form = _form(as_json, as_csv, page)
    show(load(files), form, page=page)
