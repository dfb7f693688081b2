"""The axes of prompts' tensors, of which a mesh of devices may divide heads and sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.naming import WRITTEN_WORDS
from ...calls.sharding import Rule
from ...spec.operands import Table

OWN = ("workspace",)  # each rank's: what is in it is of no use to others


def rule_of(table: Table, like: str, words: Mapping[str, str] = {}, **more: Any) -> Rule:
    """The rule of a prompt's function. like: the operand of each head; words: operand -> parameter, where they differ, beside those of all
    prompts; more: of Rule. Parameters of other names than operands are added to those, as functions may call one by another's name."""
    axes = table.axes(("batch token", "token"))
    spoken = {name: word for name, word in WRITTEN_WORDS.items() if name in axes}
    axes |= {word: axes[name] for name, word in {**spoken, **words}.items()} | more.pop("axes", {})
    written = [spoken.get(name, name) for name in table.written if name not in OWN]
    asked = {word: f"return_{name}" for name, word in spoken.items()}
    return Rule(axes, (*written,), anchors=("state", "final_states_out", "out", like), returns=("out", *asked), asked=asked, **more)
