"""`ssmgen cache`."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import click

from ..cache.layer import STALE_SECONDS
from ..cache.process_lock import sweep
from ..cache.store import shared_cache
from ..cache.upkeep import collect_garbage, verify
from ..errors import CacheError
from .options import EXIT_FAILURE, json_option


@click.group()
def cache() -> None:
    """Look after the compiled kernels."""


@cache.command("path")
def cache_path() -> None:
    """Print the directories in the order in which they are searched."""
    for layer in shared_cache().layers:
        click.echo(_shown(layer.root))


@cache.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List the entries that can be used."""
    rows: list[dict[str, Any]] = [
        {"path": str(path), "bytes": len(e.to_bytes()), "name": e.symbol, "arch": e.arch, "compiler": e.compiler, "spec": e.spec}
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
    """Check every entry's digest and key, and who may write it. Exits with 1 when one cannot be used; it is replaced when it is needed."""
    wrong = [item for layer in shared_cache().layers for item in verify(layer)]
    for path, reason in wrong:
        click.echo(_shown(f"{path}: {reason}"))
    click.echo(f"{len(wrong)} damaged", err=True)
    sys.exit(EXIT_FAILURE if wrong else 0)


def _number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is no size")
    return value


@cache.command("gc")
@click.option(
    "--max-mib", type=click.FloatRange(0), callback=_number, default=256, show_default=True, help="Keep at most this much; inf for all."
)
def cache_gc(max_mib: float) -> None:
    """Remove damaged entries, leftovers of dead processes, and the oldest entries beyond --max-mib."""
    _remove(max_mib * 2**20, STALE_SECONDS)


@cache.command("clear")
def cache_clear() -> None:
    """Remove every entry of the writable cache, and what processes left that died."""
    _remove(0, -math.inf)


def _remove(max_bytes: float, stale_seconds: float) -> None:
    layer = shared_cache().writable
    if layer is None:
        raise CacheError("the cache", "has no directory that this user may write; nothing was removed")
    locks = sweep()
    removed, freed = collect_garbage(layer, max_bytes, stale_seconds)
    click.echo(f"removed {removed} files, {freed / 2**20:.1f} MiB" + (f", and {locks} locks of dead processes" if locks else ""))


def _shown(text: Any) -> str:
    """Names of files may hold anything; what a terminal would obey, or cannot show, is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
