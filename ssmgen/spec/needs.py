"""The parts of the template library that a kernel includes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Parts of `templates/lib` that only some kernels use; templates read them as `needs.math`. Loads and stores of single numbers and of
    aligned vectors are always included, and so are the conversions of the types in the spec's fields."""

    math: bool = False  # exponentials and reciprocals
    circle: bool = False  # approximate sines and cosines, in addition
    logs: bool = False  # logarithms, in addition
    elements: bool = False  # vectors gathered from elements that are unaligned or not contiguous
    guarded: bool = False  # gathered vectors with only some of their elements
    bytes: bool = False  # 8-bit loads, and with `narrow` stores
    narrow: bool = False  # states with scales
    raw: bool = False  # stores of numbers that are copied without arithmetic
    streaming: bool = False  # stores that need not stay in L2
    prefetch: bool = False  # bulk prefetches into L2
    lines: bool = False  # prefetches of single lines into L2
    matrices: bool = False  # loads of tensor core operands from shared memory
    shared_pairs: bool = False  # loads of two words at once from shared memory
    shared_quads: bool = False  # loads and stores of four words at once; warpgroups have them
    matrix_turns: bool = False  # matrices that are transposed in registers
    matrix_stores: bool = False  # stores of matrices to shared memory, from sm_90 on; warpgroups have them
    places: bool = False  # loads and stores of one or four words, at constant offsets from a lane's address in shared memory
    placed_pairs: bool = False  # loads of two words at such offsets
    placed_pair_stores: bool = False  # stores of one or two words at such offsets
    placed_stores: bool = False  # stores of matrices at such offsets
    copies: bool = False  # asynchronous copies to shared memory
    barriers: bool = False  # barriers in shared memory, and bulk copies that signal them; from sm_90 on
    once: bool = False  # bulk copies of data that need not stay in L2
    maps: bool = False  # copies of boxes by tensor maps; sm_90a
    box_prefetches: bool = False  # prefetches of boxes into L2
    uneven: bool = False  # copies of boxes from tensors whose rows are not a multiple of 64 columns
    warpgroups: tuple[int, ...] = ()  # columns of the warpgroups' products, of `mma`'s type; sm_90a
    pinned: bool = False  # addresses in global memory that several loads share
    peers: bool = False  # loads and stores of four words of another block of the cluster; warpgroups have them
    registers: bool = False  # warpgroups change their threads' registers, also without products; sm_90a and sm_100a
    own_thread: bool = False  # the thread's index, read again where it is used
    panels: bool = False  # operands of warpgroups whose rows are 16 numbers
    meetings: bool = False  # barriers that threads of a block reach from several places in the text
    differences: bool = False  # of two 16-bit numbers at once, from sm_90 on
    mma: str = ""  # element type of the tensor cores' operands, as PTX names it; empty without tensor cores
    tf32: bool = False  # tensor cores also multiply f32, rounded to tf32
