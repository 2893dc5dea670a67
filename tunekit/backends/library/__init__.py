"""The library backend: ``build`` returns a Python function of an installed package; nothing is compiled.

The function takes the signature's arguments (torch tensors and numbers) in order and
writes the outputs. What is kept of it is an *entry*: JSON that tells how any process
makes the function (see entry). It is made where it runs, not here: a package may take
seconds to import, and a space has many variants.
"""

from __future__ import annotations

from pathlib import Path

from tunekit.backends.contract import CompileReport, CompileRequest, Phase
from tunekit.backends.library.entry import Entry
from tunekit.model import Values
from tunekit.spec import Build, Implementation, load_spec
from tunekit.spec.packages import absence, installed
from tunekit.trials import Status


def warm() -> None:
    """Nothing to share: no package is imported here."""


def compile(request: CompileRequest, implementation: Implementation, build: Build, phase: Phase) -> CompileReport:
    """Keep the function's entry, where its package is installed. The one phase is record."""
    absent = absence(implementation)
    if absent:
        return CompileReport(Status.TRACE_ERROR, f"{implementation.name}: {absent}")
    if request.trace_only:
        return CompileReport(Status.OK)
    phase("record")
    spec, library = load_spec(request.spec), installed(implementation)
    entry = Entry(
        reference=request.spec,
        spec=spec.name,
        version=spec.version,
        implementation=implementation.name,
        arch=build.arch.name,
        static=build.problem,
        tunables=build.tunables,
        library=library,
    )
    file = Path(request.out_dir) / "function.library"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(entry.to_bytes())
    return CompileReport(Status.OK, facts=Values(library=library), files={"library": str(file)})
