"""The `ssmgen` command. Thin: each command parses, calls one function, prints."""

from __future__ import annotations

import sys
from typing import Any

import click

from .. import __version__
from ..bench.command import bench
from ..errors import DriftError, SsmgenError
from ..tune.command import tune, tuned
from . import building, inspecting
from .caching import cache
from .options import EXIT_DRIFT, EXIT_FAILURE


class Command(click.Command):
    """A command that turns the package's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DriftError as e:
            click.echo(str(e), err=True)
            sys.exit(EXIT_DRIFT)
        except SsmgenError as e:
            click.echo(f"{type(e).__name__}: {e}", err=True)
            sys.exit(EXIT_FAILURE)


class Group(Command, click.Group):
    """`ssmgen`, which turns the errors of its commands too."""


@click.group(cls=Group, epilog="Exit codes: 0 done, 1 failed, 2 wrong command line, 3 generated files are out of date.")
@click.version_option(__version__)
def main() -> None:
    """CUDA kernels for state-space and linear-attention models: prompts and decode steps."""


COMMANDS = (
    building.build, building.generate, building.models, building.env,
    inspecting.list_variants, inspecting.show, inspecting.diff, inspecting.check, inspecting.explain,
    bench, tune, tuned, cache,
)  # fmt: skip
for command in COMMANDS:
    main.add_command(command)
