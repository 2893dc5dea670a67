"""What makes two results the same: hashes of everything that changes the code.

A compile's key covers the arch, all tunables, the static problem values, the
sources (followed through imports and closures), the options and the toolchain.
Nothing depends on hash seeds, working directories or where the checkout lies.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tunekit.model import Values, Variant, to_json

TOOLCHAIN = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
INSTALLED = frozenset({"site-packages", "dist-packages", "dsl_packages"})
VERSION = "version:"
STDLIB = Path(inspect.__file__).resolve().parent
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where a statement holds statements."""
Import = tuple[int, str, tuple[str, ...]]
"""An import statement: how many directories up (0: absolute), the module, the names that are imported from it."""
Imports = dict[str, tuple[Import, ...]]
"""The imports of texts, by each text's SHA-256: finding them is most of the time that a fingerprint takes."""


def digest(value: Any) -> str:
    """SHA-256, in hex, of a value's canonical JSON."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def variant(spec: str, version: int, implementation: str, arch: str, tunables: Values) -> Variant:
    """The variant with its id: 12 hex digits over all of its fields."""
    fields = [spec, version, implementation, arch, to_json(tunables)]
    return Variant(spec, version, implementation, arch, tunables, digest(fields)[:12])


@functools.cache
def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, None if it isn't there.

    Read from the directories of sys.path here, where those are all that may hold one: importing importlib.metadata
    takes 25 ms, an eighth of a lookup (2026-11).
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return _version_by_importlib(name)
    if any(os.path.isfile(entry) or str(entry).endswith(".egg") for entry in sys.path):  # an archive, or an egg
        return _version_by_importlib(name)
    return next((found for entry in sys.path if (found := _version_in(entry or ".", _normal(name)))), None)


def _version_by_importlib(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "_", distribution).lower()


def _version_in(directory: str, normal: str) -> str | None:
    """The version of the distribution of a normalised name that a directory of sys.path holds."""
    for record in _records_in(directory).get(normal, ()):
        found = _version_of(record)
        if found:  # else it is what an uninstallation left
            return found
    return None


@functools.cache
def _records_in(directory: str) -> dict[str, list[Path]]:
    """What records the installed distributions of a directory, by normalised name."""
    records: dict[str, list[Path]] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory):
            base, _, ending = entry.rpartition(".")
            if ending in ("dist-info", "egg-info"):
                records.setdefault(_normal(base.partition("-")[0]), []).append(Path(directory, entry))
    return records


def _version_of(record: Path) -> str | None:
    """The version that the metadata of an installed distribution states: a header of a file, or of `record` itself."""
    for file in (record / "METADATA", record / "PKG-INFO", record):
        with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
            headers = itertools.takewhile("\n".__ne__, lines)
            return next((line[len(VERSION) :].strip() for line in headers if line.lower().startswith(VERSION)), None)
    return None


def toolchain() -> dict[str, str | None]:
    """The versions that decide what code a compile yields."""
    return {name: distribution_version(name) for name in TOOLCHAIN}


def compile_key(
    variant: Variant, static: Values, sources: str, options: str, tools: Mapping[str, str | None] | None = None
) -> str:
    """The key of one compile, 64 hex digits.

    `sources` is :func:`fingerprint` of the implementation's build function; `tools`
    the :func:`toolchain`, where it is not the one installed here.
    """
    return digest(
        {
            "variant": to_json(variant),
            "static": to_json(static),
            "sources": sources,
            "options": options,
            "toolchain": toolchain() if tools is None else dict(tools),
        }
    )


def fingerprint(function: Callable[..., Any], imports: Imports | None = None) -> str:
    """A hash of a function's sources: its file, all that it imports, and what it closes over.

    What `imports` knows is not looked for again, and what it lacks is added to it.

    Imports are followed through every module of the same tree (relative, absolute
    beside the file, or on sys.path outside site-packages), also those inside
    functions. Installed packages count by their version (see :func:`toolchain`).
    Imports made from computed names can't be seen.
    """
    file = _source_file(function)
    known: Imports = {} if imports is None else imports
    return digest(_describe(function, file.parent if file else None, known, frozenset()))


def _describe(value: Any, home: Path | None, imports: Imports, seen: frozenset[int]) -> Any:
    """A stable description of what a function depends on besides its arguments; `home` is its directory."""
    if id(value) in seen:
        return "recursive"
    seen = seen | {id(value)}

    def inner(part: Any) -> Any:
        return _describe(part, home, imports, seen)

    if isinstance(value, functools.partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, types.MethodType):
        return ["method", inner(value.__func__), inner(value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        defaults = [inner(value.__defaults__ or ()), inner(value.__kwdefaults__ or {})]
        return ["function", value.__qualname__, _sources(value, home, imports), cells, *defaults]
    if isinstance(value, type):
        bases = [inner(base) for base in value.__bases__ if base is not object]
        return ["class", value.__module__, value.__qualname__, _sources(value, home, imports), bases]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(inner, value)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(json.dumps(inner(item), sort_keys=True) for item in value)]
    if isinstance(value, Mapping):
        return {str(name): inner(item) for name, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if hasattr(value, "__dict__"):
        return ["object", inner(type(value)), inner(vars(value))]
    return ["object", inner(type(value)), ADDRESS.sub("", repr(value))]


def _source_file(value: Any) -> Path | None:
    """The file that a function or class was read from; None for builtin and typed-in ones."""
    try:
        file = inspect.getsourcefile(value)
    except TypeError:
        return None
    return Path(file).resolve() if file and Path(file).is_file() else None


def _sources(value: Any, home: Path | None, imports: Imports) -> Any:
    """What tells the source of a function or class: its files' hashes, or the package that installed it."""
    file = _source_file(value)
    if file is None or (_is_installed(file) and (home is None or not file.is_relative_to(home))):
        return ["installed", str(value.__module__).partition(".")[0]]
    return [[name, content] for name, content in sorted(source_closure(file, imports).items())]


def source_closure(file: Path, imports: Imports) -> dict[str, str]:
    """The content hash of `file` and of every file of its tree that it imports, by name.

    Names are paths relative to the directory of `file`, so that a moved checkout
    keeps its keys; files elsewhere go by their directory's name, and one of a name
    that is taken by its content too.
    """
    # Paths are strings here: pathlib takes four fifths of the time, 12 ms of a process's first call (2026-11).
    first = os.path.realpath(file)
    root = os.path.dirname(first)
    everywhere = tuple(os.path.realpath(entry) for entry in sys.path if entry and _is_own(entry))
    hashes: dict[str, str] = {}
    done: set[str] = set()
    pending = [first]
    find = _Finder().find
    while pending:
        path = pending.pop()
        if path in done:
            continue
        done.add(path)
        content = Path(path).read_bytes()
        hashed = hashlib.sha256(content).hexdigest()
        name = _relative(path, root)
        hashes[f"{name} {hashed}" if name in hashes else name] = hashed
        if hashed not in imports:
            imports[hashed] = tuple(_imports(content))
        parents = _parents(path)
        beside = (near for near in (root, parents[0]) if os.path.basename(near) not in INSTALLED)
        absolute = (*beside, *everywhere)  # never site-packages or the standard library
        for level, module, named in imports[hashed]:
            parts = tuple(module.split(".")) if module else ()
            roots = (parents[min(level, len(parents)) - 1],) if level else absolute
            for more in ((), *((name,) for name in named)):
                pending += find(parts + more, roots)
    return hashes


def _relative(path: str, root: str) -> str:
    if path.startswith(os.path.join(root, "")):
        return os.path.relpath(path, root)
    return "/".join(path.split("/")[-2:])


def _parents(path: str) -> list[str]:
    """The directories that a file lies in, the innermost first."""
    parents = [os.path.dirname(path)]
    while (parent := os.path.dirname(parents[-1])) != parents[-1]:
        parents.append(parent)
    return parents


def _imports(content: bytes) -> Iterator[Import]:
    """The import statements of a text, at any depth; expressions, which hold none, are not walked."""
    try:
        pending: list[ast.AST] = [ast.parse(content)]
    except SyntaxError:
        return
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", tuple(alias.name for alias in node.names)
        for block in BLOCKS:
            pending.extend(getattr(node, block, ()))


@functools.cache
def _is_own(entry: str) -> bool:
    if entry.endswith((".zip", "lib-dynload")) or _is_installed(Path(entry)):
        return False
    return not any(record.suffix == ".dist-info" for records in _records_in(entry).values() for record in records)


def _is_installed(path: Path) -> bool:
    """Whether a path is a package's or the standard library's."""
    return bool(INSTALLED & set(path.parts)) or path.resolve().is_relative_to(STDLIB)


class _Finder:
    """Finds the files that imports run; asks the file system about each once, and of no use when they change."""

    def __init__(self) -> None:
        self.find = functools.cache(self._find)
        self._is_file = functools.cache(os.path.isfile)
        self._real = functools.cache(os.path.realpath)

    def _find(self, parts: tuple[str, ...], roots: tuple[str, ...]) -> list[str]:
        """The files that importing dotted `parts` runs, under the first root that has them."""
        if not parts or parts[0] in sys.stdlib_module_names or parts[0] == "tunekit":
            return []
        for root in roots:
            files: list[str] = []
            base = root
            for index, part in enumerate(parts):
                inside = os.path.join(base, part)
                package, module = f"{inside}/__init__.py", f"{inside}.py"
                last = index == len(parts) - 1
                if self._is_file(package):
                    files.append(self._real(package))
                    base = inside
                elif self._is_file(module):
                    files.append(self._real(module))
                    break
                elif os.path.isdir(inside) and not last:
                    base = inside
                else:
                    files = files if index else []
                    break
            if files:
                return files
        return []
