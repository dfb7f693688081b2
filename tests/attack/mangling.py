"""Random damage to bytes of JSON."""

from __future__ import annotations

import random


def mangled(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return rng.choice(
        [
            lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            lambda: data[:at] + data[at + rng.randrange(1, 40) :],
            lambda: data[:at] + rng.choice([b"{", b"[", b'"', b"null", b"1e999", b"\\ud800", b"\x00", b",", b"NaN"]) + data[at:],
            lambda: data[:at],
        ]
    )()
