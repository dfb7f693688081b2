"""Operators and how their tests make a call and compare it with float64: for laws that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import combine_cases
import conv_cases
import conv_laws
import decode_cases
import la_cases
import narrow_cases
import norm_cases
import replay_cases
import ssu_cases
import ssu_token_cases
from emulated_calls import emulate
from kernel_laws import edited, found_in_words


class Subject(NamedTuple):
    make: Callable[[Any, str], Any]  # a case and a device -> a call, with a method `run`
    expected: Callable[[Any], Any]  # of a call that has not run: the results, with bounds
    assert_matches: Callable[[Any, Any], None]  # everything written is within its bounds, and nothing else has changed


SUBJECTS = {
    "linear_attention": Subject(la_cases.make_call, la_cases.expected, decode_cases.assert_matches),
    "selective_state_update": Subject(ssu_cases.make_call, ssu_cases.expected, ssu_cases.assert_matches),
    "several_tokens": Subject(ssu_token_cases.make_call, ssu_token_cases.expected, decode_cases.assert_matches),
    "fewer_bits": Subject(narrow_cases.Call, lambda call: None, lambda call, _: narrow_cases.assert_matches(call)),
    "gated_rms_norm": Subject(norm_cases.make, norm_cases.expected, norm_cases.assert_matches),
    "combine_splits": Subject(combine_cases.make, combine_cases.expected, combine_cases.assert_matches),
    "causal_conv1d": Subject(conv_cases.make, conv_laws.expected, conv_laws.assert_matches),
    "replay": Subject(replay_cases.make, replay_cases.expected, replay_cases.assert_matches),
}


def a_mistake_is_found(operator: str, edit: tuple[Any, str, str, str], count: int = -1) -> None:
    """edit: the case of a call, the text to replace in its kernels, the replacement, and words of the finding."""
    case, old, new, words = edit
    with found_in_words(words):
        is_accurate(operator, case, "cpu", lambda call: emulate(call, change=edited(old, new, count=count)))


def is_accurate(operator: str, case: Any, device: str, run: Callable[[Any], Any]) -> None:
    """Within its bounds of float64."""
    subject = SUBJECTS[operator]
    call = subject.make(case, device)
    want = subject.expected(call)
    run(call)
    subject.assert_matches(call, want)
