"""One compiled kernel as bytes.

magic | header length (4 bytes, big endian) | header (JSON) | source | cubin | sha256 of everything before
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..compile.nvrtc import Resources
from ..spec.kernel import Arch

SCHEMA = 1
MAGIC = b"SSMGEN1\n"
MAX_BYTES = 64 * 2**20  # of an entry; the largest has some hundred kilobytes
MAX_HEADER_BYTES = 64 * 2**10  # a header has some hundred bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel, as stored."""

    key: str
    spec: str
    symbol: str
    arch: str
    compiler: str
    options: tuple[str, ...]
    resources: Resources
    seconds: float  # compile time of the first compilation
    source: str
    cubin: bytes

    def to_bytes(self) -> bytes:
        header = {k: v for k, v in asdict(self).items() if k not in ("source", "cubin")}
        source = self.source.encode()
        header |= {"source_bytes": len(source), "cubin_bytes": len(self.cubin)}
        text = json.dumps(header, sort_keys=True).encode()
        body = MAGIC + len(text).to_bytes(4, "big") + text + source + self.cubin
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Raises ValueError, in words, for any bytes except a whole entry that `to_bytes` wrote under its own key."""
        if len(data) < len(MAGIC) + 36 or data[: len(MAGIC)] != MAGIC:
            raise ValueError("is not an ssmgen cache entry")
        body, digest = data[:-32], data[-32:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("has another digest than it records: truncated or altered")
        start = len(MAGIC) + 4
        end = start + int.from_bytes(data[len(MAGIC) : start], "big")
        if end > min(len(body), start + MAX_HEADER_BYTES):
            raise ValueError("has a header that is too long")
        header = _checked(_parsed(data[start:end]))
        source_end = end + header.pop("source_bytes")
        if source_end + header.pop("cubin_bytes") != len(body):
            raise ValueError("has another length than its header records")
        header["resources"] = Resources(**header["resources"])
        header["options"] = tuple(header["options"])
        entry = cls(**header, source=body[end:source_end].decode(), cubin=body[source_end:])
        if entry.key != cache_key(entry.source, entry.options, Arch.parse(entry.arch), entry.compiler):
            raise ValueError("has a key that is not the hash of its contents")
        return entry


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("has a header that is nested too deeply") from None


def _checked(header: Any) -> dict[str, Any]:
    """A header with all fields, of the types and ranges that `to_bytes` writes. Raises ValueError."""
    names = {f.name for f in fields(Entry)} - {"source", "cubin"} | {"source_bytes", "cubin_bytes"}
    if not isinstance(header, dict) or header.keys() != names:
        raise ValueError("has a header without the fields of an entry")
    resources, options, seconds = header["resources"], header["options"], header["seconds"]
    if not isinstance(resources, dict) or resources.keys() != {f.name for f in fields(Resources)} or not isinstance(options, list):
        raise ValueError("has resources or options in another form than an entry")
    texts = [*(header[name] for name in ("key", "spec", "symbol", "arch", "compiler")), *options]
    numbers = [header["source_bytes"], header["cubin_bytes"], *resources.values()]
    if not (
        all(isinstance(text, str) and text.strip() and text.isascii() and text.isprintable() for text in texts)
        and all(type(number) is int and 0 <= number <= MAX_BYTES for number in numbers)
        and type(seconds) in (int, float)
        and 0 <= seconds < float("inf")
    ):
        raise ValueError("has a header with a field of wrong type or range")
    return header


def cache_key(source: str, options: Iterable[str], arch: Arch, compiler_build: str) -> str:
    """sha256 over labelled, length-prefixed fields, so that different inputs never give the same bytes."""
    h = hashlib.sha256()
    fields = [("schema", str(SCHEMA)), ("source", source), ("arch", str(arch)), ("compiler", compiler_build)]
    for label, value in [*fields, *(("option", o) for o in options)]:
        for part in (label.encode(), value.encode()):
            h.update(len(part).to_bytes(8, "big") + part)
    return h.hexdigest()
