"""Linear attention on several tokens whose rows are so long that fewer of them are staged at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decode_cases import assert_matches
from emulated_calls import chosen, emulate, needs_emulator
from la_cases import F32, Case, expected, make_call


@needs_emulator
@pytest.mark.parametrize("rule", ["gla", "kda"])
def test_long_rows_leave_room_for_fewer_tokens(rule):
    """K = 512: fewer are staged at a time, and the results are the usual ones."""
    case = Case("long", rule=rule, heads=1, group=1, K=512, V=64, tokens=5, batch=1, out=F32)
    call = make_call(case, "cpu")
    want = expected(call)
    spec = chosen(call)
    assert 1 <= spec.chunk < 8 and spec.shared_bytes <= 48 * 1024 < replace(spec, chunk=2 * spec.chunk).shared_bytes
    emulate(call, spec)
    assert_matches(call, want)
