"""Signatures of a shared store: indexes of digests, signed with ed25519.

index: `ssmgen-index-1 <signature, or "unsigned">` newline body
body:  JSON, {"arch": …, "entries": {key: [sha256 of the entry, its bytes]}}

The signature covers a sentence that states its purpose, and the body. It does not name the store: an index may be copied to another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RemoteError
from .entry import MAX_BYTES

MAX_INDEX_BYTES = 16 * 2**20  # a line of 150 bytes per entry: 100 000 entries
UNSIGNED = "unsigned"  # instead of a public key or a signature
_MAGIC = b"ssmgen-index-1 "
_SENTENCE = b"ssmgen vouches for the entries of this index:\n"
_DIGEST = re.compile(r"[0-9a-f]{64}")
INSTALL = "pip install 'ssmgen[remote]'"


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry's digest and size, as an index lists them."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Index:
    """Entries of an architecture that one signer vouches for, by key."""

    arch: str
    entries: Mapping[str, Listed]

    def to_bytes(self, signer: Signer | None) -> bytes:
        entries = {key: [listed.digest, listed.size] for key, listed in sorted(self.entries.items())}
        body = json.dumps({"arch": self.arch, "entries": entries}, separators=(",", ":")).encode()
        return _MAGIC + (signer.sign(_SENTENCE + body).hex() if signer else UNSIGNED).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes, arch: str, public: str | None) -> Index:
        """The index of an architecture, signed by this public key; by any signer or none if `public` is None.

        Raises ValueError, in words, and RemoteError if `cryptography` is not installed.
        """
        head, newline, body = data.partition(b"\n")
        if not newline or not head.startswith(_MAGIC):
            raise ValueError("is not an index of ssmgen")
        if public is not None:
            _verify(public, head.removeprefix(_MAGIC), _SENTENCE + body)
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError, KeyError):
            told = json.loads(body)
            entries = {key: Listed(*of) for key, of in told["entries"].items()}
            if told["arch"] == arch and all(_sound(key, listed) for key, listed in entries.items()):
                return cls(arch, entries)
        raise ValueError(f"does not list the digests of entries for {arch}")


def _sound(key: Any, listed: Listed) -> bool:
    texts = isinstance(listed.digest, str) and _DIGEST.fullmatch(key) and _DIGEST.fullmatch(listed.digest)
    return bool(texts) and type(listed.size) is int and 0 < listed.size <= MAX_BYTES


def _verify(public: str, signature: bytes, message: bytes) -> None:
    if signature == UNSIGNED.encode():
        raise ValueError("is not signed")
    invalid, ed25519, _ = _cryptography()
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature.decode()), message)
    except (invalid, ValueError):
        raise ValueError(f"is not signed by {public}") from None


class Signer:
    """An ed25519 private key."""

    def __init__(self, key: Any):
        self._key = key
        self.public: str = key.public_key().public_bytes_raw().hex()

    @classmethod
    def load(cls, path: Path) -> Signer:
        """The key in a PEM file without a password. Raises ConfigError, and RemoteError if `cryptography` is not installed."""
        _, ed25519, serialization = _cryptography()
        name = "SSMGEN_CACHE_REMOTE_SIGN"
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except OSError as e:
            raise ConfigError(name, str(path), f"cannot be read: {e.strerror or e}") from e
        except (ValueError, TypeError) as e:  # TypeError: it has a password
            raise ConfigError(name, str(path), "is not a PEM file of a private key; expected one without a password") from e
        except Exception as e:  # such as UnsupportedAlgorithm, which is not one of these
            raise ConfigError(name, str(path), f"cannot be used: {e}") from e
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ConfigError(name, str(path), "is a private key of another kind; expected ed25519")
        return cls(key)

    @classmethod
    def make(cls, path: Path) -> Signer:
        """A new key in a file of mode 0600. Raises RemoteError if the name is taken, or the file cannot be written."""
        _, ed25519, serialization = _cryptography()
        key = ed25519.Ed25519PrivateKey.generate()
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(key.private_bytes(*form))
        except OSError as e:
            raise RemoteError(str(path), f"cannot be made: {e.strerror or e}") from e
        return cls(key)

    def sign(self, message: bytes) -> bytes:
        signature: bytes = self._key.sign(message)
        return signature


def _cryptography() -> tuple[Any, Any, Any]:
    """(InvalidSignature, the module ed25519, the module serialization); imported with the first signature."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise RemoteError("cryptography", f"is not installed; signatures of a shared store need it. Install it with: {INSTALL}") from e
    return InvalidSignature, ed25519, serialization
