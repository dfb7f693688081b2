"""`ssmgen cache`."""

from __future__ import annotations

import json
import sys

import click

from ..cache import collect_garbage, shared_cache, verify
from .options import EXIT_FAILURE, json_option


@click.group()
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
