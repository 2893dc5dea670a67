"""The artifacts that a dispatcher can serve from: found by compile key, loaded once per process."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from tunekit import identity, space
from tunekit.arch import parse_arch
from tunekit.backends import symbol_of
from tunekit.backends.load import load_artifact, make
from tunekit.dispatch.forked import Guard
from tunekit.dispatch.kept import Kept
from tunekit.dispatch.ladder import Candidate
from tunekit.identity import Imports
from tunekit.model import Artifact, Values, Variant, Winner
from tunekit.spec import Build, Implementation, KernelSpec
from tunekit.spec.packages import absence, installed
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.imports import keep_imports, read_imports

Function = Callable[..., Any]
Tools = tuple[tuple[str, str | None], ...]
"""The packages that compile a kernel, with their versions."""

MOST_KEYS = 4096
"""Of variants, artifacts and failures remembered; what is forgotten is looked up again."""

_loaded: dict[str, Function] = {}
"""Every function that this process has loaded, by compile key: a shared object is never loaded twice.

None is ever unloaded: a CUDA graph that was captured holds no reference to the code that it replays, so nothing tells
when that could go. There are as many as artifacts, which depend on the static axes only.
"""
_loading = Guard()
_parsing = Guard()
"""One thread at a time reads sources: Python 3.11's parser fails where two do ("AST constructor recursion depth")."""


def sweep_command(reference: str, arch: str, problem: Values) -> str:
    """The command that tunes a problem."""
    return f"tunekit sweep {shlex.quote(reference)} --arch {arch} --problem {problem}"


def compile_command(reference: str, variant: Variant, problem: Values) -> str:
    """The command that compiles a variant for a problem into the store."""
    return f"tunekit compile {shlex.quote(reference)} --arch {variant.arch} --variant {variant.id} --problem {problem}"


class Library:
    """The artifacts of one spec in one store.

    A winner names the artifact that was measured. It serves only while the kernel's
    sources are the ones that it was compiled from; after an edit, what the present
    sources compile to is wanted. The compiler's version may differ: that makes the
    winner a fallback (see ladder), not wrong.

    What is a function of an installed package needs nothing of the store: it is made
    of the spec, in this process, when it is first served.
    """

    def __init__(self, spec: KernelSpec, store: ArtifactStore) -> None:
        self.spec = spec
        self.store = store
        self._sources: dict[str, str] = {}
        self._imports: Imports | None = None
        """What is kept beside the artifacts, once it was read."""
        self._keys: Kept[tuple[Variant, Values, Tools | None], str] = Kept(MOST_KEYS)
        """By variant, static axes, and the tools that compile it where those aren't the present ones."""
        self._found: Kept[str, Artifact] = Kept(MOST_KEYS)
        self._functions: Kept[str, tuple[Implementation, Build]] = Kept(MOST_KEYS)
        """Of what package functions are made, by key."""
        self._ruled_out: Kept[str, str] = Kept(MOST_KEYS)
        """Keys not to look for again, and why: they failed, or (empty) the store did not have them."""

    def present_key(self, candidate: Candidate, problem: Values) -> str:
        """The key of what the present sources and toolchain make of a candidate."""
        return self._key(candidate.variant, problem, None)

    def find(self, candidate: Candidate, problem: Values) -> tuple[Artifact | None, str]:
        """The artifact that serves a candidate; or None and why there is none."""
        present = self.present_key(candidate, problem)
        implementation = self.spec.implementation(candidate.variant.implementation)
        if implementation.is_library:
            return self._function(present, implementation, candidate.variant, problem)
        keys = [present]
        why = "its artifact is not in the store"
        winner = candidate.winner
        if winner is not None and winner.artifact != present:
            if self._same_sources(winner, problem):
                keys.insert(0, winner.artifact)
            else:
                why = "the kernel's sources changed since it was measured, and it is not compiled anew"
        for key in keys:
            ruled_out = self._ruled_out.get(key)
            if ruled_out is not None:
                why = ruled_out or why
                continue
            artifact = self._found.get(key) or self.store.get(key)
            if artifact is not None:
                self._found.put(key, artifact)
                return artifact, ""
            self._ruled_out.put(key, "")
        return None, why

    def load(self, artifact: Artifact) -> tuple[Function, bool]:
        """The function of an artifact, loaded once per process, and whether it was now.

        Raises:
            TunekitError: the shared object can't be loaded, or the package's function not be made.
        """
        function = _loaded.get(artifact.key)
        if function is not None:
            return function, False
        with _loading:
            function = _loaded.get(artifact.key)
            if function is not None:
                return function, False
            package = self._functions.get(artifact.key)
            function = make(*package) if package else load_artifact(self.store.path(artifact), artifact.symbol)
            _loaded[artifact.key] = function
            return function, True

    def _function(
        self, key: str, implementation: Implementation, variant: Variant, problem: Values
    ) -> tuple[Artifact | None, str]:
        """What stands for a package's function; or None and why there is none."""
        lacks = absence(implementation) or self._ruled_out.get(key)
        if lacks:
            return None, lacks
        build = Build(parse_arch(variant.arch), self.spec.static(problem), variant.tunables)
        self._functions.put(key, (implementation, build))
        return Artifact(key, symbol_of(key), Values(), facts=Values(library=installed(implementation))), ""

    def has_failed(self, key: str) -> bool:
        """Whether this key was ruled out because it failed."""
        return bool(self._ruled_out.get(key))

    def add(self, artifact: Artifact) -> None:
        """An artifact that came into the store just now."""
        self._ruled_out.pop(artifact.key)
        self._found.put(artifact.key, artifact)

    def rule_out(self, key: str, why: str) -> None:
        """Never look for this key again: it failed, for the reason given."""
        self._found.pop(key)
        self._ruled_out.put(key, why)

    def look_again(self, failed: bool = False) -> None:
        """Forget which keys the store did not have; with `failed`, those too that failed."""
        self._ruled_out.drop(lambda _, why: failed or not why)

    def way_out(self, reference: str, arch: str, problem: Values) -> str:
        """What to do where nothing in here serves a problem, in a sentence without its full stop."""
        return f"Tune it with `{sweep_command(reference, arch, problem)}`, or load it with compile='allow'"

    def _same_sources(self, winner: Winner, problem: Values) -> bool:
        """Whether a winner's artifact was made from the present sources, by the compiler that it names."""
        there = winner.environment
        tools = (("nvidia-cutlass-dsl", there.cutlass_dsl), ("apache-tvm-ffi", there.tvm_ffi))
        return winner.artifact == self._key(winner.variant, problem, tools)

    def _key(self, variant: Variant, problem: Values, tools: Tools | None) -> str:
        """The key of what the present sources and these tools, or the present ones, make of a variant."""
        what = variant, self.spec.static(problem), tools
        key = self._keys.get(what)
        if key is None:
            sources, versions = self._fingerprint(variant), None if tools is None else dict(tools)
            key = space.compile_key(self.spec, variant, problem, sources=sources, tools=versions)
            self._keys.put(what, key)
        return key

    def _fingerprint(self, variant: Variant) -> str:
        name = variant.implementation
        if name not in self._sources:
            with _parsing:
                self._read_sources(name)
        return self._sources[name]

    def _read_sources(self, name: str) -> None:
        if name in self._sources:  # by the thread that was waited for
            return
        if self._imports is None:
            self._imports = read_imports(self.store.root)
        known = len(self._imports)
        self._sources[name] = identity.fingerprint(self.spec.implementation(name).build, self._imports)
        if len(self._imports) > known and self.store.root.is_dir() and not self.store.unwritable():
            keep_imports(self.store.root, self._imports)
