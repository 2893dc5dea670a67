"""What a PTX text declares that a launch depends on: kernel parameters and static shared memory (PTX ISA chapter 5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tunekit.simulate.ptx.module import Variable

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?", re.DOTALL)
# .param .align 64 .b8 name[128]   .param .u64 .ptr .global .align 16 name   .shared .align 16 .b8 name[1024]
_DECLARATION = r"\.{space}\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<kind>[bsuf]\d+|pred)\s+"
_PARAMETER = re.compile(
    _DECLARATION.format(space="param") + r"(?:\.ptr\b(?:\s*\.(?!align)\w+)*(?:\s*\.align\s+\d+)?\s+)?"
    r"(?P<name>[\w$]+)\s*(?:\[(?P<count>\d+)\])?"
)
_SHARED = re.compile(
    r"(?P<extern>\.extern\s+)?" + _DECLARATION.format(space="shared") + r"(?P<name>[\w$]+)\s*(?:\[(?P<count>\d*)\])?"
)


@dataclass(frozen=True)
class DeclaredKernel:
    """A kernel's parameters, in order, and the bytes of its static shared memory."""

    parameters: tuple[Variable, ...]
    static_shared_bytes: int


def kernels(ptx: str) -> dict[str, DeclaredKernel]:
    """The kernels of a PTX module by name."""
    text = _COMMENT.sub("", ptx)
    entries = list(_ENTRY.finditer(text))
    ends = [entry.start() for entry in entries[1:]] + [len(text)]
    of_module = _shared_bytes(text[: entries[0].start()]) if entries else 0
    return {
        entry.group(1): DeclaredKernel(
            tuple(_variables(_PARAMETER, "param", entry.group(2) or "")),
            of_module + _shared_bytes(text[entry.end() : end]),
        )
        for entry, end in zip(entries, ends, strict=True)
    }


def _shared_bytes(text: str) -> int:
    return sum(variable.size for variable in _variables(_SHARED, "shared", text))


def _variables(pattern: re.Pattern[str], space: str, text: str) -> Iterator[Variable]:
    for found in pattern.finditer(text):
        if found.groupdict().get("extern"):
            continue
        kind = found["kind"]
        element = max(1, int(kind[1:]) // 8) if kind != "pred" else 1
        yield Variable(
            found["name"],
            space,
            element * int(found["count"] or 1),
            int(found["align"] or element),
        )
