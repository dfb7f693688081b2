"""chunk_scan by warpgroups: that wrong kernels are found."""

from __future__ import annotations

import pytest
import scan_cases as laws
from kernel_laws import edited, found
from selection import few
from test_chunk_scan_warpgroups import PART, SMALL, by, needs_emulator

# Mistakes. (parts, text to replace, replacement, words of the finding; off: a result is wrong)

EDITS = {
    "M: no wait for a chunk": (
        1,
        "      wait_full(i);\n      const Matrix rows_of_C",
        "      const Matrix rows_of_C",
        "in shared memory, which",
    ),
    "M: no wait for a part's chunk": (2, "i < summed; i += 2) {\n      wait_full(i);", "i < summed; i += 2) {", "in shared memory, which"),
    "M: one arrival too few": (
        1,
        "arrive_together(prepared, buffer, lane);",
        "if (row_block) arrive_together(prepared, buffer, lane);",
        "nobody ends",
    ),
    "M: the phase before": (1, "barrier_wait(prepared, i % 2, i / 2 % 2)", "barrier_wait(prepared, i % 2, 0)", "tiles["),
    "M: zeros in other lanes' places": (
        1,
        "= 0;  // above the diagonal it stays zero\n    __syncwarp();\n",
        "= 0;\n",
        "also writes, with no barrier",
    ),
    "copies: no wait for room": (
        1,
        "        wait_empty(i);\n        if (lane == 0)",
        "        if (lane == 0)",
        "copies to, and that thread has not waited",
    ),
    "copies: fewer bytes expected": (1, "full, stage, 4 * kStageWords", "full, stage, 4 * kAtX", "nobody ends"),
    "copies: of one chunk only": (1, "token = n * kChunk", "token = 0", "off"),
    "decays: one warp for all chunks": (1, "i = warp - 1; i < steps_end; i += 2", "i = warp - 1; i < steps_end; i += 1", "readings["),
    "room before it is free": (1, "barrier_init(empty, i, 8)", "barrier_init(empty, i, 4)", "has read, with no barrier between"),
    "prepared: not fenced": (
        1,
        "      fence_for_async();\n      arrive_together(prepared",
        "      arrive_together(prepared",
        "no fence_for_async between",
    ),
    "prepared: not waited for": (1, "      wait_prepared(i);\n      float of_state", "      float of_state", "product of tiles["),
    "M and x: made anew too early": (1, "barrier_wait(consumed, buffer, (uses + 1) % 2);", "", "tiles["),
    "y: read too early": (
        1,
        "barrier_wait(consumed, buffer, (uses - 1) % 2);\n      write(",
        "write(",
        "has read, with no barrier between",
    ),
    "y: made anew too early": (1, "barrier_wait(written, buffer, (turn + 1) % 2);", "", "tiles["),
    "y: products not waited for": (1, "wgmma_wait<1>();", "", "names as landed what products in flight sum up"),
    "state: changed in flight": (
        1,
        "      wgmma_wait<0>();\n      wgmma_landed(S);\n      arrive_together(empty, stage",
        "      arrive_together(empty, stage",
        "in flight",
    ),
    "state: products not fenced": (
        1,
        "      wgmma_fence();\n#pragma unroll\n      for (u32 k = 0; k < kState / 16; ++k) wgmma_64<",
        "      for (u32 k = 0; k < kState / 16; ++k) wgmma_64<",
        "no wgmma_fence",
    ),
    "state: not decayed": (1, "decay(next > i ? by : 1.f);", "", "off"),
    "state: decayed at the end": (1, "decay(next > i ? by : 1.f);", "decay(by);", "off"),
    "parts: read before they are there": (
        2,
        "    cluster_arrive();\n    cluster_wait();\n\n",
        "",
        "a peer that may not have begun",
    ),
    "parts: begun before they are joined": (
        2,
        "    cluster_arrive();\n    cluster_wait();\n#pragma unroll\n    for (u32 i",
        "#pragma unroll\n    for (u32 i",
        "has read, with no barrier",
    ),
    "parts: overwritten before they are read": (2, "meet(1, 384);", "", "has written, with no barrier"),
    "parts: of other lengths": (2, "summed = rank < last_part ? own_chunks : 0", "summed = rank < last_part ? own_chunks - 1 : 0", "off"),
    "parts: their decays": (2, "by[r] = __uint_as_float(word[0])", "by[r] = 1.f", "off"),
    "no upstream": (1, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}


@needs_emulator
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    parts, old, new, words = EDITS[edit]
    with found(words):
        laws.is_accurate(by(parts, 4, change=edited(old, new)), SMALL, 330 if parts == 1 else PART + 200, 0.1)


# Edits for the last chunk of a packed sequence, which tokens of another sequence follow.
PACKED_EDITS = {
    "copies not waited for": ("wait_all_copies();", "", "copy to"),
    "copies not fenced": ("fence_for_async();\n          arrive_together(full", "arrive_together(full", "no fence_for_async between"),
    "copied whole": ("rows < kChunk)", "rows < 0)", "off"),
}


@needs_emulator
@pytest.mark.parametrize("edit", PACKED_EDITS)
def test_broken_kernels_of_packed_sequences_are_found(edit):
    old, new, words = PACKED_EDITS[edit]
    with found(words):
        laws.neighbours_do_not_matter(by(1, 2, change=edited(old, new)), SMALL, (65, 3))


# Edits for states that start again within a row, after large or infinite states; and for states at positions that NaN follows.
ID_EDITS = {
    "M: across a diagonal": (" && 16 * kRow + column + 1 >= from[side]", "", "off"),
    "M: across blocks": ("from[e] == block_from ? exp2_approx(s[e] - block_first) : 0.f", "exp2_approx(s[e] - block_first)", "off"),
    "y: from the state before": ("factor.low == 0.f ? 0.f : of_state[at]", "of_state[at]", "off"),
    "state: not begun anew": ("(by == 0.f ? 0.f : S[e]) * by", "S[e] * by", "off"),
    "ids: without the one ahead": ("n ? id_ahead : id[0]", "id[0]", "off"),
}
POSITION_EDITS = {
    "x behind a position": ("2 * of + 1 < count ? high : 0.f", "high", "off"),
    "not waited for": ("wgmma_wait<0>();\n        wgmma_landed(sum);", "", "in flight"),
    "from a state that has decayed": (
        "store_checkpoints(next);\n      round_state();",
        "decay(0.5f);\n      store_checkpoints(next);\n      round_state();",
        "off",
    ),
}


@needs_emulator
@pytest.mark.parametrize("edit", few(ID_EDITS))
def test_broken_kernels_of_rows_with_ids_are_found(edit):
    old, new, words = ID_EDITS[edit]
    with found(words):
        laws.ids_go_on(by(change=edited(old, new)), SMALL)


@needs_emulator
@pytest.mark.parametrize("edit", POSITION_EDITS)
def test_broken_kernels_of_positions_are_found(edit):
    old, new, words = POSITION_EDITS[edit]
    with found(words):
        laws.checkpoints_of_a_batch(by(change=edited(old, new, "store_checkpoints")), SMALL)
