"""Laws of a call of every public function: opcheck; compiled and bound calls are the eager one; a call is explained without a card.
`tests/attack/test_fake_and_meta.py` has the answers of calls on tensors without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import memoryless
import pytest
import torch
from bits import same
from selection import costly
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ssmgen

FORMS = {form.id: form for form in memoryless.forms()}
# In addition to small calls of all functions: draft trees, packed sequences, counts, kept states, noise, layouts, buffers written in place.
PICKED = [
    *("ssu-m2-i64-pad7", "ssu-m1-limit", "tokens-t4-kept-each", "tokens-tree-rows", "tokens-ragged-accepted", "tokens-noisy-kept"),
    *("la-gdn-t4-accepted", "la-kda-each", "la-gla-both", "tree-gdn-rows", "tree-ragged-kda"),
    *("conv-first-states", "conv-last-seq-idx", "conv-last-packed-states", "conv-roll-t3", "conv-ring-windows", "conv-shift-tree"),
    *("conv-shift-children", "conv-shift-saved-windows", "combine-prefix-sink", "combine-pair-mask", "norm-mamba-no-weight"),
    *("replay-step-ragged", "replay-step-advance", "replay-ring-philox-slots"),
    *("layer-mamba", "layer-mamba-gated", "layer-mamba-noise", "layer-mamba-t3-verify", "layer-mamba-t3-accepted", "layer-gdn-bare"),
    *("layer-gdn-no-slots", "layer-gdn-t3-verify", "layer-kda-bounded", "layer-kda-t3-accepted"),
]
SMALL = [name for name in FORMS if name.split("-")[0] in ("shared", "ring", "commit")]
each = pytest.mark.parametrize("name", [*SMALL, *PICKED])
PARTLY = ("combine-pair-mask", "replay-step-ragged")  # they leave some rows of `out` as they are, so a new one's are undefined


def call_of(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function and the arguments of a call, in own memory and always with the same numbers."""
    torch.manual_seed(0)
    return copy.deepcopy(FORMS[name].make())


def assert_same(found: Any, wanted: Any) -> None:
    (ours, tree), (theirs, other) = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    assert tree == other
    assert all(same(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, theirs, strict=True))


class Recorded(TorchDispatchMode):
    """Keeps the operator of this package that is called, and its arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ssmgen":
            self.operator, self.arguments = func, args
        return func(*args, **kwargs or {})


def passes_opcheck(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    for t in pytree.tree_leaves(kwargs):  # opcheck compares results, and NaN is not equal to itself
        if isinstance(t, Tensor) and t.is_floating_point() and t.isnan().any():
            t.nan_to_num_(nan=0.5)
    with Recorded() as recorded:
        function.build(**kwargs).dispatch()
    torch.library.opcheck(recorded.operator, recorded.arguments)


def compiled_is_eager(name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """In one graph with a multiplication after it: the results and all that is written, bit for bit."""
    eager, given = ({n: v for n, v in copy.deepcopy(kwargs).items() if n != "out" or name in PARTLY} for _ in range(2))

    def step(kwargs: dict[str, Any]) -> Any:
        return pytree.tree_map(lambda t: 2 * t.float() if isinstance(t, Tensor) else t, function(**kwargs))

    torch.compiler.reset()
    assert_same(torch.compile(step, fullgraph=True, backend="aot_eager")(given), step(eager))
    assert_same(given, eager)


def bound_is_eager(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """A bound call makes the call as often as it is called, and returns the same tensors each time."""
    eager, given = copy.deepcopy(kwargs), copy.deepcopy(kwargs)
    bound = ssmgen.bind(function, **given)
    for _ in range(3):
        assert_same(bound(), function(**eager))
        assert_same(given, eager)
    assert all(a is b for a, b in zip(pytree.tree_leaves(bound()), pytree.tree_leaves(bound()), strict=True))


@costly(8, 20)
@pytest.mark.filterwarnings("ignore::UserWarning")
@each
def test_opcheck(name):
    passes_opcheck(*call_of(name))


@costly(8, 20)
@each
def test_a_compiled_call_is_the_eager_one(name):
    compiled_is_eager(name, *call_of(name))


@costly(10, 20)
@each
def test_a_bound_call_is_the_eager_one(name):
    bound_is_eager(*call_of(name))


@pytest.mark.parametrize("name", SMALL)
def test_a_call_is_explained_without_a_card(name):
    function, kwargs = call_of(name)
    found = ssmgen.explain(function, **kwargs, arch="sm_90a")
    assert f"-> {found.chosen.rule}" in str(found) and ssmgen.supported(function, **kwargs, arch="sm_90a") == (True, [])
    yes, reasons = ssmgen.supported(function, **kwargs)
    assert not yes and ", which has no CUDA architecture; expected arch" in reasons[0]
    yes, reasons = ssmgen.supported(function, **kwargs | {"pdl": 7}, arch="sm_90a")
    assert not yes and reasons == ["pdl is 7; expected True, False or None"]
