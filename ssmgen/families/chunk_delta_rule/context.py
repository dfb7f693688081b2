"""Context parallel calls of chunk_delta_rule's functions: the state passes from one rank's tokens to the next rank's."""

from __future__ import annotations

from ...engine.chunks.context import rule

RULES = dict.fromkeys(("chunk_gated_delta_rule", "chunk_delta_rule"), rule("v", parts=True))
