"""The answer to a call does not depend on its tensors' memory: meta, fake, traced or compiled, it is the answer of eager mode."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from itertools import groupby

import memoryless
import pytest
import sharded_calls
import torch
from selection import costly
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import ssmgen
from ssmgen.errors import ArgumentError

DECODE = "mamba2-groups2"
FEW = (DECODE, "conv-update", "gdn-tokens", "conv")


def call_of(name: str, batch: int = sharded_calls.BATCH, monkeypatch: pytest.MonkeyPatch | None = None):
    """(function, its tensors, its other arguments)"""
    if monkeypatch:
        monkeypatch.setattr(sharded_calls, "BATCH", batch)
    function, call = sharded_calls.calls("cpu")[name]
    tensors = {n: t for n, t in call.items() if isinstance(t, Tensor)}
    return getattr(ssmgen, function), tensors, {n: v for n, v in call.items() if n not in tensors}


def wrong(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with one operand of the batch too short."""
    name = next(n for n in ("B", "beta", "conv_state", "bias") if n in tensors)
    return tensors | {name: tensors[name].narrow(0, 0, len(tensors[name]) - 1)}


def sampled() -> list[memoryless.Form]:
    """Three forms of each family, and all that several ranks do: these are of every public recurrence."""
    pick = random.Random(0)
    kinds = {kind: list(forms) for kind, forms in groupby(memoryless.forms(), lambda form: form.id.split("-")[0])}
    return [form for kind, forms in kinds.items() for form in (forms if kind in ("shared", "ring", "commit") else pick.sample(forms, 3))]


def test_meta_and_fake_tensors_are_refused_and_taken_as_memory_is():
    torch.manual_seed(0)
    pick, counts, found = random.Random(1), Counter(), []
    ways = {"meta": memoryless.on_meta, "fake": memoryless.on_fakes}
    for form in sampled():
        found += memoryless.disagreements(form, ways, counts, lambda all_wrong: pick.sample(all_wrong, 4))
    assert not found, "\n".join(found[:5])
    assert counts["refused"] > 150 and counts["taken"] > 60, counts


@costly(1)
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "aot_eager", "dynamic": True}], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [DECODE, "gdn-tokens"])
def test_a_compiled_call_is_refused_as_an_eager_one(name, options):
    function, tensors, others = call_of(name)
    torch._dynamo.reset()
    step = torch.compile(lambda t: function(**t, **others) + 1, fullgraph=True, **options)
    for given in (wrong(tensors), tensors, wrong(tensors)):
        want = memoryless.of_memory(function, given | others)
        if isinstance(want, tuple):
            assert step(given).shape == want[0][0]
            continue
        with pytest.raises(ArgumentError) as e:
            step(given)
        assert e.value.problems == want and type(e.value).__name__ == "ArgumentError"
        assert str(e.value).startswith(str(ArgumentError(function.__name__, want)))
        again = pickle.loads(pickle.dumps(e.value))
        assert type(again) is ArgumentError and str(again) == str(e.value)


def test_in_parts_of_a_graph_it_is_eager_s_own():
    """Dynamo leaves the graph where it may: the call is made and raises, and the code around it can catch the error."""
    function, tensors, others = call_of(DECODE)
    caught = []

    def step(t):
        doubled = t["x"] * 2
        try:
            return function(**t | {"x": doubled}, **others)
        except ArgumentError as e:
            caught.append(e)
            return doubled

    assert torch.equal(torch.compile(step, backend="eager")(wrong(tensors)), tensors["x"] * 2)
    assert [type(e) for e in caught] == [ArgumentError]
    assert caught[0].problems == memoryless.of_memory(function, wrong(tensors) | others)


def test_the_error_comes_ahead_of_what_follows_from_it():
    """After the call comes an addition about which torch would complain."""
    function, tensors, others = call_of(DECODE)
    residual, given = tensors["x"], tensors | {"x": tensors["x"][:, :3]}
    step = torch.compile(lambda t: function(**t, **others) + residual, fullgraph=True, backend="eager")
    with pytest.raises(ArgumentError, match=r"x is \[4, 3, 16\]; expected"):
        step(given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": None}, "q is a NoneType; expected a tensor"),
        ({"g": 3}, "g is a int; expected a tensor"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval is True and beta_sigmoid is False; expected both"),
    ],
)
def test_what_is_no_shape_is_refused_too(change, words):
    function, tensors, others = call_of("gdn-tokens")
    given = tensors | others | change
    with FakeTensorMode() as mode, pytest.raises(ArgumentError, match=words):
        function(**{n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in given.items()})
    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match=words):
        torch.compile(lambda given: function(**given), backend="eager", fullgraph=True)(given)


def test_options_that_no_schema_has():
    function, tensors, others = call_of(DECODE)
    with FakeTensorMode() as mode, pytest.raises(ArgumentError, match="dt_limit is"):
        function(**{n: mode.from_tensor(t) for n, t in tensors.items()}, **others, dt_limit=("low", "high"))


@costly(2)
@pytest.mark.parametrize("how", ["marked", "unbacked"])
@pytest.mark.parametrize("name", FEW)
def test_one_graph_serves_all_batches(name, how, monkeypatch):
    torch._dynamo.reset()
    mark = torch._dynamo.mark_dynamic if how == "marked" else torch._dynamo.decorators.mark_unbacked
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(lambda f, t, others: f(**t, **others), backend=counter, fullgraph=True)
    for batch in (7, 5, 9):
        function, tensors, others = call_of(name, batch, monkeypatch)
        for t in tensors.values():
            if t.shape[0] == batch:
                mark(t, 0)
        step(function, tensors, others)
    assert counter.frame_count == 1
    with pytest.raises(ArgumentError) as e:
        step(function, wrong(tensors), others)
    assert e.value.problems == memoryless.of_memory(function, wrong(tensors) | others)


@pytest.mark.parametrize("name", FEW)
def test_sizes_that_are_symbols_stay_symbols(name):
    function, tensors, others = call_of(name)
    others |= {"scale": 0.5} if name == "gdn-tokens" else {}  # whose default is a number, of a size
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        fakes = {
            n: mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * t.dim()))
            for n, t in tensors.items()
        }
        function(**fakes, **others)
        assert not environment.guards
        with pytest.raises(ArgumentError) as e:
            function(**wrong(fakes), **others)
    assert e.value.problems == memoryless.of_memory(function, wrong(tensors) | others)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_is_refused(strict):
    function, tensors, others = call_of(DECODE)

    class Step(torch.nn.Module):
        def forward(self, t):
            return function(**t, **others)

    program = torch.export.export(Step(), (tensors,), strict=strict)
    assert [str(n.target) for n in program.graph.nodes if "ssmgen" in str(n.target)] == ["ssmgen.selective_state_update.default"]
    with pytest.raises(ArgumentError, match=r"B is \[3, 2, 32\]; expected"):
        torch.export.export(Step(), (wrong(tensors),), strict=strict)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_weights_that_require_grad_are_taken_where_no_graph_is_recorded(backend):
    function, tensors, others = call_of(DECODE)
    tensors["D"] = torch.nn.Parameter(tensors["D"])

    def step(t):
        with torch.no_grad():
            return function(**t, **others)

    torch.compile(step, fullgraph=True, backend=backend)(tensors)
    with pytest.raises(ArgumentError, match="D requires grad"):
        torch.compile(lambda t: function(**t, **others), fullgraph=True, backend=backend)(tensors)


def test_fake_tensors_of_a_device_that_is_not_here(monkeypatch):
    """A program for cards is traced on a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    function, tensors, others = call_of(DECODE)
    with FakeTensorMode():
        fakes = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for n, t in tensors.items()}
        for pdl in (None, True):
            assert function(**fakes, **others, pdl=pdl).device.type == "cuda"
        with pytest.raises(ArgumentError, match=r"B is \[3, 2, 32\]; expected"):
            function(**wrong(fakes), **others)


def test_operators_themselves_and_what_asks_about_calls():
    function, tensors, others = call_of(DECODE)
    meta = {n: t.to("meta") for n, t in tensors.items()}
    for given, yes in ((meta, True), (wrong(meta), False)):
        found, reasons = ssmgen.supported(function, **given, **others, arch="sm_90a")
        assert found is yes, reasons
        call = function.build(**given, **others)
        if yes:
            call.dispatch()
            assert ssmgen.bind(function, **given, **others)().is_meta
        else:
            with pytest.raises(ArgumentError, match=r"B is \[3, 2, 32\]; expected"):
                call.dispatch()
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in tensors.items()}
        assert ssmgen.supported(function, **fakes, **others, arch="sm_90a") == (True, [])
