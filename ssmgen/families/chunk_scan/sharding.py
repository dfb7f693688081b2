"""The axes of chunk_scan's tensors."""

from __future__ import annotations

from ...engine.chunks.sharding import rule_of
from .operands import ATTENTIONS, SCAN, WORDS

RULES = {
    "chunk_scan": rule_of(SCAN, "x", axes={"seq_idx": "batch token|token"}),
    **{name: rule_of(table, "v", WORDS[name]) for name, table in ATTENTIONS.items()},
}
