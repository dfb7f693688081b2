"""Steps that read their states through a ring, on a card: the reference's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_replayed_ring import BATCH, LENGTH, SLOT, Steps

from ssmgen import Ring

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16


def on_card(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_card(t) for name, t in value.items()}
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize(("state", "io", "kept"), [(F32, BF16, F32), (BF16, BF16, BF16)])
@pytest.mark.parametrize("size", [(128, 128), (36, 20)], ids=str)
def test_steps_with_a_ring(name, state, io, kept, size):
    s = Steps(name, state, io, *size, kept)
    s.fill([6, 2, LENGTH - 1, 3])
    position, asked = torch.tensor([6, 2, LENGTH - 1, 3]), torch.tensor([0, 0, 0, 1])
    card_state, ring = s.state.cuda(), Ring(*(on_card(t) for t in s.ring))
    for _ in range(2 * LENGTH):
        x = s.token()
        want = s.step(lambda function, *args, **more: function(*args, **more), x, position, ring_flush=asked)
        given = on_card(x | s.weights | s.how | {"ring_position": position, "ring_flush": asked})
        got = s.function(card_state, **given, ring=ring)
        torch.testing.assert_close(got.cpu(), want, rtol=2**-6, atol=1e-2)
        written = (position == LENGTH - 1) | (asked != 0)
        position, asked = torch.where(written, 0, position + 1), torch.zeros(BATCH, dtype=torch.int64)
    live = SLOT[SLOT >= 0].long()
    torch.testing.assert_close(card_state.cpu()[live], s.state[live], rtol=2**-6, atol=2e-2)
