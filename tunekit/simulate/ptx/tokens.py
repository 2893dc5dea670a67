"""The text of a PTX module as words, each with its place (PTX ISA chapter 4: Syntax).

Comments are blanked, not cut, so that every word keeps its offset and its line.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from tunekit.errors import UserError

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_WORD = re.compile(
    r"[%$A-Za-z_][\w$]*(?:(?:\.|::)[\w$]+)*"  # opcodes with modifiers, registers, %tid.x, labels, symbols
    r"|0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b"
    r"|\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?"
    r"|\.[A-Za-z_][\w$]*(?:::\w+)*"  # directives and types
    r'|"[^"\n]*"'
    r"|<<|>>|\S"  # the last catches every other character, so that none is passed over
)
_NOT_NEWLINE = re.compile(r"[^\n]")
_INLINE = re.compile(r"^[ \t]*// (begin|end) inline asm[ \t]*$", re.MULTILINE)


class PtxSyntaxError(UserError, ValueError):
    """A text that is no PTX, or PTX that the reader does not take. ``str()`` has name, line, reason and text."""

    def __init__(self, name: str, line: int, reason: str, text: str) -> None:
        self.line = line
        self.reason = reason
        self.text = text
        super().__init__(f"{name}:{line}: {reason}: '{text}'" if text else f"{name}:{line}: {reason}")


def _blank(match: re.Match[str]) -> str:
    found = match.group()
    return found if found[0] == '"' else _NOT_NEWLINE.sub(" ", found)


class Tokens:
    """The words of a text, and a reading position. The word after the last is ""."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.text = _COMMENT.sub(_blank, text)
        found = list(_WORD.finditer(self.text))
        self.words = [match.group() for match in found] + [""]
        self.starts = [match.start() for match in found] + [len(self.text)]
        self.position = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        marks = list(_INLINE.finditer(text))
        self._marks = [mark.start() for mark in marks]
        self._begins = [mark[1] == "begin" for mark in marks]

    def in_inline_assembly(self) -> bool:
        """Whether the position is between NVVM's comments ``begin inline asm`` and ``end inline asm``."""
        before = bisect_right(self._marks, self.starts[self.position]) - 1
        return before >= 0 and self._begins[before]

    def line(self, position: int) -> int:
        """The line of a word, counted from 1."""
        return bisect_right(self._newlines, self.starts[position]) + 1

    def error(self, reason: str, position: int | None = None) -> PtxSyntaxError:
        at = self.position if position is None else position
        line = self.line(at)
        lines = self.text.splitlines()
        text = lines[line - 1].strip() if line <= len(lines) else ""
        return PtxSyntaxError(self.name, line, reason, text)

    @property
    def word(self) -> str:
        return self.words[self.position]

    def take(self) -> str:
        word = self.words[self.position]
        if not word:
            raise self.error("the text ends here, in the middle of a declaration")
        self.position += 1
        return word

    def accept(self, word: str) -> bool:
        if self.words[self.position] != word:
            return False
        self.position += 1
        return True

    def expect(self, word: str) -> None:
        if not self.accept(word):
            raise self.error(f"expected '{word}', found '{self.word or 'the end of the text'}'")

    def identifier(self) -> str:
        if not is_identifier(self.word):
            raise self.error(f"expected a name, found '{self.word or 'the end of the text'}'")
        return self.take()

    def skip_past(self, word: str) -> None:
        try:
            self.position = self.words.index(word, self.position) + 1
        except ValueError:
            raise self.error(f"no '{word}' follows") from None

    def skip_group(self, opening: str, closing: str) -> None:
        """Past the group that starts at the position, nested ones included."""
        start = self.position
        self.expect(opening)
        depth = 1
        while depth:
            word = self.words[self.position]
            if not word:
                raise self.error(f"'{opening}' is never closed", start)
            depth += (word == opening) - (word == closing)
            self.position += 1


def is_identifier(word: str) -> bool:
    return bool(word) and (word[0].isalpha() or word[0] in "%$_")


def is_number(word: str) -> bool:
    return word[:1].isdigit()
