"""Sharding rules of prompt families, from their operand tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.naming import WRITTEN_WORDS
from ...calls.sharding import Rule
from ...spec.operands import Table

OWN = ("workspace",)  # each rank has its own workspace, which is not read after the call


def rule_of(table: Table, like: str, words: Mapping[str, str] = {}, **more: Any) -> Rule:
    """The rule of a function over prompts. like: its parameter with tokens and heads; words: operand -> parameter, where names differ.
    A parameter may have the name of another operand: `words` win. more: fields of Rule."""
    axes = table.axes(("batch token", "token"))
    spoken = {name: word for name, word in WRITTEN_WORDS.items() if name in axes}
    axes |= {word: axes[name] for name, word in {**spoken, **words}.items()} | more.pop("axes", {})
    written = [spoken.get(name, name) for name in table.written if name not in OWN]
    asked = {word: f"return_{name}" for name, word in spoken.items()}
    return Rule(axes, (*written,), anchors=("state", "final_states_out", "out", like), returns=("out", *asked), asked=asked, **more)
