"""How sequences of chunk_delta_rule's functions go on from one rank's tokens to the next one's."""

from __future__ import annotations

from ...engine.chunks.context import rule

RULES = dict.fromkeys(("chunk_gated_delta_rule", "chunk_delta_rule"), rule("v", parts=True))
