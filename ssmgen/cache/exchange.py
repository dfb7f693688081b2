"""Operations on a whole shared store: push, pull, verify."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, repeat

from ..errors import CacheError, RemoteError, SsmgenError
from ..spec.kernel import Arch
from .entry import Entry
from .layer import Layer
from .remote import ALL, CLAIM_SECONDS, SharedStore, claim_path, index_path, object_path
from .signing import Index, Listed

PARALLEL = 8  # requests at once


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of `push`; numbers of entries."""

    sent: int
    sent_bytes: int
    there: int
    listed: int


@dataclass(frozen=True, slots=True)
class Found:
    """A result of `listed`: an entry that an index lists, or why an index or an entry cannot be used."""

    signer: str
    arch: str
    path: str
    key: str = ""
    listed: Listed | None = None
    wrong: str = ""


def push(store: SharedStore, layers: Iterable[Layer], again: bool = False) -> Pushed:
    """Sends the entries of directories that one's own index does not list yet. Then writes the index, which includes the entries of
    single-entry indexes that processes with this key sent.

    again: also sends listed entries. Raises RemoteError; entries sent before the error are not listed, and are sent again next time.
    """
    sender, by_arch = store.sender(), dict[str, dict[str, Entry]]()
    for layer in layers:
        for _, entry in layer.entries():
            by_arch.setdefault(entry.arch, {}).setdefault(entry.key, entry)
    sent = size = there = listed = 0
    for arch in sorted({*by_arch, *filter(_is_arch, store.transport.names(index_path(sender)))}):
        entries = by_arch.get(arch, {})
        before = _own(store, sender, arch, ALL)
        new = [entry for key, entry in entries.items() if again or key not in before]
        with ThreadPoolExecutor(PARALLEL) as pool:
            fresh = dict(zip((entry.key for entry in new), pool.map(store.send, new), strict=True))
            names = [name for name in store.transport.names(index_path(sender, arch)) if name != ALL]
            folded = dict[str, Listed]()
            for alone in pool.map(_own, repeat(store), repeat(sender), repeat(arch), names):
                folded |= alone
        listed += _list(store, sender, arch, folded, fresh)
        for name in names:
            store.transport.remove(index_path(sender, arch, name))
        sent, size, there = sent + len(fresh), size + sum(item.size for item in fresh.values()), there + len(entries) - len(fresh)
    return Pushed(sent, size, there, listed)


def _own(store: SharedStore, sender: str, arch: str, name: str) -> dict[str, Listed]:
    """The entries of one's own index; empty if it is missing or its signature fails: then it is rewritten."""
    try:
        return dict(store.index(sender, arch, name).entries)
    except (FileNotFoundError, ValueError):
        return {}


@contextlib.contextmanager
def _alone(store: SharedStore, sender: str, arch: str) -> Iterator[None]:
    """Waits until no other sender with this key writes this index, at most CLAIM_SECONDS: the claim of a killed sender must not block
    forever."""
    path, deadline = f"{claim_path(sender)}-{arch}", time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            store.transport.put(path, b"push", new=True)
            break
        except FileExistsError:
            if time.monotonic() >= deadline:
                break
            time.sleep(random.uniform(0.1, 0.3))
    try:
        yield
    finally:
        store.transport.remove(path)


def _list(store: SharedStore, sender: str, arch: str, folded: dict[str, Listed], fresh: dict[str, Listed]) -> int:
    """Adds entries to one's own index, and checks that they are in it: fsspec cannot make a write fail if another process wrote."""
    with _alone(store, sender, arch):
        before = _own(store, sender, arch, ALL)
        if (wanted := {**before, **folded, **fresh}) == before:  # the process compiled and sent entries that it could not load from here
            return len(before)
        store.transport.put(index_path(sender, arch, ALL), Index(arch, wanted).to_bytes(store.signer()))
        if _own(store, sender, arch, ALL) == wanted:
            return len(wanted)
    place = f"{store.transport.url}/{index_path(sender, arch, ALL)}"
    raise RemoteError(
        place, "differs from what was just written: another sender writes it with the same key. Give each sender its own key."
    )


def listed(store: SharedStore, archs: Iterable[str] = ()) -> Iterator[Found]:
    """All entries in indexes with trusted signers, and the indexes that cannot be used. Raises RemoteError."""
    signers, wanted = store.trusted(), set(archs)
    if store.remote.anyone:
        signers = [*signers, *(name for name in store.transport.names(index_path()) if name not in signers)]
    for signer in signers:
        for arch in store.transport.names(index_path(signer)):
            if not _is_arch(arch) or (wanted and arch not in wanted):
                continue
            names = store.transport.names(index_path(signer, arch))
            for name in sorted(names, key=lambda name: (name != ALL, name)):
                path = index_path(signer, arch, name)
                try:
                    index = store.index(signer, arch, name)
                except FileNotFoundError:
                    continue  # another process has just removed it
                except ValueError as e:
                    yield Found(signer, arch, path, wrong=str(e))
                    continue
                for key, item in index.entries.items():
                    yield Found(signer, arch, object_path(item.digest), key, item)


def _is_arch(name: str) -> bool:
    try:
        return str(Arch.parse(name)) == name
    except SsmgenError:
        return False


def foreign(store: SharedStore) -> list[str]:
    """Untrusted senders: public keys that are not trusted, and `unsigned`. Raises RemoteError."""
    trusted = store.trusted()
    return [] if store.remote.anyone else [name for name in store.transport.names(index_path()) if name not in trusted]


def verify(store: SharedStore, archs: Iterable[str] = ()) -> tuple[int, list[tuple[str, str]]]:
    """(number of sound entries, (path, problem) of each other entry and index). Reads all of the store. Raises RemoteError."""
    sound, wrong = 0, []
    for found, result in _loaded(store, dict.fromkeys(listed(store, archs))):
        if isinstance(result, Entry):
            sound += 1
        else:
            wrong.append((found.path, result))
    return sound, wrong


def pull(store: SharedStore, into: Layer, archs: Iterable[str] = ()) -> tuple[int, int, list[tuple[str, str]]]:
    """(entries written, entries already present, (path, problem) of each unusable entry or index).

    Raises RemoteError; CacheError if the directory cannot be written.
    """
    written, wrong, there = 0, [], 0
    wanted: dict[Found, None] = {}
    for found in listed(store, archs):
        if found.wrong or not _kept(into, found):
            wanted[found] = None
        else:
            there += 1
    done: set[str] = set()
    for found, result in _loaded(store, wanted):
        if not isinstance(result, Entry):
            wrong.append((found.path, result))
        elif result.key not in done:
            into.write(result)
            done.add(result.key)
            written += 1
    return written, there, wrong


def _kept(layer: Layer, found: Found) -> bool:
    try:
        layer.load(layer.path(found.key, found.arch))
        return True
    except (FileNotFoundError, ValueError, CacheError):
        return False


def _loaded(store: SharedStore, wanted: Iterable[Found]) -> Iterator[tuple[Found, Entry | str]]:
    """(listed entry, the entry itself or its problem)."""

    def one(found: Found) -> Entry | str:
        if found.listed is None:
            return found.wrong
        try:
            entry = store.load(found.listed)
        except FileNotFoundError:
            return "is listed and missing"
        except ValueError as e:
            return str(e)
        return entry if (entry.key, entry.arch) == (found.key, found.arch) else "has the contents of an entry with another name"

    left = iter(wanted)
    with ThreadPoolExecutor(PARALLEL) as pool:
        while items := list(islice(left, 8 * PARALLEL)):  # in batches: a store may not fit in memory
            yield from zip(items, pool.map(one, items), strict=True)
