"""What a kernel needs of the library of its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Parts of `templates/lib` that only some kernels use, as a template asks for them (`needs.math`). Loads and stores of single numbers
    and of aligned vectors are always there, and so are the conversions of the types that the spec's fields name."""

    math: bool = False  # exponentials and reciprocals
    logs: bool = False  # logarithms, beside those
    elements: bool = False  # vectors gathered from elements that are not aligned, or not neighbours
    guarded: bool = False  # of those, only some
    bytes: bool = False  # 8-bit loads, and with `narrow` stores
    narrow: bool = False  # states in fewer bits
    noise_at_once: bool = False  # stochastic rounding of several vectors of 16-bit numbers together
    raw: bool = False  # stores of numbers that are copied, and not computed with
    streaming: bool = False  # stores that need not stay in L2
    prefetch: bool = False  # bulk requests to L2
    lines: bool = False  # requests to L2 for single lines
    matrices: bool = False  # loads of the tensor cores' operands from shared memory
    shared_pairs: bool = False  # loads of two words at once from shared memory
    shared_quads: bool = False  # loads and stores of four of them; warpgroups have them
    matrix_turns: bool = False  # matrices whose rows and columns are exchanged in registers
    matrix_stores: bool = False  # stores of matrices to shared memory, from sm_90 on; warpgroups have them
    places: bool = False  # loads and stores of words, one or four at once, at known distances from a lane's place in shared memory
    placed_pairs: bool = False  # loads of two words there, beside those
    placed_stores: bool = False  # stores of matrices there, beside those
    copies: bool = False  # asynchronous copies to shared memory
    barriers: bool = False  # those of shared memory, and the bulk copies that arrive there; from sm_90 on
    maps: bool = False  # copies of boxes by tensor maps; sm_90a
    box_prefetches: bool = False  # requests to L2 for boxes, beside those
    uneven: bool = False  # of tensors whose rows are no multiple of a box's 64 columns, beside those
    warpgroups: tuple[int, ...] = ()  # columns of the products that warpgroups make, of `mma`'s type; sm_90a
    panels: bool = False  # their operands whose rows are 16 numbers
    meetings: bool = False  # barriers that threads of a block meet at from several places of the text
    mma: str = ""  # element type that the tensor cores multiply, as PTX names it; empty if they do not
    tf32: bool = False  # they multiply f32 too, of which they see tf32
