"""The parts of tools.live that run without vLLM: its checks of answers, and its installation."""

from __future__ import annotations

import re
import types
from collections import Counter
from importlib.metadata import distributions

import pytest

from ssmgen.compat import vllm
from ssmgen.compat.shared.replacing import NotReplaced, Replacement
from ssmgen.errors import UnsupportedError
from tools.live.__main__ import HERE, SERVED, WITHIN, install, problems
from tools.live.worker import MODELS
from tools.serving.calls import Calls, counted

OWN = {"tokens": [[3, 4], [5, 6]], "best": [[[-0.5, -1.0]] * 2] * 2}
FINE = {"outcome": {"engine.f": "replaced"}, "warnings": [], "refused": {}}


def fine(model):
    return FINE | {"taken": dict.fromkeys(SERVED[model], 2)}


@pytest.mark.parametrize("model", SERVED)
def test_nothing_is_wrong_with_equal_answers_that_ssmgen_served(model):
    within = {**OWN, "best": [[[-0.5 + WITHIN / 2, -1.0]] * 2] * 2}
    assert problems(model, OWN, OWN, fine(model)) == problems(model, OWN, within, fine(model)) == []
    for name in SERVED[model]:
        taken = {"taken": dict.fromkeys(SERVED[model] - {name}, 2)}
        assert problems(model, OWN, OWN, FINE | taken) == [f"{model}: ssmgen was not called for {name}"]


@pytest.mark.parametrize(
    ("ours", "state", "said"),
    [
        ({"tokens": [[3, 4], [5, 7]]}, {}, "answers differ: 1 of 2 equal"),
        ({"best": [[[-0.5 + 2 * WITHIN, -1.0]] * 2] * 2}, {}, "answers differ: 2 of 2 equal"),
        ({}, {"taken": {}}, f"not called for {', '.join(sorted(SERVED['kimi_linear']))}"),
        ({}, {"refused": {"selective_state_update": 3}}, "refused calls of {'selective_state_update': 3}"),
        ({}, {"warnings": ["vllm's own f runs"]}, "warned:\n    vllm's own f runs"),
        ({}, {"outcome": {"engine.f": "kept: its parameters are others"}}, "not replaced:\n    engine.f: kept"),
    ],
)
def test_each_thing_that_is_wrong_is_said(ours, state, said):
    (found,) = problems("kimi_linear", OWN, OWN | ours, fine("kimi_linear") | state)
    assert said in found and found.startswith("kimi_linear: ")


def test_calls_that_raise_are_not_counted_as_taken():
    def function(fits: bool | None) -> int:
        if fits is None:
            raise NotReplaced
        if not fits:
            raise UnsupportedError("f", ["no kernel"])
        return 7

    taken, refused = Counter(), Counter()
    call = counted(function, "f", taken, refused)
    assert call(True) == call(fits=True) == 7 and call.__wrapped__ is function
    with pytest.raises(UnsupportedError):
        call(False)
    with pytest.raises(NotReplaced):
        call(None)
    assert taken == {"f": 2} and refused == {"f": 1}


def test_the_plugins_functions_are_counted(monkeypatch):
    def function():
        raise UnsupportedError("f", ["no kernel"])

    engine = types.SimpleNamespace(replacements=(Replacement("m", "f", function), Replacement("m", "g", function, around=True)))
    monkeypatch.setattr(vllm, "_ENGINE", engine)
    calls = Calls()
    calls.count(vllm)
    for each in engine.replacements:
        with pytest.raises(UnsupportedError):
            each.function()
    assert calls.refused == {"f": 1} and not calls.taken and engine.replacements[1].function is function


def test_every_model_has_functions_to_serve():
    assert set(MODELS) == set(SERVED)


def test_packages_are_pinned_and_one_kind_of_each():
    lines = [line for line in (HERE / "packages.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][\w.]*", line) for line in lines), lines
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names)) and {"vllm", "triton"} <= set(names)


def test_a_folder_with_vllm_is_used_as_it_is_and_gets_the_platforms_entry_point(tmp_path):
    (tmp_path / "vllm").mkdir()
    install(tmp_path)
    install(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (entry,) = found.entry_points
    assert (entry.group, entry.name, entry.value) == ("vllm.platform_plugins", "interpreted", "tools.live.platform:activate")
