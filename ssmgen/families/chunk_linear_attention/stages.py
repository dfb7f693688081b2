"""The layout of a chunk's parts in shared memory, by reader: warps or warpgroups, for outputs or for N and M alone."""

from __future__ import annotations

from typing import NamedTuple

from .problem import PANEL, PANELS, Image, Rule
from .problem import ROWS as ROWS_OF_CHUNK

HALF = 32  # rows of T in one product's sums: a whole chunk's rows would take a quarter more products, and more room for zeros
Piece = tuple[int, int, int]  # first byte in an image, bytes, first word in shared memory


class Stage(NamedTuple):
    """Start of a chunk's parts in shared memory after E, and their size, in words. Decays follow all chunks."""

    q: int
    w: int
    t: int
    rest: int
    p: int
    v: int
    words: int


def of_warps(image: Image, v_words: int, sums: bool) -> tuple[Stage, list[Piece]]:
    """The parts in the order of an image; sums need neither Q nor P."""
    if not sums:
        v = image.decay // 4
        return Stage(image.q // 4, image.w // 4, image.t // 4, image.rest // 4, image.p // 4, v, v + v_words), [(0, image.decay, 0)]
    w, without_q = image.q // 4, (image.w - image.q) // 4
    v = image.p // 4 - without_q
    found = Stage(0, w, image.t // 4 - without_q, image.rest // 4 - without_q, 0, v, v + v_words)
    return found, [(0, image.q, 0), (image.w, image.p - image.w, w)]


def of_warpgroups(image: Image, rule: Rule, v_words: int, sums: bool) -> tuple[Stage, list[Piece]]:
    """Whole panels of P, and halves of T's panels, with room for zeros. Parts begin at multiples of 1024 bytes."""
    halves = sum(half_words(rule))
    if sums:
        w = image.q // 4
        v = w + (image.t - image.w) // 4
        t = v + v_words
        rest = t + halves
        pieces = [(0, image.q, 0), (image.w, image.t - image.w, w), (image.rest, image.p - image.rest, rest)]
        found = Stage(0, w, t, rest, 0, v, rest + (image.p - image.rest) // 4)
        return found, joined([*pieces, *panels(image.t, t, rule, half_words(rule))])
    v = image.t // 4
    t = v + v_words
    rest = t + halves * rule.reads
    p = rest + (image.p - image.rest) // 4 * rule.weighs
    words = rule.tokens * PANEL // 2
    pieces = [(0, image.t, 0), *panels(image.p, p, rule, (words,) * PANELS)]
    if rule.reads:
        pieces += panels(image.t, t, rule, half_words(rule))
    if rule.weighs:
        pieces.append((image.rest, image.p - image.rest, rest))
    return Stage(image.q // 4, image.w // 4, t, rest, p, v, p + PANELS * words), joined(pieces)


def half_words(rule: Rule) -> tuple[int, ...]:
    """32-bit words of T's panels, each from the half of 32 rows where its first column crosses the diagonal."""
    return tuple((ROWS_OF_CHUNK - max(rule.silent, PANEL * c // HALF * HALF)) * PANEL // 2 for c in range(PANELS))


def panels(begin: int, at: int, rule: Rule, words: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Pieces of T's or P's panels. They start at `begin` in an image and take `words` each in shared memory, zeros first."""
    found = []
    for c, count in enumerate(rule.panel_bytes):
        found.append((begin + sum(rule.panel_bytes[:c]), count, at + sum(words[: c + 1]) - count // 4))
    return found


def joined(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The pieces, with neighbours in both places merged."""
    found: list[tuple[int, int, int]] = []
    for piece in sorted(pieces):
        last, size, there = found[-1] if found else (-1, 0, 0)
        if (last + size, there + size // 4) == (piece[0], piece[2]):
            found[-1] = last, size + piece[1], there
        else:
            found.append(piece)
    return found
