"""`ssmgen cache`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from .. import settings
from ..cache import exchange
from ..cache.layer import STALE_SECONDS, Layer
from ..cache.process_lock import sweep
from ..cache.remote import SharedStore
from ..cache.signing import Signer
from ..cache.store import shared_cache
from ..cache.upkeep import collect_garbage, objects, verify
from ..errors import CacheError
from ..spec.kernel import Arch
from .building import prepared
from .options import EXIT_FAILURE, ArchType, Folder, json_option


@click.group()
def cache() -> None:
    """List, check, copy and remove compiled kernels."""


@cache.command("path")
def cache_path() -> None:
    """Print the cache directories in the order of the search."""
    for layer in shared_cache().layers:
        click.echo(_shown(layer.root))


@cache.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List the usable entries."""
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
@click.option(
    "--remote", is_flag=True, help="Check the shared store instead: the signatures of its indexes and all entries that they list."
)
def cache_verify(remote: bool) -> None:
    """Check every entry's digest, key and permissions.

    Exits with 1 if an entry cannot be used. The next use replaces it."""
    if remote:
        _verify_remote()
    wrong = [item for layer in shared_cache().layers for item in verify(layer)]
    for path, reason in wrong:
        click.echo(_shown(f"{path}: {reason}"))
    click.echo(f"{len(wrong)} damaged", err=True)
    sys.exit(EXIT_FAILURE if wrong else 0)


def _verify_remote() -> NoReturn:
    store = _store()
    sound, wrong = exchange.verify(store)
    for path, reason in wrong:
        click.echo(_shown(f"{store.remote.url}/{path}: {reason}"))
    for name in exchange.foreign(store):
        click.echo(_shown(f"{store.remote.url}: entries from {name} are not trusted and were not checked"))
    click.echo(f"{sound} sound, {len(wrong)} damaged", err=True)
    sys.exit(EXIT_FAILURE if wrong else 0)


@cache.command("push")
@click.option(
    "--from",
    "layer",
    type=Folder(),
    help="Send the entries of this directory, written by `ssmgen build --out`. Default: all cache directories.",
)
@click.option("--again", is_flag=True, help="Also send entries that the store has, to repair damaged ones.")
def cache_push(layer: Path | None, again: bool) -> None:
    """Send compiled kernels, signed, to the shared store.

    Processes that trust this key load them from there.
    """
    store = _store()
    if layer and not layer.is_dir():
        raise CacheError(layer, "is not a directory")
    pushed = exchange.push(store, [Layer(layer)] if layer else shared_cache().layers, again)
    click.echo(
        f"{pushed.sent} entries sent, {pushed.sent_bytes / 2**20:.1f} MiB; {pushed.there} were there; "
        f"{pushed.listed} are listed by {store.sender()}"
    )


@cache.command("pull")
@click.option("--arch", "archs", type=ArchType(), help="Only these architectures, separated by commas. Default: all.")
@click.option("--out", type=Folder(), help="Write a cache layer here instead of to the user's cache.")
def cache_pull(archs: list[Arch] | None, out: Path | None) -> None:
    """Copy entries signed by trusted keys from the shared store.

    Exits with 1 if an entry of the store cannot be used."""
    store = _store()
    into = Layer(prepared(out)) if out else shared_cache().writable
    if into is None:
        raise CacheError("the cache", "has no directory that this user may write. Nothing was copied. Pass --out.")
    written, there, wrong = exchange.pull(store, into, map(str, archs or ()))
    for path, reason in wrong:
        click.echo(_shown(f"{store.remote.url}/{path}: {reason}"))
    click.echo(f"{written} entries written, {there} were there, {len(wrong)} cannot be used")
    sys.exit(EXIT_FAILURE if wrong else 0)


@cache.command("key")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def cache_key(file: Path) -> None:
    """Make a signing key in FILE and print its public key.

    The key is ed25519. An existing FILE is kept. The public key is for SSMGEN_CACHE_REMOTE_KEYS."""
    click.echo((Signer.load(file) if file.exists() else Signer.make(file)).public)


def _store() -> SharedStore:
    if (remote := settings.remote()) is None:
        raise click.UsageError("there is no shared store. Name its URL in SSMGEN_CACHE_REMOTE.")
    return SharedStore(remote)


def _number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is no size")
    return value


@cache.command("gc")
@click.option(
    "--max-mib",
    type=click.FloatRange(0),
    callback=_number,
    default=256,
    show_default=True,
    help="Keep at most this many MiB; inf keeps all.",
)
def cache_gc(max_mib: float) -> None:
    """Remove damaged and old entries.

    Removes damaged entries, leftovers of dead processes, and the oldest entries beyond --max-mib: of cubins, and of the
    emulator's kernels.
    """
    _remove(max_mib * 2**20, STALE_SECONDS)


@cache.command("clear")
def cache_clear() -> None:
    """Remove every entry of the writable cache.

    Also removes the leftovers of dead processes."""
    _remove(0, -math.inf)


def _remove(max_bytes: float, stale_seconds: float) -> None:
    layer = shared_cache().writable
    if layer is None:
        raise CacheError("the cache", "has no directory that this user may write. Nothing was removed. Set SSMGEN_CACHE_DIR.")
    locks = sweep()
    kernels, emulated = (collect_garbage(place, max_bytes, stale_seconds) for place in (layer, objects(layer.root)))
    removed, freed = kernels[0] + emulated[0], kernels[1] + emulated[1]
    click.echo(f"removed {removed} files, {freed / 2**20:.1f} MiB" + (f", and {locks} locks of dead processes" if locks else ""))


def _shown(text: Any) -> str:
    """The text with control characters escaped: file names may contain any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
