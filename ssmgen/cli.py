"""The `ssmgen` command. Thin: each command parses, calls one function, prints."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from . import __version__
from .bench import LINEAR_ATTENTION
from .bench.command import bench
from .cache import Cache, collect_garbage, shared_cache, verify
from .errors import DriftError, ModelError, SsmgenError
from .kernels import OPERATOR_OF, OPERATORS, causal_conv1d, causal_conv1d_update, selective_state_update_tokens
from .kernels import replay_selective_state_update as replay_family
from .kernels.linear_attention_problem import Layout, Ring
from .spec import Arch, DType, Index, PoolMode
from .tune import table
from .tune.command import tune, tuned

CONVOLUTIONS = (causal_conv1d.OPERATOR, causal_conv1d_update.OPERATOR)
BUILT = [name for name in OPERATORS if name != selective_state_update_tokens.OPERATOR]  # which goes with selective_state_update
REPLAY, MAX_TOKENS = replay_family.OPERATOR, replay_family.MAX_TOKENS
PROMPT = 2048  # tokens of a sequence, where nothing is said
EXIT_FAILURE, EXIT_DRIFT = 1, 3  # click itself exits with 2 for a wrong command line


class Group(click.Group):
    """Turns the package's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DriftError as e:
            click.echo(str(e), err=True)
            sys.exit(EXIT_DRIFT)
        except SsmgenError as e:
            click.echo(f"{type(e).__name__}: {e}", err=True)
            sys.exit(EXIT_FAILURE)


@click.group(cls=Group, epilog="Exit codes: 0 done, 1 failed, 2 wrong command line, 3 generated files have drifted.")
@click.version_option(__version__)
def main() -> None:
    """Specialised CUDA decode kernels for state-space and linear-attention models."""


class ArchType(click.ParamType):
    name = "arch"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return [Arch.parse(text) for text in value.split(",")] if isinstance(value, str) else value
        except SsmgenError as e:
            self.fail(str(e), param, ctx)


def _names(enum: type) -> click.Choice:
    return click.Choice([member.value for member in enum])


arch_option = click.option("--arch", "archs", type=ArchType(), default="sm_90a", show_default=True, help="Targets, separated by commas.")
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
model_options = [
    click.option("--model", help="A model of `ssmgen models`."),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--state", "states", type=_names(DType), multiple=True, help="State dtype; may repeat. Default: the model's."),
    click.option("--io", type=_names(DType), default="bf16", show_default=True, help="Dtype of activations: not of state and f32 weights."),
    click.option("--index", "indices", type=_names(Index), multiple=True, help="Slot index type; may repeat. Default: none and i32."),
    click.option("--pool", "pools", type=_names(PoolMode), multiple=True, help="May repeat. Default: single."),
    click.option("--pdl/--no-pdl", default=None, help="Programmatic dependent launch. Default: both."),
    click.option("--tokens", type=click.IntRange(1), help="Per sequence and call; not of Mamba-1. Default: 1."),
    click.option("--intermediates", is_flag=True, help="Keep the state after each token."),
    click.option("--no-update", is_flag=True, help="Leave the pool's state as it is."),
    click.option("--layout", type=_names(Layout), help="Order of the state's last two axes. This to --layers: not of Mamba. Default: vk."),
    click.option("--ring", type=_names(Ring), help="store: keep the tokens' inputs; commit: replay them. Default: none."),
    click.option("--layers", is_flag=True, help="A commit of several layers at once."),
    click.option("--replay", type=click.IntRange(1, MAX_TOKENS), help="Of Mamba-2, also steps of so many tokens that are replayed."),
    click.option("--window", type=click.IntRange(1, MAX_TOKENS), help="With --replay: a ring for so many tokens. Default: of one step."),
]


def with_model(command: Any) -> Any:
    for option in reversed(model_options):
        command = option(command)
    return command


def _problems(
    name: str, operator: str | None, tp: int, states: Any, io: str, indices: Any, pools: Any, replay: Any, window: Any, **more: Any
) -> list[Any]:
    """What a model asks of an operator, or of all that it uses, under the options of `with_model`."""
    from .models import LinearAttention, find_model

    model = find_model(name).divided(tp)
    slots, activations = tuple(map(Index, indices)) or (Index.NONE, Index.I32), DType(io)
    if replay is None and (window or operator == REPLAY):
        raise click.UsageError("--window goes with --replay" if window else f"--replay says how many tokens a step of {REPLAY} has")
    replays = model.replays(tuple(map(DType, states)), slots, activations, replay, window) if replay else []
    if operator == REPLAY:
        return replays
    if operator not in (None, model.operator, *CONVOLUTIONS):
        return []
    call = {option: value for option, value in more.items() if value}
    several = () if model.kind == "mamba1" else ("tokens", "intermediates", "no_update")
    taken = more.keys() if isinstance(model, LinearAttention) else several
    if refused := call.keys() - (("tokens",) if operator in CONVOLUTIONS else taken):
        options = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(refused))
        raise click.UsageError(f"{operator or model.function} of {name} does not take {options}")
    convolutions = model.convolutions(slots, activations, call.get("tokens", 1))
    found = [p for p in convolutions if operator in (None, OPERATOR_OF[type(p)])]
    if operator not in (None, model.operator):
        return found
    call |= {option: enum(call[option]) for option, enum in (("layout", Layout), ("ring", Ring)) if option in call}
    if call.pop("no_update", False):
        call["update_state"] = False
    pooled = tuple(map(PoolMode, pools)) or (PoolMode.SINGLE,)
    found += [] if operator else replays
    return model.problems(states=tuple(map(DType, states)), indices=slots, pools=pooled, io=activations, **call) + found


@main.command()
@with_model
@click.option("--all", "everything", is_flag=True, help="Every model of `ssmgen models`, undivided.")
@click.option("--op", type=click.Choice(BUILT), help="Only this operator's variants. Default: all that the model uses.")
@click.option("--spec", "specs", multiple=True, help="A variant by its text or name; may repeat.")
@arch_option
@click.option("--max-batch", type=click.IntRange(1), default=1024, show_default=True, help="Build what batches up to this use.")
@click.option("--max-spill", type=click.IntRange(0), default=0, show_default=True, help="Spilled bytes to accept per variant.")
@click.option("--jobs", type=click.IntRange(1), help="Parallel compilations. Default: one per processor.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write a cache layer here instead of to the user's cache.")
@json_option
def build(model, pdl, everything, op, specs, archs, max_batch, max_spill, jobs, out, as_json, **call) -> None:
    """Compile kernels ahead of time. Needs no GPU.

    The directory written by --out can be shipped, and named in SSMGEN_CACHE_PATH.
    """
    from .build import build as run
    from .build import specs_for
    from .inspect import resolve
    from .models import find_model, models

    if sum(map(bool, (model, everything, specs))) != 1:
        raise click.UsageError("give one of --model, --all and --spec")
    if op and specs:
        raise click.UsageError("--op goes with --model and --all")
    if model and call["replay"] and find_model(model).kind != "mamba2":
        raise click.UsageError(f"{model} is no Mamba-2, and --replay is for that")
    cache = Cache(out.resolve()) if out else shared_cache()
    if out:
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = list(models()) if everything else [model] if model else []
    wanted = (True, False) if pdl is None else (pdl,)
    work = [(resolve(text, cache), arch) for text in specs for arch in archs]
    for name in names:
        problems = _problems(name, op, **call)
        work += [(s, arch) for arch in archs for s in specs_for(problems, arch, wanted, max_batch, (None, *table.gpus(arch)))]

    if not work:
        raise ModelError(f"{model} does not use {op}")

    start = time.perf_counter()
    with click.progressbar(length=len(set(work)), label="building", file=sys.stderr, hidden=as_json) as bar:
        results = run(work, cache, jobs, max_spill, lambda _: bar.update(1))
    seconds = time.perf_counter() - start
    failed = [b for b in results if b.error]
    if as_json:
        rows = [
            {"spec": str(b.spec), "name": b.spec.name, "arch": str(b.arch), "hit": b.hit, "error": b.error and str(b.error)}
            | ({"resources": asdict(b.entry.resources), "seconds": b.entry.seconds, "key": b.entry.key} if b.entry else {})
            for b in results
        ]
        click.echo(json.dumps({"seconds": seconds, "variants": rows}, indent=1))
    else:
        for b in failed:
            click.echo(f"{type(b.error).__name__}: {b.error}\n", err=True)
        built = [b.entry for b in results if b.entry]
        fresh = [b.entry.seconds for b in results if b.entry and not b.hit]
        click.echo(
            f"{len(results)} variants in {seconds:.2f} s: {len(fresh)} compiled"
            + (f" ({sum(fresh) / len(fresh):.3f} s each, {max(fresh):.3f} at most)" if fresh else "")
            + f", {len(results) - len(fresh) - len(failed)} found, {len(failed)} failed"
        )
        if built:
            click.echo(f"registers {min(e.resources.registers for e in built)} … {max(e.resources.registers for e in built)}, "
                       f"spilled bytes at most {max(e.resources.spills for e in built)}")  # fmt: skip
    if failed:
        sys.exit(EXIT_FAILURE)


@main.command("list")
@json_option
def list_variants(as_json: bool) -> None:
    """List the default variants and those in the cache."""
    from .generate import default_variants

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


@main.command()
@click.argument("spec")
@click.option("--cu", "form", flag_value="cu", default=True, help="CUDA source (the default).")
@click.option("--ptx", "form", flag_value="ptx")
@click.option("--sass", "form", flag_value="sass", help="Needs nvdisasm.")
@click.option("--stats", "form", flag_value="stats", help="Registers, memory, spills, occupancy; with nvdisasm, what the SASS does.")
@arch_option
@json_option
def show(spec: str, form: str, archs: list[Arch], as_json: bool) -> None:
    """Print a variant, given by its text, its name or a part of it."""
    from . import inspect

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


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--ptx", "form", flag_value="ptx")
@click.option("--sass", "form", flag_value="sass")
@click.option("--cu", "form", flag_value="cu", default=True)
@arch_option
def diff(a: str, b: str, form: str, archs: list[Arch]) -> None:
    """Compare two variants. Exits with 1 when they differ."""
    from . import inspect

    cache = shared_cache()
    specs = [inspect.resolve(text, cache) for text in (a, b)]
    texts = [inspect.comparable(inspect.text_of(spec, form, archs[0], cache), form, spec).splitlines() for spec in specs]
    lines = list(difflib.unified_diff(*texts, fromfile=a, tofile=b, lineterm=""))
    if lines:
        _print_code("\n".join(lines), "diff")
    sys.exit(1 if lines else 0)


@main.command()
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

    The default variants and those that --bench timed: sources, PTX, SASS, occupancy, which calls are given them, any two side by side.
    """
    from .site.write import write

    with click.progressbar(length=1, label="compiling", file=sys.stderr) as bar:

        def done(total: int) -> None:
            bar.length = total
            bar.update(1)

        count = write(folder, archs, timings, shared_cache(), jobs, done)
    click.echo(f"{count} variants in {folder / 'index.html'}")


@main.command()
@click.argument("specs", nargs=-1, required=True)
@click.option("--batch", type=click.IntRange(1), default=3, show_default=True)
@arch_option
def check(specs: tuple[str, ...], batch: int, archs: list[Arch]) -> None:
    """Run variants on this CPU, in the emulator, against the float64 reference. Needs g++ and no GPU."""
    from .emulator.check import check as run
    from .inspect import resolve

    failed = 0
    for spec in [resolve(text, shared_cache()) for text in specs]:  # all names first: a wrong one should not cost the others' time
        outcome = run(spec, archs[0], batch)
        failed += not outcome.passed
        word = "ok    " if outcome.passed else "WRONG "
        click.echo(
            f"{word} {spec.name}: {outcome.blocks} blocks, state error {outcome.state_error:.1e}, output error {outcome.out_error:.1e}"
        )
    sys.exit(EXIT_FAILURE if failed else 0)


@main.command()
@click.argument("op", type=click.Choice(["selective_state_update", *LINEAR_ATTENTION, *CONVOLUTIONS, REPLAY]))
@with_model
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--gpu", help="Whose measured choices to look at, such as 'NVIDIA H200'. Default: this machine's, if it is of --arch.")
@arch_option
@json_option
def explain(op, model, tp, pdl, batch, gpu, archs, as_json, **call) -> None:
    """Say which variant serves a model at a batch size, by which rule, and why the others do not.

    causal_conv1d: for prompts of --tokens, 2048 if that is not given.
    """
    from . import registry, runtime
    from .models import find_model

    if not model:
        raise click.UsageError("give --model")
    known = find_model(model).divided(tp)
    if op not in (known.function, *CONVOLUTIONS, REPLAY):
        raise ModelError(f"{model} is decoded by {known.function}, not by {op}")
    if op in CONVOLUTIONS and not known.conv_channels:
        raise ModelError(f"{model} has no short convolution")
    if op == REPLAY and known.kind != "mamba2":
        raise ModelError(f"{model} is no Mamba-2, and {op} is for that")
    operator, size = (op if op in (*CONVOLUTIONS, REPLAY) else known.operator), batch
    if op == causal_conv1d.OPERATOR:
        size = -(-batch * (call["tokens"] or PROMPT) * known.conv_channels * DType(call["io"]).size // 1024)
    problems = _problems(model, operator, tp, **call)
    here = dict.fromkeys(archs, gpu) if gpu else {arch: runtime.name_of_gpu(arch) for arch in archs}
    found = [registry.explain(OPERATOR_OF[type(p)], p, size, arch, pdl is not False, here[arch]) for arch in archs for p in problems]
    if as_json:
        click.echo(json.dumps([e.as_dict() for e in found], indent=1))
    else:
        click.echo("\n\n".join(map(str, found)))


@main.command()
@json_option
def models(as_json: bool) -> None:
    """List the models whose shapes are known."""
    from .models import models as known

    if as_json:
        rows = [
            {k: getattr(v, "value", v) for k, v in asdict(m).items()} | {"function": m.function, "conv_channels": m.conv_channels}
            for m in known().values()
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(f"{'model':28} {'kind':16} {'heads':>5} {'headdim, V':>11} {'d_state, K':>11} {'groups, key heads':>18}  state")
    for m in known().values():
        note = "" if m.verified else "  (unverified)"
        rows, elements, groups = m.shape
        click.echo(f"{m.name:28} {m.kind:16} {m.nheads:5} {rows:11} {elements:11} {groups:18}  {m.state.value}{note}")


@main.group()
def cache() -> None:
    """Look after the compiled kernels."""


@cache.command("path")
def cache_path() -> None:
    """Print the directories in the order in which they are searched."""
    for layer in shared_cache().layers:
        click.echo(layer.root)


@cache.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List the entries."""
    rows = [
        {"path": str(path), "bytes": path.stat().st_size, "name": e.symbol, "arch": e.arch, "compiler": e.compiler, "spec": e.spec}
        for layer in shared_cache().layers
        for path, e in layer.entries()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        click.echo(f"{row['arch']:8} {row['bytes']:8} {row['compiler'].split()[-1]:10} {row['name']}")


@cache.command("verify")
def cache_verify() -> None:
    """Check every entry's digest and key. Exits with 1 when one is damaged; it will be replaced when it is needed."""
    wrong = [item for layer in shared_cache().layers for item in verify(layer)]
    for path, reason in wrong:
        click.echo(f"{path}: {reason}")
    click.echo(f"{len(wrong)} damaged", err=True)
    sys.exit(EXIT_FAILURE if wrong else 0)


@cache.command("gc")
@click.option("--max-mib", type=click.FloatRange(0), default=256, show_default=True, help="Keep at most this much.")
def cache_gc(max_mib: float) -> None:
    """Remove damaged entries, leftovers of dead processes, and the oldest entries beyond --max-mib."""
    _remove(int(max_mib * 2**20))


@cache.command("clear")
def cache_clear() -> None:
    """Remove every entry of the writable cache."""
    _remove(0)


def _remove(max_bytes: int) -> None:
    layer = shared_cache().writable
    removed, freed = collect_garbage(layer, max_bytes) if layer else (0, 0)
    click.echo(f"removed {removed} files, {freed / 2**20:.1f} MiB")


@main.command()
@json_option
def env(as_json: bool) -> None:
    """Print what matters for a bug report."""
    from .environment import describe

    facts = describe()
    click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(f"{k:18} {v}" for k, v in facts.items()))


@main.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 3 when a file would change.")
@click.option("--dir", "root", type=click.Path(file_okay=False, path_type=Path), default="generated", show_default=True)
def generate(check: bool, root: Path) -> None:
    """Write generated/: the default variants as text, with ssmgen.lock. Run in a checkout."""
    from . import generate as generated

    if check:
        count, note = generated.check(root)
        click.echo(f"{count} variants are as generated" + (f"; {note}" if note else ""))
    else:
        click.echo(f"{generated.write(root)} variants written to {root}")


main.add_command(bench)
main.add_command(tune)
main.add_command(tuned)


if __name__ == "__main__":
    main()
