"""Signatures tell people, editors and type checkers all parameters of a function; other arguments are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from public_calls import BY_NAME, bits_of, call_of
from torch import Tensor

import ssmgen
from ssmgen.calls import operator as calls
from ssmgen.families.linear_attention.call import PoolOptions
from ssmgen.families.linear_attention.operands import FUNCTIONS

KEYWORDS = {name: list(signature(function).parameters) for name, function in BY_NAME.items()}
RINGED = ("gated_delta_rule", "delta_rule", "kda")
VERIFYING = {"ring", "ring_ready", "parents", "intermediate_state_indices"}  # of these alone
REPLAYED = ("gated_delta_rule", "kda")
REPLAYING = {"ring_position", "ring_flush"}  # of these alone
RESULTS = (
    Tensor,
    Tensor | tuple[Tensor, ...],
    Tensor | tuple[Tensor, Tensor],
    Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor],
)
POOLED = tuple(name for name, function in FUNCTIONS.items() if not function.commit)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_parameter_is_shown_with_its_default(name):
    parameters = signature(BY_NAME[name]).parameters.values()
    assert not [p.name for p in parameters if p.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)]
    assert all(p.default is not Parameter.empty for p in parameters if p.kind is Parameter.KEYWORD_ONLY)
    hints = get_type_hints(BY_NAME[name])
    assert set(hints) == {*KEYWORDS[name], "return"}
    assert hints["return"] in RESULTS


def test_a_type_checker_sees_the_parameters_and_the_result_of_a_builder():
    hints, same = get_type_hints(calls.operator), Callable[calls.P, calls.R]
    assert hints["return"] == Callable[[same], same] and hints["like"] is str
    assert (Path(ssmgen.__file__).parent / "py.typed").exists()  # without which checkers look at no package


def test_the_options_of_a_pool_are_keywords_of_all_that_decode():
    ours = dict.fromkeys(PoolOptions._fields)
    for name in POOLED:
        parameters = signature(BY_NAME[name]).parameters
        verifies = VERIFYING if name in RINGED else {"intermediate_state_indices"} if name == "lightning_attn" else set()
        alone, has = VERIFYING | REPLAYING, verifies | (REPLAYING if name in REPLAYED else set())
        mine = [n for n in ours if n not in alone or n in has]
        assert all(parameters[n].kind is Parameter.KEYWORD_ONLY for n in mine) and set(parameters) & alone == has
        assert [str(parameters[n].annotation) for n in mine] == [str(PoolOptions.__annotations__[n].__forward_arg__) for n in mine]
    defaults = {n: signature(ssmgen.kda).parameters[n].default for n in ours}
    said = {"state_layout": "vk", "pad_slot_id": -1, "update_state": True, "zero_padding": True, "philox_rounds": 10, "ring_ready": False}
    assert defaults == dict.fromkeys(ours) | said
    assert signature(ssmgen.rwkv7).parameters["scale"].default == 1.0


# Keywords that a function does not have.

PRIVATE = ("objections", "options", "name", "form", "read", "erase", "write", "alpha", "commit", "materialize", "given", "builder", "self")


@pytest.mark.parametrize("name", BY_NAME)
def test_a_keyword_of_another_function_is_refused_and_that_one_named(name):
    call = call_of(name)
    before = bits_of(call)
    others = dict.fromkeys(chain.from_iterable(KEYWORDS.values()))
    for keyword in [k for k in (*others, *PRIVATE) if k not in KEYWORDS[name]]:
        owners = [n for n in BY_NAME if keyword in KEYWORDS[n]]
        with pytest.raises(TypeError) as e:
            BY_NAME[name](**call, **{keyword: None})
        several = f"{', '.join(owners[:-1])} and {owners[-1]} have it" if owners[1:] else ""
        having = several or f"{owners[0] if owners else 'no function'} has it"
        assert str(e.value) == f"{name}() got an unexpected keyword {keyword!r}; {having}"
    assert bits_of(call) == before


@pytest.mark.parametrize(
    ("name", "more", "having"),
    [
        ("gated_delta_rule", {"lower_bound": -5}, "kda_layer, kda, gdn2 and kda_commit have it"),
        (
            "delta_rule",
            {"A_log": torch.zeros(2)},
            "gdn_layer, kda_layer, gated_delta_rule, kda, gdn2, comba, ",
        ),
        ("gated_delta_rule", {"w": torch.zeros(2)}, "gdn2, rwkv7 and rwkv6 have it"),
        ("gated_delta_rule", {"p": torch.zeros(2)}, "chunk_comba and comba have it"),
        ("gla", {"ring": None}, "gated_delta_rule, kda, delta_rule, gated_delta_rule_commit and kda_commit have it"),
        ("gated_delta_rule", {"erase": torch.zeros(2)}, "no function has it"),
    ],
)
def test_whatever_is_asked_of_such_a_call(name, more, having):
    function, call = BY_NAME[name], call_of(name) | more
    for ask in (lambda *args, **kwargs: function(**kwargs), ssmgen.bind, ssmgen.explain, ssmgen.warm, ssmgen.is_warm):
        with pytest.raises(TypeError, match=having):
            ask(function, **call)
    assert ssmgen.supported(function, **call, arch="sm_90a")[1][0].startswith(f"TypeError: {name}() got an unexpected keyword")


def test_all_unknown_keywords_are_named():
    with pytest.raises(TypeError) as e:
        ssmgen.gla(**call_of("gla"), beta=1, nonsense=2)
    said = [line.partition("; ")[0] for line in str(e.value).splitlines()]
    assert said == ["gla() got an unexpected keyword 'beta'", "gla() got an unexpected keyword 'nonsense'"]


def test_too_many_and_too_few_arguments_are_python_s_to_say():
    call: Sequence[object] = list(call_of("delta_rule").values())
    with pytest.raises(TypeError, match=r"delta_rule\(\) takes 5 positional arguments but 6 were given"):
        ssmgen.delta_rule(*call)
    with pytest.raises(TypeError, match=r"delta_rule\(\) missing 4 required positional arguments: 'q', 'k', 'v', and 'beta'"):
        ssmgen.delta_rule(call[0])
