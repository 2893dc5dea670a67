"""A bundle: one directory with the kernels of a spec that serve, for a machine that compiles and records nothing.

    bundle.json      what it is for, and which kernel each problem has: symbol, file, arguments
    winners.jsonl    the measurements that chose them, as in tuning_db (see `lines`)
    artifacts/       the kernels, as in every artifact store (see `artifacts`), those files only that are loaded
    LICENSES/        of what is in it
    SHA256SUMS       of every other file: ``sha256sum -c SHA256SUMS``

Nothing in it names a place, so it may be moved; reading it writes nothing. Its kernels are trusted by their
hashes, not by the sources that are installed where it serves: instead the spec's axes and each kernel's
arguments must be what they were when it was made. Standard library only.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tunekit.errors import UserError
from tunekit.model import Artifact, Values, Variant, Winner
from tunekit.spec import KernelSpec, TensorArg
from tunekit.store import files, rows, winner_lines
from tunekit.store.artifacts import ArtifactStore

FORMAT = 1
INDEX, WINNERS, ARTIFACTS, LICENCES, SUMS = "bundle.json", "winners.jsonl", "artifacts", "LICENSES", "SHA256SUMS"
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")


@dataclass(frozen=True)
class Entry:
    """The kernel of one problem. `file` lies under the bundle's directory; `arguments` are those of the
    problem in call order, as :func:`arguments_of` tells them; `workspace` float32 elements follow them where
    that is not 0. `toolchain` are the versions that compiled it."""

    problem: Values
    variant: Variant
    key: str
    symbol: str
    file: str
    arguments: tuple[Mapping[str, Any], ...]
    workspace: int = 0
    toolchain: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A bundle's index. `needs` maps packages that must be installed where it serves to the versions that it
    was made with; `made_with` the same for what made it. `spec` and `version` are a KernelSpec's; `machine` is
    the kind of CPU that the kernels' host code is for."""

    root: Path
    spec: str
    version: int
    arch: str
    machine: str
    axes: tuple[Mapping[str, Any], ...]
    entries: tuple[Entry, ...]
    winners: tuple[Winner, ...]
    needs: Mapping[str, str | None]
    made_with: Mapping[str, str | None]

    @property
    def store(self) -> ArtifactStore:
        """Its kernels, to be read only."""
        return ArtifactStore(self.root / ARTIFACTS, frozen=True)

    def measured(self) -> list[Winner]:
        """The winners that were somebody's own when the bundle was made."""
        return [winner for winner in self.winners if winner.source != "shipped"]

    def shipped(self) -> list[Winner]:
        """The winners that came with tunekit."""
        return [winner for winner in self.winners if winner.source == "shipped"]


def is_bundle(root: Path) -> bool:
    """Whether a directory says that it is a bundle."""
    return (root / INDEX).is_file()


def open_bundle(root: Path, spec: KernelSpec) -> Bundle:
    """The bundle in `root`, every file's hash checked, if it serves `spec`.

    Raises:
        UserError: it is none, is damaged, of a later format, for another spec, or may be written by anybody.
    """
    if not is_bundle(root):
        lacks = "no such directory" if not root.is_dir() else f"it has no {INDEX}"
        raise UserError(f"{root} is no bundle ({lacks}): `tunekit bundle {spec.name} --out DIR` makes one")
    for place in (root, root / ARTIFACTS):
        refused = files.world_writable(place)
        if refused:
            raise UserError(f"bundle {root} is not used: {refused}")
    check_sums(root)
    try:
        bundle = _read(root)
    except (rows.RowError, KeyError, TypeError, AttributeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"bundle {root} can't be read ({error}): make it anew with `tunekit bundle`") from error
    unfit = misfit(bundle, spec)
    if unfit:
        made = bundle.made_with.get("tunekit") or "an unknown version"
        raise UserError(
            f"bundle {root} does not fit the {spec.name} that is installed: {unfit} "
            f"(it was made with tunekit {made}); make it anew with `tunekit bundle`"
        )
    return bundle


def check_sums(root: Path) -> None:
    """Compare every file with SHA256SUMS.

    Raises:
        UserError: one is missing, changed or not listed; all of them are named.
    """
    try:
        listed = _listed((root / SUMS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"bundle {root} is damaged: {SUMS}: {error}; copy it again") from error
    damaged = [f"{name} is not listed in {SUMS}" for name in (INDEX, WINNERS) if name not in listed]
    for name, wanted in listed.items():
        try:
            content = (root / name).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            damaged.append(f"{name}: {getattr(error, 'strerror', error)}")
            continue
        if hashlib.sha256(content).hexdigest() != wanted:
            damaged.append(f"{name} is not what {SUMS} says ({len(content)} bytes)")
    if damaged:
        more = f" (and {len(damaged) - 3} more)" if len(damaged) > 3 else ""
        raise UserError(f"bundle {root} is damaged: {'; '.join(damaged[:3])}{more}; copy it again")


def _listed(text: str) -> dict[str, str]:
    """The hashes by name.

    Raises:
        ValueError: a line that is none, or a name that leads out of the bundle.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _SUM.fullmatch(line)
        if match is None or PurePosixPath(match[2]).is_absolute() or ".." in PurePosixPath(match[2]).parts:
            raise ValueError(f"{line!r} is no hash and file")
        found[match[2]] = match[1]
    return found


def _read(root: Path) -> Bundle:
    plain = rows.parse((root / INDEX).read_text("utf-8"), INDEX)
    if plain["format"] != FORMAT:
        raise rows.RowError(f"format {plain['format']!r}, this tunekit reads {FORMAT}")
    spec, arch, machine = (rows.text(plain[name], name) for name in ("spec", "arch", "machine"))
    version = rows.count(plain["version"], "version")
    entries = []
    for each in plain["entries"]:
        implementation, identity = (rows.text(each[name], name) for name in ("implementation", "variant"))
        tunables = rows.plain_values(each["tunables"], "tunables")
        entries.append(
            Entry(
                problem=rows.plain_values(each["problem"], "problem"),
                variant=Variant(spec, version, implementation, arch, tunables, identity),
                key=rows.text(each["key"], "key"),
                symbol=rows.text(each["symbol"], "symbol"),
                file=rows.text(each["file"], "file"),
                arguments=_named(each["arguments"], "arguments"),
                workspace=rows.count(each["workspace"], "workspace"),
                toolchain=_versions(each["toolchain"], "toolchain"),
            )
        )
    parsed = [winner_lines.parse_winner(line) for _, line in winner_lines.split((root / WINNERS).read_bytes())]
    winners = tuple(winner for winner in parsed if winner is not None)
    needs, made_with = (_versions(plain[name], name) for name in ("needs", "made_with"))
    axes = _named(plain["axes"], "axes")
    return Bundle(root, spec, version, arch, machine, axes, tuple(entries), winners, needs, made_with)


def _named(plain: object, field: str) -> tuple[Mapping[str, Any], ...]:
    """A list of objects, each with a name."""
    if not isinstance(plain, list):
        raise rows.RowError(f"{field} is no list")
    for each in plain:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise rows.RowError(f"{field} has {each!r}, which has no name")
    return tuple(plain)


def _versions(plain: object, field: str) -> Mapping[str, str | None]:
    """Versions by package."""
    if not isinstance(plain, dict):
        raise rows.RowError(f"{field} is no object")
    return {name: rows.optional_text(version, name) for name, version in plain.items()}


def index_of(bundle: Bundle) -> dict[str, Any]:
    """The contents of ``bundle.json``."""
    entries = [
        {
            "problem": dict(entry.problem),
            "implementation": entry.variant.implementation,
            "variant": entry.variant.id,
            "tunables": dict(entry.variant.tunables),
            "key": entry.key,
            "symbol": entry.symbol,
            "file": entry.file,
            "arguments": list(entry.arguments),
            "workspace": entry.workspace,
            "toolchain": dict(entry.toolchain),
        }
        for entry in bundle.entries
    ]
    head = {"format": FORMAT, "spec": bundle.spec, "version": bundle.version, "arch": bundle.arch}
    head["machine"] = bundle.machine
    made = {"made_with": dict(bundle.made_with), "needs": dict(bundle.needs)}
    return {**head, **made, "axes": list(bundle.axes), "entries": entries}


# -- what a spec promises to whoever calls its kernels


def axes_of(spec: KernelSpec) -> tuple[dict[str, Any], ...]:
    """The problem axes in plain values: what of them decides which kernel a call means, not which sizes there are."""
    return tuple(
        {
            "name": axis.name,
            "kind": axis.kind,
            "static": axis.static,
            "default": "derived from the others" if callable(axis.default) else axis.default,
        }
        for axis in spec.axes
    )


def arguments_of(spec: KernelSpec, problem: Values) -> tuple[dict[str, Any], ...]:
    """What a kernel takes for a problem, in call order, in plain values.

    A tensor's `shape` is of axes and numbers, a number's `value` the spec's default for this problem.
    """
    found: list[dict[str, Any]] = []
    for arg in spec.arguments(problem):
        if isinstance(arg, TensorArg):
            shape = list(arg.dims(problem))
            found.append({"name": arg.name, "role": arg.role, "dtype": arg.dtype_of(problem), "shape": shape})
        else:
            value = float(arg.default(problem))
            shown = value if math.isfinite(value) else None
            found.append({"name": arg.name, "role": "number", "dtype": arg.dtype, "value": shown})
    return tuple(found)


def misfit(bundle: Bundle, spec: KernelSpec) -> str | None:
    """Why a bundle can't serve a spec, in words; None if it can."""
    if bundle.spec != spec.name:
        return f"it is for {bundle.spec}"
    if bundle.version != spec.version:
        return f"it is for version {bundle.version}, here {spec.version}"
    if bundle.machine != platform.machine():
        return f"it is for {bundle.machine} machines, this one is {platform.machine()}"
    there, here = {axis["name"]: axis for axis in bundle.axes}, {axis["name"]: axis for axis in axes_of(spec)}
    if list(there) != list(here):
        changed = sorted(set(there) ^ set(here)) or list(here)
        return f"its problem axes differ ({', '.join(changed)})"
    for name, axis in here.items():
        if axis != there[name]:
            return f"its axis {name} differs"
    for entry in bundle.entries:
        if set(entry.problem) != set(here):
            return f"its problem {entry.problem} has other axes"
        if _signature(entry.arguments) != _signature(arguments_of(spec, entry.problem)):
            return f"the arguments of {entry.problem} differ"
    return None


def _signature(arguments: tuple[Mapping[str, Any], ...]) -> list[dict[str, Any]]:
    return [{name: value for name, value in argument.items() if name != "value"} for argument in arguments]


def artifact_of(bundle: Bundle, entry: Entry) -> Artifact:
    """An entry's artifact, its hash checked once more.

    Raises:
        UserError: it was damaged or went away since the bundle was opened.
    """
    artifact = bundle.store.get(entry.key)
    if artifact is None:
        raise UserError(f"bundle {bundle.root} is damaged: {entry.file} is gone; copy it again")
    return artifact


def newest(versions: Iterable[str]) -> str | None:
    """The highest of version numbers, number by number; None of none."""
    return max(versions, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], default=None)
