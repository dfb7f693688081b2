"""Which parameter sets of costly tests run always."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from selection import chosen, costly


def sets(*sizes: int) -> list[Any]:
    """Tests of a product of parameters with these numbers of values."""
    return [SimpleNamespace(callspec=SimpleNamespace(indices=dict(enumerate(values)))) for values in product(*map(range, sizes))]


@pytest.mark.parametrize("name", ["test_one", "test_another", "test_third"])
def test_every_value_occurs_before_one_is_repeated_without_need(name):
    tests = sets(3, 4)
    found = chosen(tests, 4, name)
    assert {value for test in found for value in test.callspec.indices.items()} == {(0, i) for i in range(3)} | {(1, i) for i in range(4)}
    assert found == [test for test in tests if test in found], "in their order"


def test_functions_of_a_file_begin_at_different_values():
    tests = sets(3)
    assert len({tests.index(chosen(tests, 1, f"test_{n}")[0]) for n in range(20)}) == 3


def test_no_more_are_chosen_than_there_are():
    assert len(chosen(sets(2), 5, "test")) == 2 and chosen([], 1, "test") == [] == chosen(sets(2), 0, "test")


@costly(2, 3)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_two_of_sixteen_sets_run_always_and_three_with_the_matrix(request, a, b):
    ours = [item for item in request.session.items if getattr(item, "originalname", "") == request.node.originalname]
    most = {"not matrix": 2, "matrix": 3}.get(request.config.getoption("markexpr"), 5)
    assert len(ours) <= most, "fewer if the command names some"
