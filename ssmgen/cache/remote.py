"""A store that machines share. It is read after this machine's directories, and written if the settings say so.

objects/<2 hex digits>/<sha256>            an entry, under the digest of its bytes: two senders never write different bytes to one name
index/<public key>/<arch>/all              the entries that `push` sent: one request lists them all
index/<public key>/<arch>/<key>            one entry from a process that compiled it: no two processes write the same index
claims/<key>                               a process is compiling this entry and will send it

Nothing here is needed for correctness, and nothing raises: a store that is slow, down, full or wrong costs a bounded wait and one warning.
A loaded entry has the digest in a signed index, and is a whole entry of the requested key. No clocks are compared.
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

REST_SECONDS = 60.0  # time without requests after a failure
INDEX_SECONDS = 60.0  # age after which an index is read again, if a key is not in it
SLOW = 4  # requests for one kernel longer than a fourth of the longest wait count as a failure: compiling takes no longer
CLAIM_SECONDS = 20.0  # longest wait for another machine's compilation; most take under one second, the longest five seconds
ALL = "all"


def object_path(digest: str) -> str:
    return f"v{SCHEMA}/objects/{digest[:2]}/{digest}"


def index_path(signer: str = "", arch: Arch | str = "", name: str = "") -> str:
    """The path of an index, or of a folder of indexes."""
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
        self._mutex = threading.RLock()  # of the fields here: one thread's request serves the others

    # Reading.

    def fetch(self, key: str, symbol: str, arch: Arch) -> Entry | None:
        """The entry from an index that a trusted key signed, or None. Raises ConfigError."""
        start = time.monotonic()
        try:
            return next(filter(None, (self._listed_by(*place, key, symbol, arch) for place in self._places(key))), None)
        except RemoteError as e:
            self._failed("read", e)
            return None
        finally:
            took, limit = time.monotonic() - start, self.remote.seconds / SLOW
            if self._begun and took > limit:
                self._failed("read", RemoteError(self.remote.url, f"took {took:.1f} s for one kernel; expected at most {limit:g}"))
            self._begun = True  # the first request also starts the client

    def _places(self, key: str) -> Iterator[tuple[str, str]]:
        """(signer, name of an index) that may list a key."""
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
            raise ValueError("has the contents of an entry with another name")
        except FileNotFoundError:
            return None
        except ValueError as e:
            self._warn("content", f"does not use {self.transport.url}/{path}, which {e}")
            return None

    def load(self, listed: Listed) -> Entry:
        """The entry that an index lists. Raises FileNotFoundError; ValueError, in words, for invalid bytes; RemoteError."""
        data = self.transport.get(object_path(listed.digest), listed.size)
        if len(data) != listed.size or hashlib.sha256(data).hexdigest() != listed.digest:
            raise ValueError("differs from its index entry: truncated or altered")
        return Entry.from_bytes(data)

    def index(self, signer: str, arch: Arch | str, name: str) -> Index:
        """The current index. Raises as `load` does.

        If anyone is trusted, indexes of trusted keys are still verified: `push` signs the content of its own index again.
        """
        data = self.transport.get(index_path(signer, arch, name), MAX_INDEX_BYTES)
        unverified = self.remote.anyone and signer not in self.trusted()
        return Index.from_bytes(data, str(arch), None if unverified else signer)

    def _index(self, signer: str, arch: Arch, name: str) -> Index | None:
        """The same, but a wrong index gives a warning and None."""
        try:
            return self.index(signer, arch, name)
        except FileNotFoundError:
            return None
        except ValueError as e:
            self._warn("content", f"does not use {self.transport.url}/{index_path(signer, arch, name)}, which {e}")
            return None

    def _bulk(self, signer: str, arch: Arch, key: str) -> Index | None:
        """The pushed entries, as last read; read again if that was long ago and the key was not listed."""
        place = (signer, str(arch))
        with self._mutex:
            read, index = self._indexes.get(place, (-INDEX_SECONDS, None))
            if (index and key in index.entries) or time.monotonic() - read < INDEX_SECONDS:
                return index
            self._indexes[place] = time.monotonic(), index  # also on failure: waiting threads must not fail one after the other
            index = self._index(signer, arch, ALL)
            self._indexes[place] = time.monotonic(), index
            return index

    def _all_signers(self) -> list[str]:
        """The signers whose indexes are read: trusted public keys; if anyone is trusted, also `unsigned` and all others in the store."""
        trusted = self.trusted()
        if not self.remote.anyone:
            return trusted
        with self._mutex:
            if self._signers is None or time.monotonic() - self._signers[0] >= INDEX_SECONDS:
                self._signers = time.monotonic(), []  # as above
                self._signers = time.monotonic(), self.transport.names(index_path())
            return [*trusted, *(name for name in self._signers[1] if name not in trusted)]

    def trusted(self) -> list[str]:
        """The public keys in the configuration, and this process's key. Raises ConfigError, and RemoteError without `cryptography`."""
        own = [signer.public] if (signer := self.signer()) else []
        return [*own, *(key for key in self.remote.trusted if key not in own)]

    def signer(self) -> Signer | None:
        """The key that signs what this process sends. Raises as `trusted` does."""
        if self._signer is None and self.remote.signing_key:
            self._signer = Signer.load(self.remote.signing_key)
        return self._signer

    # Writing back.

    @contextlib.contextmanager
    def turn(self, key: str, symbol: str, arch: Arch) -> Iterator[Entry | None]:
        """Takes turns to compile: yields None if the caller is to compile, or the entry that another machine has just sent.

        Only processes that write back take turns: of several that start together, one compiles and the others wait for its entry.
        """
        entry, claimed = None, False
        if self.remote.writes and not self._rests("write"):
            try:
                claimed = self._claim(key)
                entry = self._sent(key, symbol, arch) if claimed else self._awaited(key, symbol, arch)
                claimed = claimed or entry is None  # waited in vain: the claim has no owner, and must not delay the next process
            except RemoteError as e:
                self._failed("write", e)
        try:
            yield entry
        finally:
            if claimed and not self._rests("write"):
                with contextlib.suppress(RemoteError):  # a claim that stays delays others by CLAIM_SECONDS, once
                    self.transport.remove(claim_path(key))

    def publish(self, entry: Entry) -> None:
        """Sends an entry that was compiled here, if the settings say so."""
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
        """The name under which this process sends indexes. Raises RemoteError if a signature is needed and there is no key."""
        if signer := self.signer():
            return signer.public
        if self.remote.anyone:
            return UNSIGNED
        raise RemoteError(
            self.remote.url, "takes signed entries only, and there is no key. Name the file of a private key in SSMGEN_CACHE_REMOTE_SIGN."
        )

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
        """The entry from another machine, if it arrives within CLAIM_SECONDS. After one wait in vain there are no more waits: each claim
        may be false."""
        deadline, pause = time.monotonic() + CLAIM_SECONDS, 0.1
        while self._waits:
            if entry := self._sent(key, symbol, arch):
                return entry
            if time.monotonic() >= deadline:
                self._waits = False
                self._warn(
                    "claims",
                    f"waited {CLAIM_SECONDS:g} s in vain for a kernel from another process in {self.remote.url}, and now compiles it",
                )
                break
            time.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(1.5 * pause, 1.0)
        return None

    # Failures.

    def _rests(self, what: str) -> bool:
        """Whether requests are paused: for REST_SECONDS after a failure. A store that cannot be read is not written either."""
        return any(time.monotonic() - self._resting[kind] < REST_SECONDS for kind in {"read", what})

    def _failed(self, what: str, error: RemoteError) -> None:
        self._resting[what] = time.monotonic()
        self._warn(what, f"continues without {'sending to ' if what == 'write' else ''}the shared store: {error}")

    def _warn(self, kind: str, text: str) -> None:
        with self._mutex:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(f"ssmgen {text}", stacklevel=2)
