"""`python -m tools.report`: parses, writes, says where."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ssmgen.cache.store import shared_cache
from ssmgen.cli import Command
from ssmgen.cli.options import arch_option
from ssmgen.spec.kernel import Arch

from .write import write


@click.command(cls=Command)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--bench",
    "timings",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Output of `ssmgen bench … --json`; may repeat.",
)
@arch_option
@click.option("--jobs", type=click.IntRange(1), help="Parallel compilations. Default: one per processor.")
def report(folder: Path, timings: tuple[Path, ...], archs: list[Arch], jobs: int | None) -> None:
    """Write kernels as a folder of web pages: open its index.html. Needs no GPU, no server and no network.

    Shows the default variants and the variants timed by --bench: sources, PTX, SASS, occupancy, their calls, and any two side by side.
    """
    with click.progressbar(length=1, label="compiling", file=sys.stderr) as bar:

        def done(total: int) -> None:
            bar.length = total
            bar.update(1)

        count = write(folder, archs, timings, shared_cache(), jobs, done)
    click.echo(f"{count} variants in {folder / 'index.html'}")


if __name__ == "__main__":
    report(prog_name="python -m tools.report")
