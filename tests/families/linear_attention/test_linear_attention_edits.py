"""The emulator finds each of these mistakes in the kernels of linear_attention."""

from __future__ import annotations

from dataclasses import replace

import decode_cases as laws
import la_cases as of
import pytest
from emulated_calls import needs_emulator
from la_cases import BF16, F32, GDN, matrix
from selection import costly

pytestmark = pytest.mark.usefixtures("one_thread")

POOL, NINE = replace(GDN, out=F32), replace(GDN, tokens=9, batch=2, heads=2, out=F32)
RAGGED, ACCEPTED = (next(c for c in matrix() if c.id == name) for name in ("gdn-ragged-few-columns", "gdn-t4-accepted"))
ROUND = "for (auto& row : h) for (auto& part : row) { Pack<State, kVec> r; pack(part, r); unpack(r, part); }"
EDITS = {
    "no wait": (POOL, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "no padding": (POOL, "if (u64(slot) >= u64(slots) || slot == pad_slot_id)", "if (false)", "outside of every operand"),
    "no barrier before a chunk": (NINE, "if (first) {\n      __syncthreads();", "if (first) {", "in shared memory"),
    "wrong decay": (POOL, "exp2_approx(-rate * softplus", "exp2_approx(-0.999f * rate * softplus", "off by"),
    "q not scaled": (POOL, "+ 1e-6f) * scale;", "+ 1e-6f);", "off by"),
    "wrong key head": (POOL, "key_head = head / kHeadsPerKey", "key_head = head % 2", "off by"),
    "key not normalised": (POOL, "error * token.write_scale", "error", "off by"),
    "output of the old state": (NINE, "fmaf(error, token.mix, token.query_scale * seen)", "token.query_scale * seen", "off by"),
    "rounded between tokens": (replace(NINE, state=BF16), "token = staged_token(c);", f"token = staged_token(c);{ROUND}", "off by"),
    "first column": (ACCEPTED, "column * state_indices_column", "0 * state_indices_column", "off by"),
    "states kept past the last": (RAGGED, "t < rows_kept && ", "", "store"),
    "destinations past the last": (RAGGED, "t < dst_columns ? ", "true ? ", "load outside of every operand"),
    "a state per token in one slot": (RAGGED, "+ t * dst_state_indices_token", "", "off by"),
}


@costly(4)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    case, *edit = EDITS[edit]
    laws.a_mistake_is_found(of, case, tuple(edit))
