"""Finding and loading specs: the shipped ones by name, anybody's by path.

A spec file is an ordinary Python file that makes one or more ``KernelSpec`` at
module level. It is imported as a submodule of a package made for its directory,
so ``from .kernels.body import ...`` works wherever the directory lies.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
import sys
import traceback
import types
from pathlib import Path

from tunekit.errors import SpecError, UserError, suggestion, words_of
from tunekit.spec.declare import KernelSpec, misspelt_field

SHIPPED_PACKAGE = "tunekit_specs"


def shipped_directory() -> Path:
    """Where the shipped specs lie: inside the installed package, or the checkout beside it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "kernel_specs"
    return inside if inside.is_dir() else package.parent / "kernel_specs"


def list_specs() -> tuple[KernelSpec, ...]:
    """The shipped specs, by name."""
    specs: dict[str, KernelSpec] = {}
    for path in sorted(shipped_directory().glob("*.py")):
        if not path.name.startswith("_"):
            for spec in specs_in(path):
                specs[spec.name] = spec
    return tuple(specs[name] for name in sorted(specs))


def load_spec(reference: str) -> KernelSpec:
    """The spec that `reference` names: ``fmha``, ``./my_kernel.py`` or ``./my_kernel.py:name``.

    Raises:
        UserError: no such spec or file; the message lists what there is.
        SpecError: the file is malformed; the message names file, line and field.
    """
    text, _, wanted = reference.partition(".py:")
    if wanted:
        text += ".py"
    if text.endswith(".py") or "/" in text:
        return _one_of(Path(text), wanted)
    shipped = shipped_directory() / f"{text}.py"
    if text.isidentifier() and not text.startswith("_") and os.path.isfile(shipped):
        found = {spec.name: spec for spec in specs_in(shipped)}
        if text in found:
            return found[text]
    specs = {spec.name: spec for spec in list_specs()}
    if text in specs:
        return specs[text]
    raise UserError(
        f"unknown spec '{reference}'{suggestion(text, specs)} "
        f"(shipped: {', '.join(specs) or 'none'}; or give a path to a .py file)"
    )


def absolute_reference(named: str | Path) -> str:
    """A reference to a spec that loads from any working directory.

    Raises:
        UserError: `named` is neither a name nor a path.
    """
    if not isinstance(named, (str, Path)):
        raise UserError(f"a spec is given by its name or its file's path, not as {type(named).__name__}")
    reference = str(named)
    path, colon, name = reference.partition(".py:")
    if colon:
        return f"{Path(path + '.py').absolute()}:{name}"
    return str(Path(reference).absolute()) if reference.endswith(".py") else reference


def _one_of(path: Path, wanted: str) -> KernelSpec:
    if not os.path.isfile(path):  # never raises, whatever the name
        raise UserError(f"no spec file {path}")
    found = {spec.name: spec for spec in specs_in(path)}
    if wanted:
        if wanted not in found:
            raise UserError(f"{path} has no spec '{wanted}' (it has: {', '.join(found) or 'none'})")
        return found[wanted]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise UserError(f"{path} holds {len(found)} specs ({names}); name one as {path}:NAME")
    return next(iter(found.values()))


def specs_in(path: Path) -> list[KernelSpec]:
    """Every KernelSpec bound at a spec file's module level, also inside a list or tuple."""
    module = _import(Path(os.path.realpath(path)))
    found: list[KernelSpec] = []
    for value in vars(module).values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, KernelSpec) and item not in found:
                found.append(item)
    names = [spec.name for spec in found]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"two specs are called '{name}'", field="name", where=str(path))
    return found


def module_name(path: Path) -> str:
    """The import name of a spec file: the same for the same path, in every process."""
    directory = path.parent
    if directory == shipped_directory():
        return f"{SHIPPED_PACKAGE}.{path.stem}"
    tag = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    return f"tunekit_user_{tag}.{path.stem}"


def _import(path: Path) -> types.ModuleType:
    name = module_name(path)
    package_name = name.partition(".")[0]
    if package_name not in sys.modules:
        package = types.ModuleType(package_name)
        package.__path__ = [str(path.parent)]
        sys.modules[package_name] = package
    if package_name != SHIPPED_PACKAGE and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as for a script: the files beside it import plainly
    source_spec = importlib.util.spec_from_file_location(name, path)
    if source_spec is None or source_spec.loader is None:
        raise UserError(f"{path} can't be imported as Python")
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__tunekit_mtime__", None) == path.stat().st_mtime_ns:
        return known
    module = importlib.util.module_from_spec(source_spec)
    sys.modules[name] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            source_spec.loader.exec_module(module)
    except SpecError as error:
        sys.modules.pop(name, None)
        where = _place(path, error, error.field)
        raise SpecError(error.message, field=error.field, where=where) from error
    except SyntaxError as error:
        sys.modules.pop(name, None)
        raise SpecError(error.msg, where=f"{error.filename or path}:{error.lineno or 1}") from error
    except (Exception, SystemExit) as error:  # a spec file is foreign code
        sys.modules.pop(name, None)
        message, field = words_of(error), None
        if isinstance(error, TypeError):
            message, field = misspelt_field(error) or (message, None)
        raise SpecError(message, field=field, where=_place(path, error, field)) from error
    module.__dict__["__tunekit_mtime__"] = path.stat().st_mtime_ns
    return module


def _place(path: Path, error: BaseException, field: str | None) -> str:
    """``file:line`` of the mistake: the innermost frame in the file, or its line that names `field`."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    line = lines[-1] if lines else 1
    if field:
        line = _line_naming(path, field, line or 1) or line
    return f"{path}:{line}"


def _line_naming(path: Path, field: str, start: int) -> int | None:
    """The first line from `start` on, within the statement there, of the string or keyword `field`."""
    lines: set[int] = set()
    for statement in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(statement, ast.stmt) or isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        if statement.lineno <= start <= (statement.end_lineno or start):
            for node in ast.walk(statement):
                named = node.value if isinstance(node, ast.Constant) else getattr(node, "arg", None)
                if named == field and isinstance(node, (ast.Constant, ast.keyword)):
                    lines.add(node.lineno)
    return min((line for line in lines if line >= start), default=None)
