"""A store that machines share, behind the directories of this one: read through, and written back to where that is asked for.

objects/<2 hex digits>/<sha256>            an entry, under the digest of its bytes: two senders never write different bytes to one name
index/<public key>/<arch>/all              what `push` sent: one request tells a process all that is there
index/<public key>/<arch>/<key>            what a process sent that compiled: an index of one entry, so that no two processes write the same
claims/<key>                               somebody is compiling this and will send it

Nothing here is needed for correctness, and nothing raises: a store that is slow, down, full or wrong costs a bounded wait and one warning.
What is loaded has the digest that a signed index names, and is a whole entry of the key that was asked for. No clocks are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator

from ..errors import RemoteError
from ..settings import Remote
from ..spec.kernel import Arch
from .entry import SCHEMA, Entry
from .signing import MAX_INDEX_BYTES, UNSIGNED, Index, Listed, Signer
from .transport import Fsspec, Transport

REST_SECONDS = 60.0  # for which a store that failed is not asked
INDEX_SECONDS = 60.0  # after which an index is read again, if a key is not in it
SLOW = 4  # a fourth of the longest wait, for all requests that a kernel takes, is as bad as a failure: compiling takes no longer
CLAIM_SECONDS = 20.0  # longest wait for another machine's compilation; most take under one second, the longest five
ALL = "all"


def object_path(digest: str) -> str:
    return f"v{SCHEMA}/objects/{digest[:2]}/{digest}"


def index_path(signer: str = "", arch: Arch | str = "", name: str = "") -> str:
    """The path of an index, or of the place in which such are."""
    return "/".join(filter(None, (f"v{SCHEMA}", "index", signer, str(arch), name)))


def claim_path(key: str) -> str:
    return f"v{SCHEMA}/claims/{key}"


class SharedStore:
    """A process's view of a shared store."""

    def __init__(self, remote: Remote, transport: Transport | None = None):
        self.remote = remote
        self.transport: Transport = transport or Fsspec(remote.url, remote.seconds)
        self._signer: Signer | None = None
        self._indexes: dict[tuple[str, str], tuple[float, Index | None]] = {}
        self._signers: tuple[float, list[str]] | None = None
        self._resting = {"read": -REST_SECONDS, "write": -REST_SECONDS}  # when each failed
        self._warned: set[str] = set()
        self._waits = True
        self._begun = False
        self.renew_locks()

    def renew_locks(self) -> None:
        self._mutex = threading.RLock()  # of what is remembered here: a request by one thread answers the others

    # Reading.

    def fetch(self, key: str, symbol: str, arch: Arch) -> Entry | None:
        """The entry that somebody trusted vouches for, or None. Raises ConfigError."""
        start = time.monotonic()
        try:
            return next(filter(None, (self._listed_by(*place, key, symbol, arch) for place in self._places(key))), None)
        except RemoteError as e:
            self._failed("read", e)
            return None
        finally:
            took, limit = time.monotonic() - start, self.remote.seconds / SLOW
            if self._begun and took > limit:
                self._failed("read", RemoteError(self.remote.url, f"took {took:.1f} s for one kernel, more than {limit:g}"))
            self._begun = True  # the first one has the client begin, too

    def _places(self, key: str) -> Iterator[tuple[str, str]]:
        """(signer, name of an index) where a key may be listed."""
        for name in (ALL, key):
            for signer in () if self._rests("read") else self._all_signers():
                yield signer, name

    def _listed_by(self, signer: str, name: str, key: str, symbol: str, arch: Arch) -> Entry | None:
        index = self._bulk(signer, arch, key) if name == ALL else self._index(signer, arch, name)
        if index is None or not (listed := index.entries.get(key)):
            return None
        path = object_path(listed.digest)
        try:
            entry = self.load(listed)
            if (entry.key, entry.arch, entry.symbol) == (key, str(arch), symbol):
                return entry
            raise ValueError("is an entry of another name")
        except FileNotFoundError:
            return None
        except ValueError as e:
            self._warn("content", f"does not use {self.transport.url}/{path}, which {e}")
            return None

    def load(self, listed: Listed) -> Entry:
        """The entry that an index lists. Raises FileNotFoundError; ValueError, in words, for what is none; RemoteError."""
        data = self.transport.get(object_path(listed.digest), listed.size)
        if len(data) != listed.size or hashlib.sha256(data).hexdigest() != listed.digest:
            raise ValueError("is not what the index says: truncated or altered")
        return Entry.from_bytes(data)

    def index(self, signer: str, arch: Arch | str, name: str) -> Index:
        """An index as it is now. Raises as `load` does.

        Where anyone is trusted, those of trusted keys are verified all the same: `push` signs again what it finds in its own.
        """
        data = self.transport.get(index_path(signer, arch, name), MAX_INDEX_BYTES)
        unverified = self.remote.anyone and signer not in self.trusted()
        return Index.from_bytes(data, str(arch), None if unverified else signer)

    def _index(self, signer: str, arch: Arch, name: str) -> Index | None:
        """The same, where one that is wrong counts as none, with a warning."""
        try:
            return self.index(signer, arch, name)
        except FileNotFoundError:
            return None
        except ValueError as e:
            self._warn("content", f"does not use {self.transport.url}/{index_path(signer, arch, name)}, which {e}")
            return None

    def _bulk(self, signer: str, arch: Arch, key: str) -> Index | None:
        """What was pushed, as it was when it was last read; read again if that is long ago and the key was not among it."""
        place = (signer, str(arch))
        with self._mutex:
            read, index = self._indexes.get(place, (-INDEX_SECONDS, None))
            if (index and key in index.entries) or time.monotonic() - read < INDEX_SECONDS:
                return index
            self._indexes[place] = time.monotonic(), index  # also if it fails: threads that wait here must not fail one by one
            index = self._index(signer, arch, ALL)
            self._indexes[place] = time.monotonic(), index
            return index

    def _all_signers(self) -> list[str]:
        """Whose indexes are looked at: public keys, and `unsigned` and whatever else is there if anyone is trusted."""
        trusted = self.trusted()
        if not self.remote.anyone:
            return trusted
        with self._mutex:
            if self._signers is None or time.monotonic() - self._signers[0] >= INDEX_SECONDS:
                self._signers = time.monotonic(), []  # as above
                self._signers = time.monotonic(), self.transport.names(index_path())
            return [*trusted, *(name for name in self._signers[1] if name not in trusted)]

    def trusted(self) -> list[str]:
        """The public keys of the configuration, and one's own. Raises ConfigError, and RemoteError without `cryptography`."""
        own = [signer.public] if (signer := self.signer()) else []
        return [*own, *(key for key in self.remote.trusted if key not in own)]

    def signer(self) -> Signer | None:
        """Who signs what is sent from here. Raises as `trusted` does."""
        if self._signer is None and self.remote.signing_key:
            self._signer = Signer.load(self.remote.signing_key)
        return self._signer

    # Writing back.

    @contextlib.contextmanager
    def turn(self, key: str, symbol: str, arch: Arch) -> Iterator[Entry | None]:
        """Whose turn it is to compile: None for the caller's, or the entry that another machine has just sent.

        Only processes that write back take turns: of those that start at once, one compiles and the others wait for what it sends.
        """
        entry, claimed = None, False
        if self.remote.writes and not self._rests("write"):
            try:
                claimed = self._claim(key)
                entry = self._sent(key, symbol, arch) if claimed else self._awaited(key, symbol, arch)
                claimed = claimed or entry is None  # waited in vain: whose claim it was is gone, and it must not delay the next
            except RemoteError as e:
                self._failed("write", e)
        try:
            yield entry
        finally:
            if claimed and not self._rests("write"):
                with contextlib.suppress(RemoteError):  # it delays others by a wait of CLAIM_SECONDS, once
                    self.transport.remove(claim_path(key))

    def publish(self, entry: Entry) -> None:
        """Sends what was compiled here, if that is asked for."""
        if self.remote.writes and not self._rests("write"):
            try:
                listed = self.send(entry)
                index = Index(entry.arch, {entry.key: listed})
                self.transport.put(index_path(self.sender(), entry.arch, entry.key), index.to_bytes(self.signer()))
            except RemoteError as e:
                self._failed("write", e)

    def send(self, entry: Entry) -> Listed:
        """Sends an entry that no index lists yet. Raises RemoteError."""
        data = entry.to_bytes()
        listed = Listed(hashlib.sha256(data).hexdigest(), len(data))
        self.transport.put(object_path(listed.digest), data)
        return listed

    def sender(self) -> str:
        """Under which name indexes are sent from here. Raises RemoteError if there is no key to sign with, and one is needed."""
        if signer := self.signer():
            return signer.public
        if self.remote.anyone:
            return UNSIGNED
        raise RemoteError(self.remote.url, "takes what is signed; name the file of a private key in SSMGEN_CACHE_REMOTE_SIGN")

    def _claim(self, key: str) -> bool:
        try:
            self.transport.put(claim_path(key), os.urandom(8).hex().encode(), new=True)
            return True
        except FileExistsError:
            return False

    def _sent(self, key: str, symbol: str, arch: Arch) -> Entry | None:
        for signer in self._all_signers():
            if entry := self._listed_by(signer, key, key, symbol, arch):
                return entry
        return None

    def _awaited(self, key: str, symbol: str, arch: Arch) -> Entry | None:
        """What another machine sends within CLAIM_SECONDS. Nobody is waited for after a wait in vain: each claim may be a lie."""
        deadline, pause = time.monotonic() + CLAIM_SECONDS, 0.1
        while self._waits:
            if entry := self._sent(key, symbol, arch):
                return entry
            if time.monotonic() >= deadline:
                self._waits = False
                self._warn("claims", f"waited {CLAIM_SECONDS:g} s for a kernel that another process was to send to {self.remote.url}")
                break
            time.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(1.5 * pause, 1.0)
        return None

    # What goes wrong.

    def _rests(self, what: str) -> bool:
        """Whether it is not to be asked: for REST_SECONDS after it failed. A store that cannot be read is not written to, either."""
        return any(time.monotonic() - self._resting[kind] < REST_SECONDS for kind in {"read", what})

    def _failed(self, what: str, error: RemoteError) -> None:
        self._resting[what] = time.monotonic()
        self._warn(what, f"goes on without {'sending to ' if what == 'write' else ''}the shared store: {error}")

    def _warn(self, kind: str, text: str) -> None:
        with self._mutex:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(f"ssmgen {text}", stacklevel=2)
