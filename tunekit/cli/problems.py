"""From the command line's text to problems: ``--problem k=v ...`` and workload files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunekit.errors import SpecError, UserError
from tunekit.model import Value, Values
from tunekit.spec import Implementation, KernelSpec
from tunekit.spec.axes import unknown
from tunekit.spec.load import shipped_directory

WORKLOADS = "workloads"  # beside the shipped specs
TRUE = frozenset({"true", "1", "yes", "on"})
FALSE = frozenset({"false", "0", "no", "off"})
# What json raises for text that is none, for endless digits and for endless brackets; and our own hooks.
MALFORMED = (ValueError, RecursionError, UserError)


def pairs(texts: Iterable[str], option: str = "--problem") -> dict[str, str]:
    """The ``k=v`` pairs of an option given any number of times, separated by spaces or commas."""
    found: dict[str, str] = {}
    for text in texts:
        for part in text.replace(",", " ").split():
            name, equals, value = part.partition("=")
            if not equals or not name or not value:
                raise UserError(f"{option} takes name=value, not '{part}'")
            if found.get(name, value) != value:
                raise UserError(f"{option} gives {name} twice: {found[name]} and {value}")
            found[name] = value
    return found


def problem(spec: KernelSpec, texts: Iterable[str]) -> Values:
    """A complete, checked problem from ``k=v`` texts, each value read by its axis's kind."""
    return _completed(spec, {name: _axis_value(spec, name, text) for name, text in pairs(texts).items()})


def problems(spec: KernelSpec, texts: Sequence[str], workload: Path | None) -> tuple[Values, ...]:
    """What to work on: the one given, those of a workload file, or else the spec's examples.

    Raises:
        UserError: nothing to go by, both given, a malformed value or file (with its line).
    """
    if texts and workload:
        raise UserError("give --problem or --workload, not both")
    if texts:
        return (problem(spec, texts),)
    if workload:
        return tuple(dict.fromkeys(read_workload(spec, workload)))
    needed = [axis.name for axis in spec.axes if axis.default is None]
    if not spec.examples and needed:
        raise UserError(f"{spec.name} has no example problems: give --problem {'=... '.join(needed)}=...")
    if not spec.examples:
        return (spec.problem({}),)
    return tuple(dict.fromkeys(spec.problem(example) for example in spec.examples))


def read_workload(spec: KernelSpec, path: Path) -> list[Values]:
    """The problems of a workload file, most frequent first.

    JSON Lines, or one JSON list, of objects: axis values by name, and optionally
    ``count``, how often the problem occurs (1 where left out). Lines that begin with
    ``#`` are comments. A bare name that is no file here is a workload that ships.
    """
    path = _shipped(path) or path
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: can't read the workload: {reason}") from None
    found: list[tuple[int, Values]] = []
    for line, item in _objects(text, path):
        where = f"{path}:{line}"
        if not isinstance(item, dict):
            raise UserError(f"{where}: {json.dumps(item)[:40]} is no object of axis values")
        count = item.pop("count", 1)
        if type(count) is not int or count < 1:
            raise UserError(f"{where}: count is {count!r}; it must be an int from 1")
        try:
            found.append((count, _completed(spec, {name: _json_value(name, value) for name, value in item.items()})))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not found:
        raise UserError(f"{path}: holds no problem")
    return [values for _, values in sorted(found, key=lambda pair: -pair[0])]


def tunables(implementation: Implementation, texts: Iterable[str]) -> Values:
    """A complete point of an implementation's space from ``k=v`` texts.

    Raises:
        UserError: an unknown or missing tunable, or a value outside its list.
    """
    known = {tunable.name: tunable for tunable in implementation.tunables}
    given = pairs(texts, "--tunables")
    found: dict[str, Value] = {}
    for name, text in given.items():
        if name not in known:
            raise UserError(f"{implementation.name}: {unknown('tunable', name, known)}")
        matching = [value for value in known[name].values if _same(value, text)]
        if not matching:
            allowed = ", ".join(str(value) for value in known[name].values)
            raise UserError(f"{implementation.name}: {name}={text} lies outside its space ({allowed})")
        found[name] = matching[0]
    missing = [name for name in known if name not in found]
    if missing:
        raise UserError(f"{implementation.name}: --tunables leaves out {', '.join(missing)}")
    return Values({name: found[name] for name in known})


def _same(value: Value, text: str) -> bool:
    if isinstance(value, bool):
        return text.lower() in (TRUE if value else FALSE)
    return str(value) == text


def _axis_value(spec: KernelSpec, name: str, text: str) -> Value:
    axes = spec.axis
    if name not in axes:
        raise UserError(f"{spec.name}: {unknown('axis', name, axes)}")
    kind = axes[name].kind
    if kind == "flag":
        if text.lower() not in TRUE | FALSE:
            raise UserError(f"{spec.name}: {name}={text} is no flag; it takes true or false")
        return text.lower() in TRUE
    if kind == "dim":
        try:
            return int(text)
        except ValueError:
            raise UserError(f"{spec.name}: {name}={text} is not an integer") from None
    return text


def _json_value(name: str, value: Any) -> Value:
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"{name} is {json.dumps(value)[:40]}, not a number, a string or a flag")


def _completed(spec: KernelSpec, given: Mapping[str, Value]) -> Values:
    for name in given:
        if name not in spec.axis:
            raise UserError(f"{spec.name}: {unknown('axis', name, spec.axis)}")
    try:
        return spec.problem(given)
    except SpecError as error:
        where = f"{spec.name}: {error.field}: " if error.field and error.field != spec.name else f"{spec.name}: "
        raise UserError(where + error.message) from None


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
