"""Arguments that are not tensors are checked before anything is written: every such parameter of every public function, with values of
every kind.

Many more questions for ssmgen.supported: PYTHONPATH=. python tests/attack/test_options.py 50000
"""

from __future__ import annotations

import random
import sys
from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from public_calls import BY_NAME, bits_of, call_of, scalars_of
from selection import costly

import ssmgen
from ssmgen.errors import ArgumentError


class OldBool:
    """np.True_ as numpy before 2.3 has it: an index, with a warning."""

    dtype = np.dtype(bool)

    def __index__(self) -> int:
        return 1


VALUES: dict[str, Any] = {
    "none": None, "true": True, "false": False, "0": 0, "1": 1, "-1": -1, "7": 7, "32": 32, "33": 33, "2^31": 2**31, "2^63": 2**63,
    "2^64": 2**64, "-2^64": -(2**64), "10^30": 10**30, "10^5000": 10**5000, "0.0": 0.0, "0.5": 0.5, "1.0": 1.0, "-2.5": -2.5,
    "1e-60": 1e-60, "1e39": 1e39, "-1e300": -1e300, "nan": nan, "inf": inf, "-inf": -inf, "j": 1j, "empty": "", "x": "x", "no": "no",
    "long": "x" * 10**5, "vk": "vk", "kv": "kv", "silu": "silu", "swish": "swish", "sigmoid": "sigmoid", "f32": "f32", "bf16": "bf16",
    "e": "e", "'2'": "2", "bytes": b"vk", "list": [0.0, 1.0], "limits": (0.0, 1.0), "half limits": (0, inf), "turned": (1.0, 0.0),
    "nan limits": (0.0, nan), "wide": (0.0, 1e39), "three": (0.0, 1.0, 2.0), "words": ("a", "b"), "dict": {}, "set": set(),
    "object": object(), "type": int, "0-d": torch.tensor(1), "tensor": torch.ones(3), "bool tensor": torch.ones(2, dtype=torch.bool),
    "array": np.ones(3), "int8": np.int8(1), "int64": np.int64(-1), "float32": np.float32(0.5), "float64": np.float64(0.5),
    "bool_": np.True_, "old bool": OldBool(), "fraction": Fraction(1, 2),
}  # fmt: skip

SWITCH = {"true", "false"}
INTEGERS = {"0", "1", "-1", "7", "32", "33", "2^31", "int8", "int64"}
POSITIVE = {"1", "7", "32", "33", "2^31", "int8"}
NUMBERS = {"0", "1", "-1", "7", "32", "33", "2^31", "0.0", "0.5", "1.0", "-2.5", "1e-60", "float64"}
NOT_NEGATIVE = NUMBERS - {"-1", "-2.5"}
# The VALUES that a parameter takes, by parameter or by function and parameter. All others are wrong.
TAKEN: dict[str, set[str]] = {
    "scale": NUMBERS | {"none"},
    "lower_bound": NUMBERS | {"none"},
    "key_scale": NUMBERS,
    "pad_slot_id": INTEGERS,
    "state_layout": {"vk", "kv"},
    "dt_limit": {"none", "limits", "half limits"},
    "segments": POSITIVE - {"2^31"} | {"none"},
    "philox_rounds": {"0", "1", "7", "32", "int8"},
    "replay_selective_state_update.philox_rounds": {"0", "1", "7", "int8"},
    "checkpoint_selective_state_update.philox_rounds": {"0", "1", "7", "int8"},
    "pdl": SWITCH | {"none"},
    "eps": NOT_NEGATIVE,
    "A_floor": NOT_NEGATIVE,
    **dict.fromkeys(("A_form", "rotary"), set[str]()),
    "norm_eps": NOT_NEGATIVE - {"0", "0.0", "1e-60"},
    "mamba2_layer.norm_eps": NOT_NEGATIVE,
    "norm_group_size": POSITIVE | {"none"},
    "group_size": INTEGERS | {"none"},
    "causal_conv1d.activation": {"none", "true", "false", "silu", "swish"},
    "causal_conv1d_update.activation": {"none", "true", "false", "silu", "swish"},
    "dilation": {"1", "7", "int8"},
    "skinny_linear.activation": {"none"},
    "activation": {"silu", "swish", "sigmoid"},
    "norm_activation": {"silu", "swish", "sigmoid"},
    "lse_base": {"'2'", "e"},
    "lse_base_out": {"none", "'2'", "e"},
    "empty_lse": {"inf", "-inf"},
    "precision": {"f32", "bf16"},
    "max_tokens": POSITIVE | {"0", "none"},
    "materialize_selective_state.max_tokens": POSITIVE | {"0"},
    "checkpoint_selective_state_update.max_tokens": POSITIVE | {"none"},
    **dict.fromkeys(
        (
            "update_state", "use_qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "dt_softplus", "norm_before_gate", "A_is_log",
            "zero_padding", "after_conv", "two_kernels", "internal_pdl", "return_lse", "skip_single", "return_final_states",
            "return_checkpoints", "linear_gate", "delta_softplus", "channels_first",
            "unit_offset", "round_before_weight", "trap_sigmoid", "ring_ready",
        ),
        SWITCH,
    ),
}  # fmt: skip


def taken(function: str, parameter: str) -> set[str]:
    return TAKEN.get(f"{function}.{parameter}") or TAKEN[parameter]


def complaint(e: ArgumentError, parameter: str) -> bool:
    return any(p.startswith(f"{parameter} is ") for p in e.problems)


@costly(12)
@pytest.mark.parametrize("name", BY_NAME)
def test_wrong_values_are_refused_and_nothing_is_written(name):
    function = BY_NAME[name]
    for parameter in scalars_of(function):
        call = call_of(name)
        before = bits_of(call)
        for label in VALUES.keys() - taken(name, parameter):
            with pytest.raises(ArgumentError) as e:
                function(**call | {parameter: VALUES[label]})
            assert complaint(e.value, parameter) and len(str(e.value)) < 400, (parameter, label, str(e.value)[:400])
        assert bits_of(call) == before, parameter


@costly(12)
@pytest.mark.parametrize("name", BY_NAME)
def test_right_values_are_not(name):
    """Another argument may contradict them, which is also an ArgumentError. Calls that `supported` accepts must run."""
    function = BY_NAME[name]
    for parameter in scalars_of(function):
        for label in taken(name, parameter):
            call = call_of(name) | {parameter: VALUES[label]}
            before = bits_of(call)
            good, _ = ssmgen.supported(function, **call, arch="sm_90a")
            assert bits_of(call) == before
            try:
                function(**call)
            except ArgumentError as e:
                assert not good and f"{parameter} is {VALUES[label]!r}; expected" not in str(e), (parameter, label)
                assert bits_of(call) == before


@pytest.mark.parametrize("name", BY_NAME)
def test_all_that_looks_at_a_call_says_the_same(name):
    function = BY_NAME[name]
    wrong = dict.fromkeys(scalars_of(function), VALUES["object"])
    call = call_of(name)
    before = bits_of(call)
    asked = (lambda f, **kwargs: f(**kwargs), ssmgen.bind, lambda f, **kwargs: ssmgen.explain(f, **kwargs, arch="sm_90a"))
    said = []
    for ask in (*asked, ssmgen.warm, ssmgen.is_warm):
        with pytest.raises(ArgumentError) as e:
            ask(function, **call | wrong)
        said.append(e.value.problems)
    assert [p.partition(" is an object; expected ")[0] for p in said[0]] == list(wrong) and all(problems == said[0] for problems in said)
    assert ssmgen.supported(function, **call | wrong, arch="sm_90a") == (False, said[0])
    assert bits_of(call) == before


def test_wrong_options_and_wrong_tensors_are_in_one_message():
    call = call_of("gated_delta_rule") | {"pad_slot_id": "x", "scale": nan, "g": torch.zeros(1, 5, 7)}
    with pytest.raises(ArgumentError) as e:
        ssmgen.gated_delta_rule(**call)
    assert e.value.problems == [
        "pad_slot_id is 'x'; expected a 64-bit integer",
        "scale is nan; expected a number in the range of float32 or int64 or None",
        "g is [1, 5, 7]; expected [batch, heads] = [4, 4] or [heads] = [4]",
    ]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gdn_layer", {"scale": 2**64}),
        ("kda_layer", {"scale": 2**64}),
        ("mamba2_layer", {"norm_eps": 10**30}),
        ("gla", {"update_state": "no"}),
    ],
)
def test_states_are_as_they_were(name, wrong):
    """These wrote the window, or the state, and raised OverflowError then; or took "no" for yes."""
    call = call_of(name)
    before = bits_of(call)
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        BY_NAME[name](**call | wrong)
    assert bits_of(call) == before


def test_integers_of_other_packages_are_integers():
    for name in ("selective_state_update", "kda", "causal_conv1d_update"):
        outs = [BY_NAME[name](**call_of(name) | {"pad_slot_id": slot}) for slot in (0, np.int32(0), np.uint8(0))]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_an_integer_is_taken_where_a_number_is():
    for scale in (2, 2.0, np.float64(2)):
        assert torch.equal(ssmgen.kda(**call_of("kda") | {"scale": scale}), ssmgen.kda(**call_of("kda") | {"scale": 2.0}))


@pytest.mark.parametrize("batches", ["12", [0.5], 3, None, [True], [-1], torch.ones(2), [[1]]])
def test_batches_are_sizes(batches):
    for ask in (ssmgen.warm, ssmgen.is_warm):
        with pytest.raises(ArgumentError, match="batches is "):
            ask(ssmgen.kda, **call_of("kda"), batches=batches)


@pytest.mark.parametrize("arch", ["", "sm90", "sm_90b", 90, b"sm_90", ["sm_90a"], torch.ones(2)])
def test_architectures_are_names(arch):
    with pytest.raises(ArgumentError, match="arch is "):
        ssmgen.explain(ssmgen.kda, **call_of("kda"), arch=arch)
    assert ssmgen.supported(ssmgen.kda, **call_of("kda"), arch=arch)[0] is False


@pytest.mark.parametrize("thing", [None, 5, "kda", torch.ones(3), np.ones(3), [], ssmgen.warm, ssmgen.Ring, lambda: None])
def test_what_is_no_operator_is_an_argument_error(thing):
    for ask in (ssmgen.bind, ssmgen.explain, ssmgen.is_warm, ssmgen.warm):
        with pytest.raises(ArgumentError, match="operator is"):
            ask(thing, torch.ones(3))
    assert ssmgen.supported(thing, torch.ones(3))[0] is False


def ask(count: int, seed: int = 0) -> int:
    """Makes `count` calls in which one to four arguments have any value. Returns how many are supported; each of these must run."""
    rng = random.Random(seed)
    odd = [*VALUES.values(), torch.ones(2, 2, device="meta"), torch.ones(0), torch.ones(2, 2).to_sparse(), (torch.ones(2),) * 4, [None] * 4]
    yes = 0
    for _ in range(count):
        name = rng.choice(list(BY_NAME))
        legal = call_of(name)
        call = legal | {n: rng.choice(odd) for n in rng.sample(list(legal) + scalars_of(BY_NAME[name]), rng.randint(1, 4))}
        before = bits_of(legal)
        good, reasons = ssmgen.supported(BY_NAME[name], **call, arch="sm_90a")
        assert good is (not reasons) and all(isinstance(r, str) for r in reasons) and bits_of(legal) == before
        if good:
            yes += 1
            BY_NAME[name](**call)
    return yes


def test_supported_answers_whatever_it_is_asked():
    assert 0 < ask(600) < 600


if __name__ == "__main__":
    trials = int(sys.argv[1])
    print(f"{trials} calls, {ask(trials)} of them supported, which ran; the others were refused in words")
