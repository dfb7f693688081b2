"""Calls on tensors without memory: forms of calls, their mistakes, and the answers of meta, fake and compiled calls.

`PYTHONPATH=.:tests/support python tests/attack/memoryless.py 1000 20` tries all of them, 20 forms compiled, and prints how many there were.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import combine_cases
import conv_cases
import conv_matrices
import la_cases
import la_trees
import layer_calls
import layer_cases
import norm_cases
import replay_cases
import sharded_calls
import ssu_cases
import ssu_token_cases
import torch
from test_ring import BF16, Step
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import ssmgen
from ssmgen.errors import ArgumentError

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A way of calling a public function, and its operands."""

    id: str
    make: Callable[[], tuple[Callable[..., Any], Arguments]]


def forms() -> list[Form]:
    """Calls of all public functions: the calls of their own tests, and calls of several ranks."""
    found = [Form(f"{kind}-{c.id}", lambda c=c, made=made: made(c)) for kind, made, cases in _families() for c in cases]
    shared = sharded_calls.calls("cpu")
    found += [Form(f"shared-{n}", lambda call=call: (getattr(ssmgen, call[0]), call[1])) for n, call in shared.items()]
    found += [Form(f"ring-{n}", lambda n=n: _step(n)) for n in ("gated_delta_rule", "delta_rule", "kda")]
    return found + [Form(f"commit-{n}", lambda n=n: _commit(n)) for n in ("gated_delta_rule", "kda")]


def _families() -> list[tuple[str, Callable[[Any], tuple[Callable[..., Any], Arguments]], list[Any]]]:
    def own(make: Callable[[Any, str], Any]) -> Callable[[Any], tuple[Callable[..., Any], Arguments]]:
        def made(case: Any) -> tuple[Callable[..., Any], Arguments]:
            call = make(case, "cpu")
            return call.function, call.kwargs

        return made

    def ssu(case: Any) -> tuple[Callable[..., Any], Arguments]:
        call = ssu_cases.make_call(case, "cpu")
        return ssmgen.selective_state_update, dict(zip(ssmgen.selective_state_update.names, call.args, strict=False)) | call.kwargs

    def conv(case: Any) -> tuple[Callable[..., Any], Arguments]:
        function = ssmgen.causal_conv1d_update if isinstance(case, conv_cases.UpdateCase) else ssmgen.causal_conv1d
        return function, conv_cases.make(case, "cpu").kwargs

    layers = [
        *(layer_cases.GDN_MATRIX + layer_cases.KDA_MATRIX + layer_cases.MAMBA_MATRIX),
        *(layer_cases.GDN_TOKENS + layer_cases.KDA_TOKENS + layer_cases.MAMBA_TOKENS),
    ]
    return [
        ("ssu", ssu, ssu_cases.small_matrix()),
        ("tokens", lambda c: (ssmgen.selective_state_update, ssu_token_cases.make_call(c, "cpu").kwargs), ssu_token_cases.matrix()),
        ("la", own(la_cases.make_call), la_cases.matrix() + la_cases.kv_matrix()),
        ("tree", own(la_cases.make_call), la_trees.cases()),
        ("conv", conv, conv_matrices.matrix() + conv_matrices.update_matrix()),
        ("combine", lambda c: (ssmgen.combine_splits, combine_cases.make(c, "cpu").kwargs), combine_cases.matrix()),
        ("norm", lambda c: (ssmgen.gated_rms_norm, norm_cases.make(c, "cpu").kwargs), norm_cases.matrix()),
        ("replay", own(replay_cases.make), replay_cases.matrix()),
        ("layer", own(layer_calls.make), layers),
    ]


def _step(name: str) -> tuple[Callable[..., Any], Arguments]:
    step = Step(name, BF16)
    return step.function, {"state": step.state, **step.inputs, **step.options, "ring": step.ring}


def _commit(name: str) -> tuple[Callable[..., Any], Arguments]:
    step = Step(name, BF16)
    given = {"state": step.state, "ring": step.ring, "num_accepted_tokens": torch.tensor([1, 0, 2]), **step.options}
    return getattr(ssmgen, f"{name}_commit"), given


def wrong(kwargs: Arguments) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    """Functions that make the arguments with one axis of one tensor an element longer or shorter, or with one more axis."""
    leaves, tree = pytree.tree_flatten(kwargs)
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(kwargs)[0]]
    for i, t in enumerate(leaves):
        if not isinstance(t, Tensor):
            continue
        longer = [[n + (b == a) for b, n in enumerate(t.shape)] for a in range(t.dim())]
        changed = [(f"[{a}] + 1", partial(t.new_zeros, shape)) for a, shape in enumerate(longer)]
        changed += [(f"[{a}] - 1", partial(t.narrow, a, 0, n - 1)) for a, n in enumerate(t.shape) if n]
        for how, new in [*changed, ("[None]", partial(t.unsqueeze, 0))]:
            yield f"{names[i]}{how}", partial(_with, leaves, tree, t, new)


def _with(leaves: list[Any], tree: Any, old: Tensor, new: Callable[[], Tensor]) -> Arguments:
    made = new()
    return pytree.tree_unflatten([made if v is old else v for v in leaves], tree)


# The answer to a call: the sentences of its error, or a description of its results.


def _described(result: Any) -> tuple[Any, ...]:
    return tuple([(tuple(t.shape), t.stride(), t.dtype) for t in (result if isinstance(result, tuple) else (result,))])


def _said(run: Callable[[], Any]) -> Any:
    try:
        return _described(run())
    except ArgumentError as e:
        return e.problems


def of_memory(function: Callable[..., Any], kwargs: Arguments) -> Any:
    """The answer of a call in memory: the call is checked but not run."""

    def check() -> Any:
        call = function.build(**kwargs)
        call.plan()
        return call.result

    return _said(check)


def on_meta(function: Callable[..., Any], kwargs: Arguments) -> Any:
    twins: dict[int, Tensor] = {}

    def twin(t: Tensor) -> Tensor:
        return twins.setdefault(id(t), torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))

    return _said(lambda: function(**pytree.tree_map_only(Tensor, twin, kwargs)))


def on_fakes(function: Callable[..., Any], kwargs: Arguments) -> Any:
    with FakeTensorMode() as mode:
        return _said(lambda: function(**pytree.tree_map_only(Tensor, mode.from_tensor, kwargs)))


def compiled(function: Callable[..., Any], kwargs: Arguments, **options: Any) -> Any:
    torch._dynamo.reset()
    step = torch.compile(lambda kwargs: function(**kwargs), **options)
    return _said(lambda: step(kwargs))


def disagreements(
    form: Form, ways: dict[str, Callable[..., Any]], counts: Counter[str], choose: Callable[[list[Any]], list[Any]] = list
) -> list[str]:
    """Answers of any of `ways` that differ from a call in memory, for the form itself and the chosen wrong calls; counts all."""
    function, kwargs = form.make()
    found = []
    for how, make in [("as it is", lambda: kwargs), *choose(list(wrong(kwargs)))]:
        given = make()
        want = of_memory(function, given)
        counts["refused" if isinstance(want, list) else "taken"] += 1
        for way, said_by in ways.items():
            got = said_by(function, given)
            counts[way] += 1
            if got != want:
                counts["disagreements"] += 1
                found.append(f"{form.id} {how}: {way} says {got}, and memory {want}")
    return found


def main(wrong_ones: int, compiled_forms: int) -> int:
    """Tries `wrong_ones` wrong calls of every form on meta and fake, and two of `compiled_forms` forms, compiled in all ways. Prints
    differences and counts."""
    torch.manual_seed(0)
    pick, counts, found = random.Random(0), Counter(), []
    ways: dict[str, Callable[..., Any]] = {"meta": on_meta, "fake": on_fakes}
    for form in forms():
        found += disagreements(form, ways, counts, lambda w: pick.sample(w, min(len(w), wrong_ones)))
    ways = {
        " ".join(map(str, options.values())): partial(compiled, **options)
        for options in (
            {"backend": backend, "fullgraph": whole, "dynamic": dynamic}
            for backend, whole, dynamic in product(("eager", "aot_eager"), (True, False), (None, True))
        )
    }
    for form in pick.sample(forms(), compiled_forms):
        found += disagreements(form, ways, counts, lambda w: pick.sample(w, 2))
    print(*found[:50], f"{len(forms())} forms {dict(counts)}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
