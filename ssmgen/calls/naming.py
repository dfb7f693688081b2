"""Rewrites error sentences: the checks name operands by role, and the sentences name the parameters of the function that was called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Operand -> parameter, for optional outputs of functions over sequences.
WRITTEN_WORDS = {"final_states": "final_states_out", "checkpoints": "checkpoints_out"}
# Roles that are also English words: they name an operand only as the subject of a sentence, or as the object of "overlaps".
_ENGLISH = frozenset(("read", "write", "erase", "checkpoints", "bonus"))


def spoken(sentences: Iterable[str], words: Mapping[str, str]) -> list[str]:
    """The sentences, each once. words: role -> parameter, where they differ. Shapes, in brackets, stay as they are."""
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

    return list(dict.fromkeys(map(one, sentences)))  # several roles may be parts of one parameter
