"""A call of every public function on a card: compiled and bound calls are the eager one."""

from __future__ import annotations

from typing import Any

import pytest
import sharded_calls
import test_public_calls as laws
import torch

import ssmgen

pytestmark = pytest.mark.gpu
each = pytest.mark.parametrize("name", sharded_calls.calls("cpu"))


def call_of(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    function, kwargs = sharded_calls.calls("cuda")[name]
    return getattr(ssmgen, function), kwargs


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["mamba2-pool", "conv-states", "gdn-tokens", "replay"])
def test_opcheck(name):
    laws.passes_opcheck(*call_of(name))


@each
def test_a_compiled_call_is_the_eager_one(name):
    laws.compiled_is_eager(name, *call_of(name))


@each
def test_a_bound_call_is_the_eager_one(name):
    laws.bound_is_eager(*call_of(name))
