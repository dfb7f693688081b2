"""Workers of a test run take turns with the cards, and begin with the longest tests."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_files_with_long_tests_begin_first():
    folder = Path(__file__).with_name("gpu")
    assert all((folder / name).exists() for name in cards_of_tests.LONGEST)
    long, usual, same_name = folder / cards_of_tests.LONGEST[1], folder / "test_layers_gpu.py", folder.parent / cards_of_tests.LONGEST[0]
    tests: list[Any] = [SimpleNamespace(path=path, number=n) for n in range(2) for path in (usual, same_name, long)]
    ordered = [(test.path, test.number) for test in sorted(tests, key=cards_of_tests.turn)]
    assert ordered == [(long, 0), (long, 1), (usual, 0), (same_name, 0), (usual, 1), (same_name, 1)], "the others keep their order"


@pytest.mark.parametrize(
    ("given", "used"), [({"maxschedchunk": None}, {"maxschedchunk": 4}), ({"maxschedchunk": 9}, {"maxschedchunk": 9}), ({}, {})]
)
def test_workers_take_few_tests_unless_the_command_says_how_many(given, used):
    options = Namespace(**given)  # without pytest-xdist, there is no such option
    cards_of_tests.take_few(options)
    assert vars(options) == used
