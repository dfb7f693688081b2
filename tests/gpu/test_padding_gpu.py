"""Padded rows whose output stays as it is, on the card."""

from __future__ import annotations

import pytest
import torch
from test_padding import CALLS, KEPT, padded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("null", [-1, 0])
@pytest.mark.parametrize("name", CALLS)
def test_the_output_of_padded_rows_stays(name, null):
    function, make = CALLS[name]
    usual, left = ({n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in make(pad_slot_id=null).items()} for _ in range(2))
    for _ in range(2):  # as a call that is new, and as one that was seen
        function(**usual)
        function(**left, zero_padding=False)
    rows = padded({n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in usual.items()}, {2, 4} | ({0} if null else set()))
    assert not usual["out"].cpu()[rows].any() and left["out"].cpu()[rows].eq(KEPT).all()
    assert torch.equal(usual["out"].cpu()[~rows], left["out"].cpu()[~rows]) and torch.equal(usual["state"], left["state"])
