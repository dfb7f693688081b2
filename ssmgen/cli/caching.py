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
@click.option("--remote", is_flag=True, help="Check the shared store instead: signatures of its indexes, and all entries that they list.")
def cache_verify(remote: bool) -> None:
    """Check every entry's digest and key, and who may write it. Exits with 1 when one cannot be used; it is replaced when it is needed."""
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
@click.option("--from", "layer", type=Folder(), help="Send this layer, of `ssmgen build --out`. Default: all directories of the cache.")
@click.option("--again", is_flag=True, help="Send what is there already, too: mends a store whose objects are damaged.")
def cache_push(layer: Path | None, again: bool) -> None:
    """Send compiled kernels to the shared store of SSMGEN_CACHE_REMOTE, and sign them with the key of SSMGEN_CACHE_REMOTE_SIGN.

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
@click.option("--arch", "archs", type=ArchType(), help="Only these, separated by commas. Default: all.")
@click.option("--out", type=Folder(), help="Write a cache layer here instead of to the user's cache.")
def cache_pull(archs: list[Arch] | None, out: Path | None) -> None:
    """Copy what trusted keys vouch for from the shared store into a directory. Exits with 1 if something there cannot be used."""
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
    """Make an ed25519 key to sign with in FILE, unless one is there, and print its public key, for SSMGEN_CACHE_REMOTE_KEYS."""
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
    "--max-mib", type=click.FloatRange(0), callback=_number, default=256, show_default=True, help="Keep at most this much; inf for all."
)
def cache_gc(max_mib: float) -> None:
    """Remove damaged entries, leftovers of dead processes, and the oldest entries beyond --max-mib, of cubins and of the emulator's
    kernels each."""
    _remove(max_mib * 2**20, STALE_SECONDS)


@cache.command("clear")
def cache_clear() -> None:
    """Remove every entry of the writable cache, and what processes left that died."""
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
    """Names of files may hold anything; what a terminal would obey, or cannot show, is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
