"""``tunekit.load``: a callable that picks the recorded winner of every call and runs it.

The hot path is a key from the tensors, a dict hit and the call. All else (checks,
winners, artifacts, compiles) happens under a lock, once per key.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from tunekit.dispatch.bundled import bundled_table, open_library
from tunekit.dispatch.calls import CallForm, Given, Slots, select
from tunekit.dispatch.checks import ALIGNMENT_BYTES, Call, check
from tunekit.dispatch.devices import DeviceFacts, Devices, TorchDevices
from tunekit.dispatch.ladder import Candidate, Table, walk
from tunekit.dispatch.library import Function, Library
from tunekit.dispatch.lookup import no_kernel, read_table
from tunekit.dispatch.on_request import OnRequestCompiler
from tunekit.errors import NoKernelError, TunekitError, UserError
from tunekit.model import Artifact, Choice, Level, Values
from tunekit.settings import load_settings
from tunekit.space import workspace
from tunekit.spec import KernelSpec, ScalarArg, TensorArg, absolute_reference, load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.bundle import Bundle

logger = logging.getLogger("tunekit")

MISALIGNED = ALIGNMENT_BYTES - 1
MAX_KEYS = 65_536
"""Keys kept; past it all are dropped and found again, so that memory stays bounded."""

Entry = Callable[[Slots], Any]


def load(
    name: str | Path,
    *,
    database: Path | None = None,
    artifacts: Path | None = None,
    bundle: Path | None = None,
    compile: Literal["never", "allow"] = "never",
    strict: bool = False,
    devices: Devices | None = None,
) -> Kernel:
    """A callable for the spec `name`, or a path as ``load_spec`` takes it.

    `database` and `artifacts` default to the settings' (TUNEKIT_DB, TUNEKIT_CACHE),
    read now. With `compile` ``"allow"`` a missing artifact is compiled on the request,
    in a process of its own; else the next level that has one serves. `strict` raises
    instead of serving anything but the first choice.

    `bundle` is a directory that ``tunekit bundle`` made: it alone is read, and nothing
    is written or compiled.

    Raises:
        UserError: no such spec; both `strict` and compiling on request; a bundle that is
            damaged or for another spec, or named beside a database, artifacts or compiling.
    """
    if compile not in ("never", "allow"):
        raise UserError(f"compile is {compile!r}; it must be 'never' or 'allow'")
    if strict and compile == "allow":
        raise UserError("strict mode never compiles: leave out strict=True or compile='allow'")
    if bundle is not None:
        if database is not None or artifacts is not None or compile == "allow":
            raise UserError("a bundle serves alone: leave out database, artifacts and compile='allow'")
        reference = absolute_reference(str(name))
        bundled = open_library(load_spec(reference), Path(bundle))
        return Kernel(bundled.spec, reference, bundled.bundle, bundled, None, strict, devices or TorchDevices())
    settings = load_settings(database=database)
    if artifacts is not None:
        settings = replace(settings, artifacts=artifacts)
    reference = absolute_reference(str(name))
    spec = load_spec(reference)
    library = Library(spec, ArtifactStore(settings.artifacts))
    compiler = OnRequestCompiler(reference, spec, library.store, settings) if compile == "allow" else None
    return Kernel(spec, reference, settings.database, library, compiler, strict, devices or TorchDevices())


class Kernel:
    """A served kernel family. Call it with the signature's tensors, by position or keyword.

    Problem axes that no tensor shows (flags) go by keyword. Scalars left out take the
    spec's defaults; outputs left out are allocated. Returns the outputs: one tensor, or
    a tuple in the signature's order. Safe to call from several threads.
    """

    def __init__(
        self,
        spec: KernelSpec,
        reference: str,
        database: Path | Bundle,
        library: Library,
        compiler: OnRequestCompiler | None,
        strict: bool,
        devices: Devices,
    ) -> None:
        self.spec = spec
        self._reference = reference
        self._database = database
        self._library = library
        self._compiler = compiler
        self._strict = strict
        self._devices = devices
        self._form = CallForm(spec)
        self._entries: dict[Any, Entry] = {}
        self._tables: dict[int, tuple[DeviceFacts, Table]] = {}
        self._choices: dict[tuple[int, Values], tuple[Choice, Function]] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"<tunekit kernel {self.spec.name} version {self.spec.version}>"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        form = self._form
        if keywords or len(args) > form.leading:
            slots, given, present = form.arrange(args, keywords)
        else:
            slots, given, present = args + form.blank[len(args) :], (), form.first[len(args)]
        try:
            parts: list[Any] = [given]
            for slot in present.tensors:
                tensor = slots[slot]
                if tensor is not None:
                    parts += (
                        slot,
                        tensor.shape,
                        tensor.dtype,
                        tensor.device,
                        tensor.is_contiguous() and not tensor.data_ptr() & MISALIGNED,
                    )
            for slot in present.scalars:
                value = slots[slot]
                if value is not None:
                    parts += (slot, type(value))
            key = tuple(parts)
            entry = self._entries.get(key)
        except (AttributeError, TypeError, RuntimeError):
            entry, key = None, None  # something that is no plain tensor: the checks below say what
        if entry is None:
            entry = self._resolve(key, slots, given)
        return entry(slots)

    def choice(self, *args: Any, **keywords: Any) -> Choice:
        """What the same call would run, and why; nothing is launched."""
        slots, given, _ = self._form.arrange(args, keywords)
        call = check(self.spec, slots, given)
        with self._lock:
            return self._pick(call)[0]

    def device_facts(self, index: int) -> DeviceFacts:
        """The device of that index as dispatch sees it (-1: the CPU)."""
        return self._devices.facts(index)

    def stats(self) -> dict[str, int]:
        """Counters: ``problems`` resolved and how many at each level (each once, not each call), or in ``error``.

        Artifacts ``loaded`` and ``compiled``; ``recovered``: recorded winners that could
        not serve, so that the next choice did; ``would_compile``: artifacts that were
        wanted and missing where compiling isn't allowed.
        """
        names = ("problems", *(level.value for level in Level), "error", "loaded", "compiled", "recovered")
        return {name: self._counts[name] for name in (*names, "would_compile")}

    def _resolve(self, key: Any, slots: Slots, given: Given) -> Entry:
        """The cold path: check the call, pick a variant, load it, remember how to call it."""
        call = check(self.spec, slots, given)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                choice, function = self._pick(call)
                entry = make_entry(function, call, slots, workspace(self.spec, choice.variant, call.problem))
                if len(self._entries) >= MAX_KEYS:
                    self._entries.clear()
                    self._choices.clear()
                if key is not None:
                    self._entries[key] = entry
        return entry

    def _pick(self, call: Call) -> tuple[Choice, Function]:
        """The choice for a checked call, and its function; made once per device and problem."""
        known = self._choices.get((call.device, call.problem))
        if known is not None:
            return known
        facts, table = self._table(call.device)
        self._counts["problems"] += 1
        done = walk(table, call.problem, lambda candidate: self._acquire(candidate, call.problem))
        if done.candidate is None or done.thing is None:
            self._counts["error"] += 1
            del self._tables[call.device]  # the next call looks again: somebody may have tuned or compiled meanwhile
            self._library.look_again()
            raise NoKernelError(no_kernel(self._library, self._reference, facts.arch, call.problem, done.missed))
        candidate, (artifact, function) = done.candidate, done.thing
        self._counts[candidate.level.value] += 1
        if candidate.level not in (Level.EXACT, Level.BUCKET):
            self._warn_once(
                f"level {candidate.level}",
                f"{self.spec.name} {call.problem} on {facts.arch} is served by {candidate.level}: {candidate.variant} "
                f"({candidate.why}); later ones of this level are only counted",
            )
        choice = done.choice(candidate, artifact)
        self._choices[(call.device, call.problem)] = choice, function
        return choice, function

    def _acquire(self, candidate: Candidate, problem: Values) -> tuple[tuple[Artifact, Function] | None, str]:
        """A candidate's artifact, loaded; or None and what it lacks (in strict mode: raises)."""
        artifact, lacks = self._library.find(candidate, problem)
        if artifact is None:
            artifact, lacks = self._compile(candidate, problem, lacks)
        if artifact is not None:
            loaded = self._library.is_loaded(artifact)
            try:
                function = self._library.load(artifact)
            except TunekitError as error:
                lacks = str(error)
                self._library.rule_out(artifact.key, lacks)
            else:
                self._counts["loaded"] += not loaded
                return (artifact, function), ""
        self._lacking(candidate, lacks)
        if self._strict:
            self._counts["error"] += 1
            raise NoKernelError(
                f"strict mode: {self.spec.name} {problem} would be served by {candidate.level} "
                f"({candidate.variant}: {candidate.why}), but {lacks}"
            )
        return None, lacks

    def _compile(self, candidate: Candidate, problem: Values, lacks: str) -> tuple[Artifact | None, str]:
        if self.spec.implementation(candidate.variant.implementation).is_library:
            return None, lacks  # there is nothing to compile
        key = self._library.present_key(candidate, problem)
        if self._compiler is None:
            self._counts["would_compile"] += 1
            return None, lacks
        if self._library.has_failed(key):
            return None, lacks
        artifact, why = self._compiler.compile(candidate.variant, problem)
        self._counts["compiled"] = self._compiler.compiled
        if artifact is None:
            self._library.rule_out(key, why)
        else:
            self._library.add(artifact)
        return artifact, why

    def _lacking(self, candidate: Candidate, why: str) -> None:
        """Count and say, once a variant, that a recorded choice can't serve."""
        what = f"lacking {candidate.variant.id}"
        if candidate.winner is not None and what not in self._warned:
            self._counts["recovered"] += 1
            self._warn_once(what, f"{self.spec.name}: {candidate.variant} ({candidate.level}) can't serve: {why}")

    def _table(self, device: int) -> tuple[DeviceFacts, Table]:
        found = self._tables.get(device)
        if found is None:
            facts = self._devices.facts(device)
            found = self._tables[device] = facts, read_winners_of(self.spec, facts, self._database)
        return found

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", message)


def read_winners_of(spec: KernelSpec, facts: DeviceFacts, source: Path | Bundle) -> Table:
    """What is known for a device: by the user's database and what ships, or by a bundle alone."""
    if isinstance(source, Bundle):
        return bundled_table(spec, facts.arch, facts.environment, source)
    return read_table(spec, facts.arch, facts.environment, source)


def make_entry(function: Function, call: Call, slots: Slots, workspace: int = 0) -> Entry:
    """How to make calls of one key: which arguments to fill in, and what to return.

    `workspace` float32 elements are allocated for each call, on its stream: calls that run at once share none.
    """
    import torch

    pick = select([slot for slot, _ in call.arguments])
    device = next(tensor.device for slot in range(len(slots)) if isinstance(tensor := slots[slot], torch.Tensor))
    new: list[tuple[int, tuple[int, ...], torch.dtype]] = []
    constants: list[tuple[int, Any]] = []
    floats: list[int] = []
    outputs: list[int] = []
    for position, (slot, arg) in enumerate(call.arguments):
        missing = slots[slot] is None
        if isinstance(arg, TensorArg):
            if arg.role == "output":
                outputs.append(position)
            if missing:
                new.append((position, arg.sizes(call.problem), getattr(torch, arg.dtype_of(call.problem))))
        elif missing:
            constants.append((position, _number(arg, arg.default(call.problem))))
        elif arg.dtype == "float32" and isinstance(slots[slot], int):
            floats.append(position)
    returned = itemgetter(*outputs) if outputs else _nothing

    def given(slots: Slots) -> Any:
        arguments = pick(slots)
        function(*arguments)
        return returned(arguments)

    def filled(slots: Slots) -> Any:
        arguments = list(pick(slots))
        for position, shape, dtype in new:
            arguments[position] = torch.empty(shape, dtype=dtype, device=device)
        for position, value in constants:
            arguments[position] = value
        for position in floats:
            arguments[position] = float(arguments[position])
        if workspace:
            arguments.append(torch.empty(workspace, dtype=torch.float32, device=device))
        function(*arguments)
        return returned(arguments)

    return filled if new or constants or floats or workspace else given


def _nothing(arguments: Any) -> None:
    """What a kernel returns whose outputs are all in-place."""


def _number(arg: ScalarArg, value: float) -> float | int:
    return float(value) if arg.dtype == "float32" else int(value)
