"""Workers of a test run take turns with the cards."""

from __future__ import annotations

import cards_of_tests
import pytest


@pytest.mark.parametrize(
    ("worker", "given", "count", "order"),
    [
        (0, None, 4, "0,1,2,3"),
        (6, None, 4, "2,3,0,1"),
        (1, "5,2", 2, "2,5"),
        (1, "GPU-a,GPU-b,99", 2, "GPU-b,GPU-a"),  # the driver ignores what follows an unknown card
        (3, None, 1, None),
        (3, "2", 1, None),
        (0, None, 0, None),
    ],
)
def test_a_worker_sees_all_cards_and_its_own_first(worker, given, count, order):
    assert cards_of_tests.order(worker, given, count) == order
