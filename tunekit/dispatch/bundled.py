"""Serving from a bundle: its kernels, by variant and static axes, nothing else of this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

from tunekit.backends.load import missing_runtime
from tunekit.dispatch.ladder import Candidate
from tunekit.dispatch.library import Library
from tunekit.errors import UserError
from tunekit.model import Artifact, Values
from tunekit.spec import KernelSpec
from tunekit.store.bundle import Bundle, Entry, artifact_of, newest, open_bundle


class BundledLibrary(Library):
    """The kernels of one bundle. A variant has one for each set of static axes, whatever problem asks for it.

    They are not keyed by the sources or the compiler that are here: the bundle was made to be served as it is.
    A function of an installed package is made here, as ever.
    """

    def __init__(self, spec: KernelSpec, bundle: Bundle) -> None:
        super().__init__(spec, bundle.store)
        self.bundle = bundle
        self._entries: dict[tuple[str, Values], Entry] = {
            (entry.variant.id, spec.static(entry.problem)): entry for entry in bundle.entries
        }

    def find(self, candidate: Candidate, problem: Values) -> tuple[Artifact | None, str]:
        """The artifact that serves a candidate; or None and why there is none.

        Raises:
            UserError: its file was damaged since the bundle was opened.
        """
        if self.spec.is_library(candidate.variant):
            return super().find(candidate, problem)
        entry = self._entries.get((candidate.variant.id, self.spec.static(problem)))
        if entry is None:
            return None, f"it is not in the bundle {self.bundle.root}"
        failed = self._ruled_out.get(entry.key)
        if failed:
            return None, failed
        artifact = self._found.get(entry.key)
        if artifact is None:
            artifact = artifact_of(self.bundle, entry)
            self._found.put(entry.key, artifact)
        return artifact, ""

    def present_key(self, candidate: Candidate, problem: Values) -> str:
        """The key of a candidate's kernel in the bundle; of one that it lacks, what would be compiled here."""
        entry = self._entries.get((candidate.variant.id, self.spec.static(problem)))
        return super().present_key(candidate, problem) if entry is None else entry.key

    def way_out(self, reference: str, arch: str, problem: Values) -> str:
        """What to do where the bundle has nothing for a problem."""
        return (
            f"Make bundle {self.bundle.root} anew where there is a compiler: `tunekit bundle {shlex.quote(reference)} "
            f"--arch {arch} --compile --out DIR`, with --workload or --problem {problem}"
        )


def open_library(spec: KernelSpec, root: Path) -> BundledLibrary:
    """The kernels of the bundle in `root`, ready to serve.

    Raises:
        UserError: the bundle is refused (see ``open_bundle``), or what its kernels link against is not here.
    """
    bundle = open_bundle(root, spec)
    versions = {entry.toolchain.get("nvidia-cutlass-dsl") for entry in bundle.entries} - {None}
    needs_runtime = any(spec.implementation(e.variant.implementation).backend == "cutedsl" for e in bundle.entries)
    lacking = missing_runtime(newest(filter(None, versions))) if needs_runtime else None
    if lacking:
        raise UserError(f"bundle {root} can't be served: {lacking}")
    return BundledLibrary(spec, bundle)
