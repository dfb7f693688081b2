"""Reads untrusted files, whole or refused with a reason, and removes control characters from texts for terminals."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from ..errors import SsmgenError

MAX_BYTES = 32 * 2**20  # of a file, and of its unpacked content; the largest that ssmgen writes is below one MiB
GZIP = b"\x1f\x8b"


class FileError(SsmgenError):
    """A file or directory cannot be read or written."""


def read_json(path: Path, regular: bool = True) -> Any:
    """The value of a JSON file, which may be compressed by gzip. regular: refuses files that are not regular, such as pipes.

    Raises OSError, and ValueError that says why the bytes are not JSON of at most MAX_BYTES.
    """
    data = _read(path, regular)
    if data.startswith(GZIP):
        data = _unpacked(data)
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not UTF-8 from byte {e.start} on") from e
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    except ValueError as e:
        raise ValueError(f"it is not JSON ({e})") from e


def _read(path: Path, regular: bool) -> bytes:
    extra = os.O_NONBLOCK if regular else 0  # so that a pipe without a writer is refused instead of waited for
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as file:
        if regular and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        return _at_most(file)


def _unpacked(data: bytes) -> bytes:
    try:
        return _at_most(gzip.GzipFile(fileobj=io.BytesIO(data)))
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(f"it is not a complete gzip file ({e})") from e


def _at_most(file: Any) -> bytes:
    data: bytes = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB, the most that is read")
    return data


def plain(text: str, lines: bool = False) -> str:
    """The text on one line, without characters that a terminal interprets: control characters (C0 with ESC, C1), marks that reorder or hide
    text, halves of surrogate pairs. lines: keeps line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else " " if c.isspace() else "" for c in text)


def plain_values(value: Any, lines: bool = False) -> Any:
    """A JSON value with all its texts `plain`; texts named "error" keep their line breaks."""
    if isinstance(value, str):
        return plain(value, lines)
    if isinstance(value, list):
        return [plain_values(item) for item in value]
    if isinstance(value, dict):
        return {plain(name): plain_values(item, name == "error") for name, item in value.items()}
    return value
