"""Paths through a kernel's text that end without having waited for the upstream kernel."""

from __future__ import annotations

import re

WAIT = "wait_for_upstream();"


def exits_without_wait(text: str) -> list[str]:
    """The conditions of each such path, joined by " and "; "always" for a path without any. Loops may have no passes. Lambdas and local
    types are not followed."""
    body = re.sub(r"//[^\n]*|^\s*#[^\n]*", "", text[text.index('extern "C"') :], flags=re.M)
    found: list[str] = []
    body = body[body.index(") {") + 2 :]
    _Paths(body, found).block([])
    return found


class _Paths:
    """Reads statements from left to right. A path is a list of the conditions that led to it; paths that have waited are dropped."""

    def __init__(self, text: str, found: list[str]):
        self.text, self.at, self.found = text, 0, found

    def block(self, start: list[str]) -> None:
        """The kernel's body."""
        for path in self._statement([start]):
            self._ends(path)

    def _ends(self, path: list[str]) -> None:
        self.found.append(" and ".join(path) or "always")

    def _blank(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _closed(self, opening: str, closing: str) -> str:
        """The text between the brackets that open here."""
        first, depth = self.at, 1
        while depth:
            self.at += 1
            depth += (self.text[self.at] == opening) - (self.text[self.at] == closing)
        self.at += 1
        return " ".join(self.text[first + 1 : self.at - 1].split())

    def _word(self, *words: str) -> str:
        self._blank()
        for word in words:
            if re.compile(rf"{word}\b").match(self.text, self.at):
                self.at += len(word)
                self._blank()
                return word
        return ""

    def _statement(self, paths: list[list[str]]) -> list[list[str]]:
        """The paths after the statement that begins here."""
        self._blank()
        if self.text[self.at] == "{":
            self.at += 1
            while True:
                self._blank()
                if self.text[self.at] == "}":
                    self.at += 1
                    return paths
                paths = self._statement(paths)
        if self._word("if"):
            self._word("constexpr")
            condition = self._closed("(", ")")
            yes = self._statement([[*path, condition] for path in paths])
            no = [[*path, f"not ({condition})"] for path in paths]
            no = self._statement(no) if self._word("else") else no
            # The condition says nothing if neither branch waits or ends.
            same = len(yes) == len(no) == len(paths)
            return paths if same else [*yes, *no]
        if self._word("for", "while", "switch"):
            self._closed("(", ")")
            self._statement(paths)
            return paths
        return self._simple(paths)

    def _simple(self, paths: list[list[str]]) -> list[list[str]]:
        first = self.at
        while self.text[self.at] != ";":
            if self.text[self.at] in "{(":
                self._closed(*("{}" if self.text[self.at] == "{" else "()"))
            else:
                self.at += 1
        self.at += 1
        said = self.text[first : self.at].strip()
        if said == WAIT:
            return []
        if re.match(r"return\b", said):
            for path in paths:
                self._ends(path)
            return []
        return paths
