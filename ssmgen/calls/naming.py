"""Sentences of errors, whose checks know operands by their roles, in the words of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Operand -> parameter, of what functions over sequences write and may be given.
WRITTEN_WORDS = {"final_states": "final_states_out", "checkpoints": "checkpoints_out"}
# Roles that are English words as well: only the subject of a sentence, and the object of "overlaps", is an operand.
_ENGLISH = frozenset(("read", "write", "erase", "checkpoints", "bonus"))


def spoken(sentences: Iterable[str], words: Mapping[str, str]) -> list[str]:
    """words: role -> parameter, where they differ. Shapes, in brackets, stay as they are."""
    if not words:
        return list(sentences)
    found = re.compile(r"\[[^\]]*\]|(?<![\w.])(" + "|".join(map(re.escape, words)) + r")(?![\w\]])")

    def one(sentence: str) -> str:
        def name(match: re.Match[str]) -> str:
            role, ahead = match[1], sentence[: match.start()]
            if role is None or (role in _ENGLISH and ahead and not ahead.endswith((" overlaps ", ", ", " and "))):
                return match[0]
            return words[role]

        return found.sub(name, sentence)

    return [one(sentence) for sentence in sentences]
