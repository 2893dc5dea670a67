"""Workload files: problems of a spec, or of several, each with how often it occurs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.errors import SpecError, UserError
from tunekit.model import Value, Values
from tunekit.spec.axes import unknown
from tunekit.spec.declare import KernelSpec
from tunekit.spec.load import shipped_directory

WORKLOADS = "workloads"  # beside the shipped specs
# What json raises for text that is none, for endless digits and for endless brackets; and our own hooks.
MALFORMED = (ValueError, RecursionError, UserError)


def read_workload(spec: KernelSpec, path: Path) -> list[Values]:
    """The problems of a workload file, most frequent first.

    JSON Lines, or one JSON list, of objects: axis values by name, and optionally
    ``count``, how often the problem occurs (1 where left out), and ``spec``, the name of the
    spec that it is a problem of (this one where left out; those of others are passed over).
    Lines that begin with ``#`` are comments. A bare name that is no file here is a workload that ships.
    """
    path = _shipped(path) or path
    found: list[tuple[int, Values]] = []
    others: set[str] = set()
    for line, item in _objects(_text(path), path):
        where = f"{path}:{line}"
        if not isinstance(item, dict):
            raise UserError(f"{where}: {json.dumps(item)[:40]} is no object of axis values")
        owner = spec.name if "spec" in spec.axis else item.pop("spec", spec.name)
        if owner != spec.name:
            others.add(str(owner))
            continue
        count = _count(item, where)
        try:
            found.append((count, completed(spec, {name: _json_value(name, value) for name, value in item.items()})))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not found:
        which = f" of {spec.name} (there are some of {', '.join(sorted(others))})" if others else ""
        raise UserError(f"{path}: holds no problem{which}")
    return [values for _, values in sorted(found, key=lambda pair: -pair[0])]


def workload_text(problems: Mapping[tuple[str, Values], int], remark: str) -> str:
    """A workload file of problems by spec's name, each with its count, most frequent first."""
    ordered = sorted(problems.items(), key=lambda pair: (pair[0][0], -pair[1]))
    lines = [json.dumps({"spec": spec, **problem, "count": count}) for (spec, problem), count in ordered if count > 0]
    return "\n".join([*(f"# {line}" for line in remark.splitlines()), *lines, ""])


def counted_problems(path: Path) -> Counter[tuple[str, Values]]:
    """What `workload_text` wrote, by spec's name and problem; unchecked.

    Raises:
        UserError: a file that it did not write.
    """
    found: Counter[tuple[str, Values]] = Counter()
    for line, item in _objects(_text(path), path):
        where = f"{path}:{line}"
        if not isinstance(item, dict) or not isinstance(item.get("spec"), str):
            raise UserError(f"{where}: names no spec")
        count = _count(item, where)
        name = item.pop("spec")
        found[name, Values({axis: _json_value(axis, value) for axis, value in item.items()})] += count
    return found


def _count(item: dict[str, Any], where: str) -> int:
    """How often a problem occurs; taken out of its object."""
    count = item.pop("count", 1)
    if type(count) is not int or count < 1:
        raise UserError(f"{where}: count is {count!r}; it must be an int from 1")
    return count


def workloads_beside(spec: KernelSpec, reference: str) -> dict[str, list[Values]]:
    """The workloads in the directory ``workloads`` beside a spec's file, by name; not those with other specs' axes.

    `reference` is what ``load_spec`` took for the spec.

    Raises:
        UserError: one of them is malformed.
    """
    path, _, _ = reference.partition(".py")
    beside = shipped_directory() if path == reference else Path(path).parent
    found: dict[str, list[Values]] = {}
    for file in sorted((beside / WORKLOADS).glob("*.jsonl")):
        items = [item for _, item in _objects(_text(file), file)]
        ours = [item for item in items if not isinstance(item, dict) or item.get("spec", spec.name) == spec.name]
        if ours and all(isinstance(item, dict) and item.keys() <= {*spec.axis, "count", "spec"} for item in ours):
            found[file.stem] = read_workload(spec, file)
    return found


def completed(spec: KernelSpec, given: Mapping[str, Value]) -> Values:
    """A complete problem from values by axis; UserError for a mistake in them."""
    for name in given:
        if name not in spec.axis:
            raise UserError(f"{spec.name}: {unknown('axis', name, spec.axis)}")
    try:
        return spec.problem(given)
    except SpecError as error:
        where = f"{spec.name}: {error.field}: " if error.field else f"{spec.name}: "
        raise UserError(where + error.message) from None


def _json_value(name: str, value: Any) -> Value:
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"{name} is {json.dumps(value)[:40]}, not a number, a string or a flag")


def _shipped(path: Path) -> Path | None:
    """The shipped workload that a bare name stands for; None for what may be a file.

    Raises:
        UserError: neither is there.
    """
    if path.name != str(path) or path.suffix or os.path.lexists(path):
        return None
    directory = shipped_directory() / WORKLOADS
    known = sorted(file.stem for file in directory.glob("*.jsonl"))
    if path.name not in known:
        raise UserError(f"there is no file {path}: {unknown('workload', path.name, known)}")
    return directory / f"{path.name}.jsonl"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: can't read the workload: {reason}") from None


def _objects(text: str, path: Path) -> list[tuple[int, Any]]:
    """The JSON values of a workload with their lines; NaN and infinity are refused."""
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    if text.lstrip().startswith("["):
        try:
            items = decoder.decode(text)
        except MALFORMED as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
            raise UserError(f"{path}:{line}: {_json_mistake(error)}") from None
        return _with_lines(text, items)
    found: list[tuple[int, Any]] = []
    for number, line_text in enumerate(text.splitlines(), start=1):
        if line_text.strip() and not line_text.lstrip().startswith("#"):
            try:
                found.append((number, decoder.decode(line_text)))
            except MALFORMED as error:
                raise UserError(f"{path}:{number}: {_json_mistake(error)}") from None
    return found


def _with_lines(text: str, items: list[Any]) -> list[tuple[int, Any]]:
    """Each item of a JSON list with the line that it starts on."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    found: list[tuple[int, Any]] = []
    for _ in items:
        while text[position] in " \t\r\n,":
            position += 1
        line = text.count("\n", 0, position) + 1
        item, position = decoder.raw_decode(text, position)
        found.append((line, item))
    return found


def _no_constant(name: str) -> Any:
    raise UserError(f"{name} is no size")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"gives {name} twice")
    return dict(pairs)


def _json_mistake(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
