"""From the command line's text to problems: ``--problem k=v ...``; workload files are read by spec.workloads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tunekit.errors import UserError
from tunekit.model import Value, Values
from tunekit.spec import Implementation, KernelSpec
from tunekit.spec.axes import unknown
from tunekit.spec.workloads import completed, read_workload

TRUE = frozenset({"true", "1", "yes", "on"})
FALSE = frozenset({"false", "0", "no", "off"})


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
    return completed(spec, {name: _axis_value(spec, name, text) for name, text in pairs(texts).items()})


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
