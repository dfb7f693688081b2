"""ssmgen-native: it handles calls as Python does, and keeps no object that it should release."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import native_build
import pytest
import torch
from programs import succeeds
from test_ops import Loaded
from torch.utils._python_dispatch import TorchDispatchMode

import ssmgen
from ssmgen.calls import fast_path
from ssmgen.cli import bug_report
from ssmgen.errors import ArgumentError, ConfigError
from ssmgen.launch import native


class Calls:
    """A row of a call with two tensors, an option and a pair, and the pointers that its plans ran with."""

    def __init__(self, resolve=None, new=(), returned=(0,), values=None, names=("b", "limit", "on")):
        self.a, self.b = torch.zeros(4, 6), torch.zeros(3)
        values = values or (self.a, self.b, (0.0, 1.0), True)
        self.ran: list[tuple[int, ...]] = []
        flat = [item for v in values for item in (v if isinstance(v, (tuple, list)) else [v])]
        positions = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
        resolve = resolve or (lambda pointers: SimpleNamespace(at=lambda ordered: lambda: self.ran.append(ordered)))
        self.pattern = fast_path.Pattern(flat, resolve, positions)
        plain = [i for i in range(len(flat)) if i not in positions]
        self.row = fast_path.row_of(len(values) - len(names), names, values, plain, self.pattern, new, returned)

    def call(self, *args, **kwargs):
        return self.row(args, kwargs)

    def again(self, **change):
        """The call that was seen, with other arguments."""
        named = {"a": self.a, "b": self.b, "limit": (0.0, 1.0), "on": True} | change
        return self.call(named.pop("a"), **named)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def resized():
    t = torch.zeros(4, 6)
    t.resize_(2, 6)
    return t


LIKE = {  # each is taken for the tensor of the call that was seen
    "elsewhere": lambda: torch.ones(4, 6),
    "view": lambda: torch.zeros(9, 6)[3:7],
    "freed": lambda: torch.zeros(4, 6),
}
OTHERS = {
    "shape": lambda: torch.zeros(4, 5),
    "axes": lambda: torch.zeros(4, 6, 1),
    "strides": lambda: torch.zeros(6, 4).t(),
    "dtype": lambda: torch.zeros(4, 6, dtype=torch.bfloat16),
    "meta": lambda: torch.zeros(4, 6, device="meta"),
    "subclass": lambda: Loaded(torch.zeros(4, 6), requires_grad=False),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False),
    "gradient": lambda: torch.zeros(4, 6, requires_grad=True),
    "negative bit": lambda: torch._neg_view(torch.zeros(4, 6)),
    "sparse": lambda: torch.zeros(4, 6).to_sparse(),
    "inference": lambda: inferred(),
    "resized": resized,
    "no tensor": lambda: 3.0,
    "none": lambda: None,
}


def inferred():
    with torch.inference_mode():
        return torch.zeros(4, 6)


@pytest.mark.parametrize("what", LIKE)
def test_a_call_like_the_one_seen(way, what):
    seen = Calls()
    for _ in range(3):
        given = LIKE[what]()
        assert seen.again(a=given) is given and seen.ran[-1] == (given.data_ptr(), seen.b.data_ptr())
        assert seen.call(given, on=True, limit=(0.0, 1.0), b=seen.b) is given
    assert len(seen.ran) == 6


@pytest.mark.parametrize("what", OTHERS)
def test_a_tensor_that_is_another(way, what):
    seen = Calls()
    assert seen.again(a=OTHERS[what]()) is None and not seen.ran
    assert seen.again() is seen.a


@pytest.mark.parametrize(
    "change",
    [{"on": 1}, {"on": False}, {"on": None}, {"limit": [0.0, 1.0]}, {"limit": (0.0, 1.0, 2.0)}, {"limit": (0, 1)}, {"limit": (0.0, 2.0)},
     {"limit": 0.0}, {"limit": (0.0, torch.zeros(1))}, {"more": 1}, {"b": torch.zeros(3, dtype=torch.int32)}],
)  # fmt: skip
def test_arguments_that_are_others(way, change):
    seen = Calls()
    assert seen.again(**change) is None
    assert (
        seen.call(seen.a, seen.b, limit=(0.0, 1.0), on=True)
        is seen.call(seen.a, c=seen.b, limit=(0.0, 1.0), on=True)
        is seen.call()
        is None
    )
    assert not seen.ran


def test_an_object_whose_shape_has_changed(way):
    seen = Calls()
    assert seen.again() is seen.a
    seen.a.resize_(2, 6)
    assert seen.again() is None
    seen.a.resize_(4, 6)
    assert seen.again() is seen.a


def test_one_tensor_twice_is_another_call(way):
    t = torch.zeros(4)
    two, one = Calls(values=(t, torch.zeros(4)), names=()), Calls(values=(t, t), names=())
    assert two.call(t, t) is None and two.call(t, torch.zeros(4)) is t
    assert one.call(t, t) is t


def test_weights_that_require_grad_where_no_graph_is_recorded(way):
    weight, b = torch.zeros(4, requires_grad=True), torch.zeros(4)
    with torch.no_grad():
        seen = Calls(values=(weight, b), names=())
        assert seen.call(weight, b) is weight
        assert seen.call(weight.detach(), b) is None
    assert seen.call(weight, b) is None
    with torch.inference_mode():
        seen.call(weight, b)  # may be known, and must not fail


def test_tensors_of_a_transform_are_none_of_ours(way):
    seen, asked = Calls(), []

    def inside(t):
        asked.append(seen.again(a=t))
        return t

    torch.func.vmap(inside)(torch.zeros(2, 4, 6))
    assert asked == [None] and not seen.ran


def test_fake_tensors(way):
    seen = Calls()
    with torch._subclasses.FakeTensorMode():
        assert seen.again(a=torch.zeros(4, 6)) is None
    assert not seen.ran


def test_modes_that_see_operators_do_not_disturb(way):
    """torch's own guards have not always looked past them. Such a call is found, or continues to the checks."""
    seen = Calls()
    with Passing():
        assert seen.again() in (None, seen.a)
    with torch.device("meta"):
        assert seen.again() is seen.a
    assert seen.again() is seen.a


def test_what_is_made_comes_behind_and_several_come_back(way):
    made = []

    def make():
        made.append(torch.zeros(2))
        return made[-1]

    seen = Calls(new=(make, make), returned=(2, 0, 3))
    one, a, two = seen.again()
    assert [one, two] == made and a is seen.a
    assert seen.ran == [tuple(t.data_ptr() for t in (seen.a, seen.b, one, two))]
    assert type(seen.again()) is tuple


def test_plans_are_resolved_once_and_bounded(way, monkeypatch):
    monkeypatch.setattr(fast_path.Pattern, "limit", 3)
    asked = []

    def resolve(pointers):
        asked.append(pointers)
        return SimpleNamespace(at=lambda ordered: lambda: None)

    seen = Calls(resolve)
    for _ in range(3):
        assert seen.again() is seen.a
    assert len(asked) == 1
    kept = [torch.zeros(4, 6) for _ in range(20)]
    for t in kept * 2:
        assert seen.again(a=t) is t
    assert len(asked) <= 41 and len(seen.pattern.plans) <= 3


def test_what_is_raised_on_the_way_arrives(way):
    def refuse(*_):
        raise ArgumentError("it", ["wrong"])

    for seen in (Calls(refuse), Calls(lambda p: SimpleNamespace(at=lambda ordered: refuse)), Calls(new=(refuse,))):
        for _ in range(2):
            with pytest.raises(ArgumentError, match="wrong"):
                seen.again()


def test_nothing_is_held_and_nothing_let_go_of_twice(way):
    """Tensors, options and results, over calls that are found and calls that are not."""
    seen = Calls(new=(lambda: torch.zeros(2),), returned=(0, 2))
    pair, other = (0.0, 1.0), torch.zeros(5)
    watched = (seen.a, seen.b, other, pair, seen.row, None, True)

    def some(count):
        for _ in range(count):
            seen.again(limit=pair)
            seen.again(a=other)
            seen.again(limit=(pair, 1.0))
            seen.call(seen.a)

    some(10)
    gc.collect()
    gc.disable()  # collected garbage of other tests would let go of None thousands of times
    try:
        before = [sys.getrefcount(v) for v in watched]
        some(2000)
        after = [sys.getrefcount(v) for v in watched]
    finally:
        gc.enable()
    assert all(abs(now - n) < 1000 for now, n in zip(after, before, strict=True)), (before, after)


def test_what_a_row_holds_goes_with_it(way):
    class Kept:
        def __call__(self):
            return torch.zeros(2)

    def alive():
        gc.collect()
        return sum(isinstance(o, Kept) for o in gc.get_objects())

    maker = Kept()
    seen = Calls(new=(maker,))
    maker.row = seen.row  # a circle
    seen.again()
    assert alive() == 1
    del seen, maker
    assert alive() == 0


def test_items_of_a_list_live_as_long_as_the_call(way):
    """Another thread, or the function that makes the output, may take the items out of it during the call."""
    ring = [torch.zeros(64), torch.zeros(64)]
    seen = Calls(values=(torch.zeros(4), ring), names=(), new=(lambda: ring.clear() or torch.zeros(64),), returned=(1, 2, 3))
    given = [torch.full((64,), 2.0), torch.full((64,), 3.0)]
    ring[:] = [given[0], torch.full((64,), 4.0)]
    first, second, _ = seen.call(torch.zeros(4), ring)
    assert not ring and first is given[0] and second.eq(4).all()


def test_threads_share_rows_and_plans(way, monkeypatch):
    monkeypatch.setattr(fast_path.Pattern, "limit", 5)
    seen, wrong = Calls(), []

    def many(seed):
        own = [torch.zeros(4, 6) for _ in range(7)]
        for i in range(1500):
            t = own[(i * seed) % 7]
            if seen.again(a=t) is not t:
                wrong.append(t)

    threads = [threading.Thread(target=many, args=(n,)) for n in (1, 2, 3, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(seen.ran) == 6000


def test_a_launch_lets_go_of_the_gil():
    """If the queue of launches is full, it waits for a host function, which may need the GIL."""
    pause, counted = ctypes.CDLL(None).usleep, []
    enqueue = native_build.module().Enqueue(ctypes.cast(pause, ctypes.c_void_p).value, 300_000, 0, 0, None)
    thread = threading.Thread(target=lambda: [counted.append(time.monotonic()) or time.sleep(0.01) for _ in range(10)])
    thread.start()
    assert enqueue() == 0
    assert len(counted) == 10
    thread.join()


def test_wrong_arguments_are_python_errors():
    made = native_build.module()
    for wrong in (
        lambda: made.Row(1),
        lambda: made.Row(1, (), (3,), (), (0,), id, 3, (), ()),
        lambda: made.Plan(0, 1, [], 2),
        lambda: made.Enqueue("a"),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises((IndexError, RuntimeError)):
        made.Row(1, (), (3,), (7,), (), id, 3, (), ())
    with pytest.raises(TypeError):
        made.Row(0, (), (), (), (), id, 3, (), (0,))(1, 2)


def found_in(folder: Path, *, deny: bool = False, change: str = "pass") -> tuple[str, str]:
    """(the result, the warnings) of a process that sees a folder."""
    asked = "print(native.found() and 'native'); " * 2
    program = f"from ssmgen.launch import native; {change}; {asked}print(native.state())"
    env = {"PYTHONPATH": f"{Path(ssmgen.__file__).parents[1]}:{folder}", "SSMGEN_NATIVE": "deny" if deny else "allow"}
    done = succeeds(program, env=env)
    return done.stdout, done.stderr


def test_it_is_found_if_it_fits(tmp_path):
    folder = Path(native_build.module().__file__).parent
    assert found_in(folder) == (f"native\nnative\n{ssmgen.__version__}, used\n", "")
    assert found_in(folder, deny=True) == ("None\nNone\ndenied by SSMGEN_NATIVE\n", "")
    out, warned = found_in(folder, change="import torch; torch.__version__ = '9.8'")
    words = (
        f"it was built for ssmgen {ssmgen.__version__} and torch {torch.__version__}; expected {ssmgen.__version__} and 9.8. "
        "Install it again."
    )
    assert out == f"None\nNone\nleft out: {words}\n" and warned.count(words) == 1 and "RuntimeWarning" in warned
    (tmp_path / "ssmgen_native.py").write_text("raise ImportError('undefined symbol: it')")
    out, warned = found_in(tmp_path)
    assert out == "None\nNone\nleft out: undefined symbol: it\n" and warned.count("undefined symbol: it") == 1


def test_without_it_nothing_is_said(monkeypatch):
    monkeypatch.delenv("SSMGEN_NATIVE")
    monkeypatch.setitem(sys.modules, "ssmgen_native", None)
    native.found.cache_clear()
    assert native.found() is None and bug_report.describe()["ssmgen-native"] == "not installed"
    monkeypatch.setenv("SSMGEN_NATIVE", "no")
    native.found.cache_clear()
    with pytest.raises(ConfigError, match="SSMGEN_NATIVE"):
        native.found()
    native.found.cache_clear()
