"""``tunekit.load``: a callable that picks the recorded winner of every call and runs it.

The hot path is one call of a table's function, native where it can be (hot_path.c). All else (checks, winners,
artifacts, compiles) happens once per key.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tunekit.dispatch.calls import CallForm, Given, Order, Place
from tunekit.dispatch.checks import Call, check
from tunekit.dispatch.devices import DeviceFacts, Devices, TorchDevices
from tunekit.dispatch.entries import Entry, Kind, kind_of, make_entry
from tunekit.dispatch.faults import as_device_fault, classify
from tunekit.dispatch.hot_path import HotPath, caller, hot_path
from tunekit.dispatch.library import Library
from tunekit.dispatch.on_request import OnRequestCompiler
from tunekit.dispatch.resolver import Resolver
from tunekit.dispatch.tables import CAPACITY, MISS, NativeTable, PythonTable, Table
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Choice, Level, Value
from tunekit.settings import load_settings
from tunekit.space import workspace
from tunekit.spec import KernelSpec, absolute_reference, load_spec
from tunekit.store.artifacts import ArtifactStore

MAX_KEYS = 65_536
"""Keys kept of one way of writing calls; past it all are dropped and found again, so that memory stays bounded."""
MAX_PLACES = 1024
"""Ways of writing calls, each with the axes that it gives, that are kept; past it likewise."""

NOWHERE = (lambda *arguments: MISS, lambda answer, arguments: None)
"""Stands for the table of a place that has none."""


def load(
    name: str | Path,
    *,
    database: Path | None = None,
    artifacts: Path | None = None,
    bundle: Path | None = None,
    compile: Literal["never", "allow"] = "never",
    strict: bool = False,
    devices: Devices | None = None,
    native: bool = True,
) -> Kernel:
    """A callable for the spec `name`, or a path as ``load_spec`` takes it.

    `database` and `artifacts` default to the settings' (TUNEKIT_DB, TUNEKIT_CACHE),
    read now. With `compile` ``"allow"`` a missing artifact is compiled on the request,
    in a process of its own; else the next level that has one serves. `strict` raises
    instead of serving anything but the first choice. `native` False dispatches in Python
    also where the native hot path is to be had.

    `bundle` is a directory that ``tunekit bundle`` made: winners and kernels come from it alone,
    and nothing is written there or compiled for it.

    Raises:
        UserError: no such spec; both `strict` and compiling on request; a bundle that is
            damaged or for another spec, or named beside a database, artifacts or compiling.
    """
    if compile not in ("never", "allow"):
        raise UserError(f"compile is {compile!r}; it must be 'never' or 'allow'")
    if strict and compile == "allow":
        raise UserError("strict mode never compiles: leave out strict=True or compile='allow'")
    reference = absolute_reference(str(name))
    spec = load_spec(reference)
    devices = devices or TorchDevices()
    if bundle is not None:
        if database is not None or artifacts is not None or compile == "allow":
            raise UserError("a bundle serves alone: leave out database, artifacts and compile='allow'")
        from tunekit.dispatch.bundled import open_library  # here: most servers have none

        bundled = open_library(spec, Path(bundle).absolute())
        resolver = Resolver(spec, reference, bundled.bundle, bundled, None, strict, devices)
        return make_kernel(spec, resolver, bundled.store if native else None)
    settings = load_settings(database=database)
    settings = replace(
        settings,  # read whenever something is missing, wherever the process is by then
        database=Path(settings.database).absolute(),
        artifacts=Path(artifacts or settings.artifacts).absolute(),
    )
    library = Library(spec, ArtifactStore(settings.artifacts))
    compiler = OnRequestCompiler(reference, spec, library.store, settings) if compile == "allow" else None
    resolver = Resolver(spec, reference, settings.database, library, compiler, strict, devices)
    return make_kernel(spec, resolver, library.store if native else None)


def make_kernel(spec: KernelSpec, resolver: Resolver, native_from: ArtifactStore | None) -> Kernel:
    """A kernel, of the native class where that can be had."""
    native = None if native_from is None else caller(native_from)
    return (Kernel if native is None else native_kernel(native))(spec, resolver, native_from)


@functools.cache
def native_kernel(caller: type) -> type[Kernel]:
    """The class of kernels whose call is caller.c's."""
    return type("Kernel", (caller, Kernel), {"__doc__": Kernel.__doc__, "__module__": Kernel.__module__})


class Kernel:
    """A served kernel family. Call it with the signature's tensors, by position or keyword.

    Problem axes that no tensor shows (flags) go by keyword. Scalars left out take the
    spec's defaults; outputs left out are allocated. Returns the outputs: one tensor, or
    a tuple in the signature's order. Safe to call from several threads. `native_from` is
    where the native hot path is kept; None: calls are dispatched in Python.
    """

    def __init__(self, spec: KernelSpec, resolver: Resolver, native_from: ArtifactStore | None) -> None:
        self.spec = spec
        self._resolver = resolver
        self._native_from = native_from
        self._form = CallForm(spec)
        self._tables: dict[Place, Table] = {}
        self._functions: dict[Place, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """What a call needs of a table; of one table, also while another takes its place."""
        self.functions: list[tuple[Callable[..., Any], Callable[..., Any]] | None] = [None] * (len(spec.signature) + 1)
        """The same for calls by position, at their number of arguments: what caller.c looks at."""
        self._past: Counter[Level] = Counter()
        """Calls counted by tables that are gone."""
        self._lock = threading.RLock()
        _kernels.add(self)

    def __repr__(self) -> str:
        return f"<tunekit kernel {self.spec.name} version {self.spec.version}>"

    def _call(self, /, *args: Any, **keywords: Any) -> Any:
        place: Place = len(args)
        if keywords:
            place, args = self._form.read(args, keywords)
        try:
            function, finish = self._functions.get(place, NOWHERE)
            answer = function(*args)
            if type(answer) is not int:
                return answer
            if answer >= 0:
                return args[answer]
            if answer < MISS:
                return finish(answer, args)
        except Exception as error:
            self._explain(place, args, error)
            raise
        return self._learn(place, args)

    __call__ = _call  # in a native kernel, caller.c stands before it

    def bind(self, problem: Mapping[str, Value], device: int | None = None) -> Callable[..., Any]:
        """The function that serves one problem, for inner loops and CUDA graphs: nothing is looked up or checked.

        It takes all the arguments that exist for `problem`, outputs and numbers too, in the signature's order. Where
        the variant needs scratch memory, this function has its own: calls must then follow one another on a stream.
        `device` is torch's index, the current one by default, -1 for the CPU.

        Raises:
            NoKernelError: nothing can serve the problem.
            UserError: the problem lacks an axis, or has a value that is not allowed.
        """
        complete = self.spec.problem(problem)
        index = self._resolver.devices.current() if device is None else device
        choice, function = self._resolver.pick(Call(complete, index, ()))
        elements = workspace(self.spec, choice.variant, complete)
        if not elements:
            return function
        import torch

        scratch = torch.empty(elements, dtype=torch.float32, device="cpu" if index < 0 else f"cuda:{index}")
        return lambda *arguments: function(*arguments, scratch)

    def choice(self, /, *args: Any, **keywords: Any) -> Choice:
        """What the same call would run, and why; nothing is launched."""
        slots, given = self._form.arrange(args, keywords)
        return self._resolver.pick(check(self.spec, slots, given))[0]

    def refresh(self) -> None:
        """Read the recorded winners again: what another process tuned or compiled serves from now on.

        What has been called is resolved and loaded before it is put in place of the present entries, so that no call
        finds a cold key; what nothing serves any more stays as it is.

        Raises:
            UserError: a CUDA graph is being captured on this thread's stream.
        """
        if capturing():
            raise UserError(f"{self.spec.name}: refresh() while a CUDA graph is captured; call it before or after")
        self._resolver.forget()
        with self._lock:
            for place, table in list(self._tables.items()):
                self._put(place, self._copy(table, CAPACITY, self._renewed))

    def device_facts(self, index: int) -> DeviceFacts:
        """The device of that index as dispatch sees it (-1: the CPU)."""
        return self._resolver.devices.facts(index)

    def stats(self) -> dict[str, int]:
        """Counters: ``problems`` resolved and how many at each level (each once, not each call), or in ``error``.

        Artifacts ``loaded`` and ``compiled``; ``recovered``: recorded winners that could
        not serve, so that the next choice did; ``would_compile``: artifacts that were
        wanted and missing where compiling isn't allowed. ``calls``: those that found an entry.
        """
        names = ("problems", *(level.value for level in Level), "error", "loaded", "compiled", "recovered")
        counts = {name: self._resolver.counts[name] for name in (*names, "would_compile")}
        return {**counts, "calls": sum(self.calls().values())}

    def calls(self) -> Counter[Level]:
        """How many calls found an entry, by the level that serves them."""
        with self._lock:
            total = Counter(self._past)
            for table in self._tables.values():
                for _, entry, calls in table.called():
                    total[entry.choice.level] += calls
        return total

    def _learn(self, place: Place, values: tuple[Any, ...]) -> Any:
        """The cold path: check a call, find what serves it, remember that, and carry it out."""
        given, order = self._form.meaning(place)
        slots = order.slots(values)
        call = check(self.spec, slots, given)
        if not self._resolver.knows(call) and capturing():
            raise UserError(
                f"{self.spec.name} {call.problem} is called for the first time while a CUDA graph is being captured, "
                "and nothing may be loaded then: call it once before, or bind() it"
            )
        entry = self._entry(kind_of(call, order, slots))
        with self._lock:
            self._remember(place, given, values, entry)
        try:
            return entry.run(slots)
        except Exception as error:
            self._raise_fault(entry, error)
            raise

    def _entry(self, kind: Kind) -> Entry:
        served = self._resolver.pick(kind.call)
        elements = workspace(self.spec, served[0].variant, kind.call.problem)
        return make_entry(kind, served, elements, self._hot())

    def _hot(self) -> HotPath | None:
        return None if self._native_from is None else hot_path(self._native_from)

    def _remember(self, place: Place, given: Given, values: tuple[Any, ...], entry: Entry) -> None:
        table = self._tables.get(place)
        if table is None:
            if len(self._tables) >= MAX_PLACES:
                for dropped in list(self._tables.values()):
                    self._count(dropped)
                self._tables.clear()
                self._functions.clear()
                self.functions = [None] * len(self.functions)
            table = self._open(given, entry.kind.order, CAPACITY)
        key = table.key(values)
        if key is None:
            return
        while not table.add(key, entry):
            capacity = table.capacity * 2
            table = self._copy(table, capacity) if capacity <= MAX_KEYS else self._copy(table, CAPACITY, lambda _: None)
        self._put(place, table)

    def _put(self, place: Place, table: Table) -> None:
        self._tables[place] = table
        pair = self._functions[place] = table.function, table.finish
        if isinstance(place, int):
            self.functions[place] = pair

    def _open(self, given: Given, order: Order, capacity: int) -> Table:
        hot = self._hot()
        return PythonTable(given, order, capacity) if hot is None else NativeTable(given, order, capacity, hot)

    def _copy(self, table: Table, capacity: int, again: Callable[[Entry], Entry | None] | None = None) -> Table:
        """A table with the same entries, or what `again` makes of each; the calls of the old one are counted."""
        entries = [(key, again(entry) if again else entry) for key, entry, _ in table.called()]
        while capacity <= len(entries):
            capacity *= 2
        copy = self._open(table.given, table.order, capacity)
        for key, entry in entries:
            if entry is not None:
                copy.add(key, entry)
        self._count(table)
        return copy

    def _count(self, table: Table) -> None:
        for _, entry, calls in table.called():
            self._past[entry.choice.level] += calls

    def _renewed(self, entry: Entry) -> Entry:
        try:
            return self._entry(entry.kind)
        except NoKernelError:
            return entry

    def _explain(self, place: Place, values: tuple[Any, ...], error: Exception) -> None:
        """After a call that raised: say what it was, if the GPU faulted or the arguments are to blame."""
        table = self._tables.get(place) if classify(error) else None
        entry = table.entry(values) if table is not None else None
        if entry is not None:
            self._raise_fault(entry, error)
        given, order = self._form.meaning(place)
        check(self.spec, order.slots(values), given)

    def _raise_fault(self, entry: Entry, error: Exception) -> None:
        """Raise what a fault of the GPU is; nothing for any other error."""
        fault = as_device_fault(error, self.spec.name, entry.choice.variant, entry.kind.call.device)
        if fault is not None:
            raise fault from error


_kernels: weakref.WeakSet[Kernel] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a lock that another thread held at the fork would never be given back there."""
    for kernel in _kernels:
        kernel._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
