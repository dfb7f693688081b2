"""`ssmgen bench`: a command per operator, whose options are the arguments of its benchmark's `run`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import click

from ..families.causal_conv1d.spec import MAX_WIDTH, ConvLayout
from ..families.replay_selective_state_update.spec import MAX_TOKENS
from ..spec import DType, PoolMode
from . import LAYERS, LINEAR_ATTENTION, home

Option = Callable[[Any], Any]


@click.group()
def bench() -> None:
    """Time an operator against a copy of as many bytes and against every peer that can be imported. Needs a GPU.

    `ssmgen bench OPERATOR --help` shows what can be varied; `all` times all of them; `render` makes tables and pages of saved results,
    without a GPU. A case whose result is wrong is not timed: the others are, it is named at the end, and the exit code is 1.
    """


class Choice(click.Choice):
    """Of an enum's values; gives its members."""

    def __init__(self, enum: type[Enum]):
        super().__init__([member.value for member in enum])
        self.enum = enum

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if isinstance(value, self.enum) else self.enum(super().convert(value, param, ctx))


class Shape(click.ParamType):
    """Sizes of at least 1, written like `example`."""

    def __init__(self, name: str = "B,D,L", example: str = "1,1536,2048"):
        self.name, self.example = name, example

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            sizes = tuple(map(int, value.split(","))) if isinstance(value, str) else value
        except ValueError:
            sizes = ()
        count = self.example.count(",") + 1
        if len(sizes) != count or min(sizes) < 1:
            self.fail(f"{value!r} is not {('two', 'three', 'four')[count - 2]} positive numbers such as {self.example}", param, ctx)
        return sizes


def together(command: Any, *options: Option) -> Any:
    """The command with these options, shown in this order."""
    for option in reversed(options):
        command = option(command)
    return command


NO_PEERS = click.option("--no-peers", is_flag=True, help="Do not time other packages.")
OUTPUTS = (
    click.option("--json", "as_json", is_flag=True, help="Print all that was measured, for `ssmgen bench render` and for scripts."),
    click.option("--csv", "as_csv", is_flag=True, help="Print a flat row per case."),
    click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page of tables and plots here."),
)


def with_outputs(command: Any) -> Any:
    return together(command, *OUTPUTS)


def _form(as_json: bool, as_csv: bool, page: Path | None) -> str:
    """The form of output that is asked for."""
    chosen = [name for name, given in (("json", as_json), ("csv", as_csv), ("html", page)) if given]
    if len(chosen) > 1:
        raise click.UsageError(f"give one of {', '.join(f'--{name}' for name in chosen)}")
    if page and not page.parent.is_dir():
        raise click.UsageError(f"--html: there is no directory {page.parent}")
    return chosen[0] if chosen else "table"


def add(name: str, *options: Option, **fixed: Any) -> None:
    """The command that calls `run` of an operator's module with what the options say, and prints its results."""

    def command(rounds: int, no_peers: bool, as_json: bool, as_csv: bool, page: Path | None, **chosen: Any) -> None:
        from .formats import check, show
        from .progress import watching
        from .suite import Suite

        module, form = home(name), _form(as_json, as_csv, page)
        chosen |= fixed
        if wrong := getattr(module, "mistakes", lambda **_: [])(**chosen):
            raise click.UsageError("; ".join(wrong))
        with watching() as watch:
            suite = Suite([module.run(**chosen, rounds=rounds, peers=not no_peers, watch=watch)])
        show(suite, form, alone=True, page=page)
        check(suite)

    rounds = click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
    bench.command(name, help=f"Time {name}.")(together(command, *options, rounds, NO_PEERS, with_outputs))


@bench.command("all")
@click.option("--quick", is_flag=True, help="Few batches and shapes, and three rounds.")
@click.option("--model", help="Only what a model of `ssmgen models` uses, in its shapes.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks, with --model.")
@click.option("--rounds", type=click.IntRange(1), help="Default: 7, or 3 with --quick.")
@NO_PEERS
@with_outputs
def every(quick, model, tp, rounds, no_peers, as_json, as_csv, page) -> None:
    """Time every operator, in its benchmark's default cases.

    An operator whose benchmark fails does not stop the others. It is named at the end, and the exit code is 1.
    """
    from . import suite as suites
    from .formats import check, show
    from .progress import watching

    form = _form(as_json, as_csv, page)
    if tp > 1 and not model:
        raise click.UsageError("--tp goes with --model")
    work = suites.tasks(quick, model, tp)
    with watching() as watch:
        suite = suites.run(work, rounds or (suites.QUICK_ROUNDS if quick else 7), not no_peers, watch)
    show(suite, form, page=page)
    check(suite)


@bench.command("render")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@with_outputs
def render(files, as_json, as_csv, page) -> None:
    """Show results that --json printed into FILES, plain or .json.gz: as a table, or as the options say. Needs no GPU."""
    from .formats import load, show

    form = _form(as_json, as_csv, page)
    show(load(files), form, page=page)


def several(flag: str, name: str, kind: Any, **how: Any) -> Option:
    """An option that may repeat."""
    return click.option(flag, name, type=kind, multiple=True, **how)


batches = several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1 … 256, or 1, 8, 32, 128.")
states = several("--state", "states", Choice(DType), help="State dtype; may repeat. Default: the model's or operator's.")
tokens = several("--tokens", "tokens", click.IntRange(1), help="Per sequence; may repeat. Default: 1.")

add(
    "selective_state_update",
    several("--model", "names", str, help="May repeat. Default: those of docs/performance.md."),
    states,
    batches,
    tokens,
    click.option("--intermediates/--no-intermediates", default=None, help="Keep every token's state. Default: if there are several."),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks."),
)

for op in LINEAR_ATTENTION:
    add(
        op,
        states,
        batches,
        tokens,
        click.option("--intermediates/--no-intermediates", default=None, help="Keep every token's state. Default: if there are several."),
        click.option("--ring", is_flag=True, help="Keep the tokens' inputs instead, and time the commit of all of them too."),
        several("--pool-mode", "pools", Choice(PoolMode), help="May repeat. Default: single."),
        click.option("--heads", type=click.IntRange(1), help="Default: 64 for gated_delta_rule, else 32."),
        click.option("--key-heads", type=click.IntRange(1), help="Default: 16 for gated_delta_rule, else as many as heads."),
        click.option("--dim", type=click.IntRange(4, 1024), help="Key channels per head. Default: 128."),
        click.option("--value-dim", type=click.IntRange(1, 1024), help="Value channels per head. Default: as many."),
        op=op,
    )

add(
    "replay_selective_state_update",
    several("--state", "states", Choice(DType), help="State dtype; may repeat. Default: bf16."),
    several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1, 8, 64, 256."),
    several("--tokens", "tokens", click.IntRange(1, MAX_TOKENS), help="Per sequence; may repeat. Default: 6."),
    several("--accepted", "accepted", click.IntRange(0, MAX_TOKENS), help="Tokens of the history that count; may repeat. Default: 3."),
    several("--window", "windows", click.IntRange(0, MAX_TOKENS), help="Of a ring; 0: one step's history. May repeat. Default: 0, 16."),
    several("--writing", "writing", click.FloatRange(0, 1), help="Share of steps on a ring that write; may repeat. Default: 0."),
    click.option("--shape", type=Shape("H,P,N,G", "16,64,128,1"), default="16,64,128,1", show_default=True),
    click.option("--rounding", is_flag=True, help="Round the state stochastically."),
    click.option("--precision", type=click.Choice(["f32", "bf16x2", "bf16"]), default="f32", show_default=True, help="Of our products."),
    click.option("--with-conv1d", is_flag=True, help="Behind the update of the convolution of x, B and C, in one graph."),
    click.option("--two-kernels/--one-kernel", default=None, help="Default: both."),
    click.option("--external-pdl/--no-external-pdl", default=None, help="Of the first kernel, and the convolution. Default: both."),
    click.option("--internal-pdl/--no-internal-pdl", default=None, help="Of the second of two kernels. Default: both."),
)

convolution = (
    click.option("--width", type=click.IntRange(2, MAX_WIDTH), default=4, show_default=True),
    click.option("--dtype", type=Choice(DType), default=DType.BF16.value, show_default=True, help="Of x, and of all else."),
)

add(
    "causal_conv1d",
    several(
        "--shape", "shapes", Shape("B,D,L", "1,1536,2048"), help="Batch, channels, tokens; may repeat. Default: six, from 6 to 800 MB of x."
    ),
    several("--layout", "layouts", Choice(ConvLayout), help="Which axis of x is contiguous; may repeat. Default: both."),
    several("--form", "forms", click.Choice(["plain", "odd", "varlen", "seq_idx", "states"]), help="May repeat. Default: plain."),
    *convolution,
)

add(
    "causal_conv1d_update",
    batches,
    several("--tokens", "tokens", click.IntRange(1), help="Per sequence; may repeat. Several: the window rolls. Default: 1."),
    several("--state-layout", "layouts", click.Choice(["window", "channels"]), help="What is contiguous; may repeat. Default: both."),
    click.option("--dim", type=click.IntRange(1), default=12288, show_default=True),
    *convolution,
)

add(
    "combine_splits",
    several("--shape", "shapes", Shape("R,S", "128,16"), help="Rows, splits; may repeat. Default: ten, from 16,2 to 16384,32."),
    several("--d-v", "widths", click.IntRange(4, 1024), help="May repeat. Default: 128, 512."),
    several("--form", "forms", click.Choice(["dense", "prefix", "pair"]), help="May repeat. Default: dense, prefix."),
    several("--dtype", "dtypes", Choice(DType), help="Of partial results; may repeat. Default: f32, bf16, of which peers have the second."),
    click.option("--hot/--cold", "hot", default=None, help="Whether what is read is in the L2 cache. Default: both, where it fits."),
)

add(
    "gated_rms_norm",
    several("--form", "forms", click.Choice(["mamba2", "gdn", "kda"]), help="Of which layer; may repeat. Default: all."),
    several(
        "--shape", "shapes", Shape("G,N", "32,128"), help="Groups in a row, and their size; may repeat. Default: one or two of each form."
    ),
    several("--rows", "rows", click.IntRange(1), help="May repeat. Default: 1 … 4096."),
    several("--dtype", "dtypes", Choice(DType), help="May repeat. Default: bf16."),
    click.option("--hot/--cold", "hot", default=None, help="Whether what is read is in the L2 cache. Default: both, where it fits."),
)

for op in LAYERS:
    add(
        op,
        several("--model", "names", str, help="May repeat. Default: two of those that have such layers."),
        several("--state", "states", Choice(DType), help="State dtype; may repeat. Default: bf16, f32."),
        several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1 … 64, 256."),
        tokens,
        click.option("--intermediates/--no-intermediates", default=None, help="Keep every token's. Default: if there are several."),
        click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks."),
        op=op,
    )
