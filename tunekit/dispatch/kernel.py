"""``tunekit.load``: a callable that picks the recorded winner of every call and runs it.

The hot path is one call of a table's function, native where it can be (hot_path.c). All else (checks, winners,
artifacts, compiles) happens once per key.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.dispatch import recorder
from tunekit.dispatch.calls import CallForm, Given, Order, Way
from tunekit.dispatch.checks import Call, check
from tunekit.dispatch.counters import Counters
from tunekit.dispatch.devices import DeviceFacts, Devices, TorchDevices
from tunekit.dispatch.entries import Entry, Kind, kind_of, make_entry
from tunekit.dispatch.forked import Guard
from tunekit.dispatch.graphs import beside_captures, capturing
from tunekit.dispatch.hot_path import HotPath, hot_path
from tunekit.dispatch.library import Library
from tunekit.dispatch.on_request import OnRequestCompiler
from tunekit.dispatch.policy import Compile, policy
from tunekit.dispatch.ranks import WAIT_S, join, own_name
from tunekit.dispatch.resolver import Place, Resolver
from tunekit.dispatch.stats import live
from tunekit.dispatch.tables import CAPACITY, MISS, NativeTable, PythonTable, Table
from tunekit.dispatch.watcher import watch
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Choice, Level, Value, Values, Variant
from tunekit.settings import load_settings
from tunekit.space import workspace
from tunekit.spec import KernelSpec, absolute_reference, load_spec
from tunekit.store.artifacts import ArtifactStore

MAX_KEYS = 16_384
"""Keys kept of one way of writing calls, at some 5 KB each; past it all are dropped and found again."""
MAX_WAYS = 1024
"""Ways of writing calls kept, under so many values of the axes given by keyword; past it likewise."""


def load(
    name: str | Path,
    *,
    database: Path | None = None,
    artifacts: Path | None = None,
    fallback: str = "default",
    strict: bool = False,
    compile: Compile = "never",
    all_or_nothing: bool = False,
    watch_s: float | None = None,
    devices: Devices | None = None,
    native: bool = True,
) -> Kernel:
    """A callable for the spec `name`, or a path as ``load_spec`` takes it.

    `database` and `artifacts` default to the settings' (TUNEKIT_DB, TUNEKIT_CACHE),
    read now. `fallback` is the last level of the ladder that may serve; `strict` raises
    instead of serving anything but the first choice. A missing artifact is left to the next
    level that has one; with `compile` ``"allow"`` it is compiled while the call waits, with
    ``"background"`` while the next level serves: in a process of its own, with its limits.
    With `all_or_nothing` the ranks of a job take the same artifact for each problem, the first
    that all of them have loaded; every rank must load, call and refresh alike. With `watch_s` a thread looks
    that often (seconds) whether other winners are recorded, and calls ``refresh``.
    `native` False dispatches in Python also where the native hot path is to be had.

    Raises:
        UserError: no such spec; an unknown policy, or one that contradicts itself; or `all_or_nothing`
            where nothing tells how many ranks there are.
    """
    chosen = policy(fallback, strict, compile, all_or_nothing, watch_s)
    settings = load_settings(database=database)
    if artifacts is not None:
        settings = replace(settings, artifacts=artifacts)
    reference = absolute_reference(str(name))
    spec = load_spec(reference)
    library = Library(spec, ArtifactStore(settings.artifacts))
    compiler = None if compile == "never" else OnRequestCompiler(reference, spec, library.store, settings, own_name())
    ranks = None
    if all_or_nothing:
        ranks = join(spec.name, library.store, WAIT_S if compiler is None else 2 * compiler.wait_s)
    resolver = Resolver(spec, reference, settings.database, library, compiler, chosen, devices or TorchDevices(), ranks)
    kernel = Kernel(spec, resolver, library.store if native else None)
    recorder.note(kernel, os.environ.get(recorder.DIRECTORY))
    if watch_s is not None:
        watch(kernel, settings.database, watch_s)
    return kernel


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
        self._positional: dict[int, Table] = {}
        self._by_keyword: dict[Hashable, Table] = {}
        self._counters = Counters()
        self._late: set[Variant] = set()
        """What was compiled in the background and could not be put in place there."""
        self._lock = Guard()
        resolver.on_arrival = weakref.WeakMethod(self._arrived)
        live(self)

    def __repr__(self) -> str:
        return f"<tunekit kernel {self.spec.name} version {self.spec.version}>"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if keywords:
            way, given, args = self._form.read(args, keywords)
            table = self._by_keyword.get((way, given))
        else:
            table = self._positional.get(len(args))
        if table is not None:
            try:
                answer = table.function(*args)
            except Exception:
                self._explain(table, args)
                raise
            if type(answer) is not int:
                return answer
            if answer >= 0:
                return args[answer]
            if answer != MISS:
                return table.finish(answer, args)
        return self._learn(way, given, args) if keywords else self._learn((len(args),), (), args)

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

    def choice(self, *args: Any, **keywords: Any) -> Choice:
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
        renewed = self._renew(lambda choice: True)
        self._resolver.drop(lambda place, _: place not in renewed)

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
            return self._counters.by_level(self._tables())

    @property
    def entries(self) -> int:
        """How many keys of calls are kept."""
        with self._lock:
            return sum(1 for table in self._tables() for _ in table.called())

    @property
    def native(self) -> bool:
        """Whether calls are dispatched natively, once there were some."""
        with self._lock:
            return any(isinstance(table, NativeTable) for table in self._tables())

    def record(self, on: bool) -> None:
        """Count calls by problem from now on, from nothing; or no more. See ``tunekit.capture``."""
        with self._lock:
            if on:
                self._counters.record(self._tables())
            else:
                self._counters.stop()

    def problems(self) -> tuple[Counter[Values], int]:
        """The calls by problem while they are recorded; and how many more there were, of problems beyond count."""
        with self._lock:
            return self._counters.by_problem(self._tables()), self._counters.beyond

    def _learn(self, way: Way, given: Given, values: tuple[Any, ...]) -> Any:
        """The cold path: check a call, find what serves it, remember that, and carry it out."""
        order = self._form.order(way, given)
        slots = order.slots(values)
        call = check(self.spec, slots, given)
        if not self._resolver.knows(call) and capturing():
            raise UserError(
                f"{self.spec.name} {call.problem} is called for the first time while a CUDA graph is being captured, "
                "and nothing may be loaded then: call it once before, or bind() it"
            )
        with self._lock:
            self._counters.cold(call.problem)
        if self._late and not capturing():
            self._install()
        entry = self._entry(kind_of(call, order, slots))
        with self._lock:
            self._remember(way, given, order, values, entry)
        return entry.run(slots)

    def _entry(self, kind: Kind) -> Entry:
        served = self._resolver.pick(kind.call)
        elements = workspace(self.spec, served[0].variant, kind.call.problem)
        return make_entry(kind, served, elements, self._hot())

    def _hot(self) -> HotPath | None:
        return None if self._native_from is None else hot_path(self._native_from)

    def _remember(self, way: Way, given: Given, order: Order, values: tuple[Any, ...], entry: Entry) -> None:
        tables: dict[Any, Table] = self._by_keyword if len(way) > 1 else self._positional
        place = (way, given) if len(way) > 1 else way[0]
        table = tables.get(place)
        if table is None:
            if len(tables) >= MAX_WAYS:
                for dropped in list(tables.values()):
                    self._counters.gone(dropped)
                tables.clear()
            table = self._open(given, order, CAPACITY)
        key = table.key(values)
        if key is None:
            return
        while not table.add(key, entry):
            capacity = table.capacity * 2
            table = self._copy(table, capacity) if capacity <= MAX_KEYS else self._copy(table, CAPACITY, lambda _: None)
        tables[place] = table

    def _open(self, given: Given, order: Order, capacity: int) -> Table:
        hot = self._hot()
        return PythonTable(given, order, capacity) if hot is None else NativeTable(given, order, capacity, hot)

    def _copy(self, table: Table, capacity: int, again: Callable[[Entry], Entry | None] | None = None) -> Table:
        """A table with the same entries, or what `again` makes of each; the calls of the old one are counted."""
        renewed = [(key, again(entry) if again else entry) for key, entry, _ in table.called()]
        entries = [(key, entry) for key, entry in renewed if entry is not None]
        while capacity <= len(entries):
            capacity *= 2
        copy = self._open(table.given, table.order, capacity)
        for key, entry in entries:
            copy.add(key, entry)
        self._counters.gone(table)
        return copy

    def _tables(self) -> list[Table]:
        return [*self._positional.values(), *self._by_keyword.values()]

    def _arrived(self, variant: Variant) -> None:
        """A variant was compiled in the background, by the thread that calls this."""
        self._late.add(variant)
        with beside_captures() as allowed:
            if allowed:
                self._install()

    def _install(self) -> None:
        late = set(self._late)
        self._late -= late
        renewed = self._renew(lambda choice: choice.better in late)
        self._resolver.drop(lambda place, choice: choice.better in late and place not in renewed)

    def _renew(self, outdated: Callable[[Choice], bool]) -> set[Place]:
        """Choose again for the entries of outdated choices, all loaded before any is put in place of the old ones.

        Returns what they are for.
        """
        with self._lock:
            entries = [entry for table in self._tables() for _, entry, _ in table.called()]
        renewed = self._resolver.renew(entry.kind.call for entry in entries if outdated(entry.choice))
        with self._lock:
            for tables in (self._positional, self._by_keyword):
                self._replace(tables, renewed)
        return renewed

    def _replace(self, tables: dict[Any, Table], renewed: set[Place]) -> None:
        def again(entry: Entry) -> Entry:
            return self._renewed(entry) if place_of(entry) in renewed else entry

        for way, table in list(tables.items()):
            if any(place_of(entry) in renewed for _, entry, _ in table.called()):
                tables[way] = self._copy(table, CAPACITY, again)

    def _renewed(self, entry: Entry) -> Entry:
        try:
            return self._entry(entry.kind)
        except NoKernelError:
            return entry

    def _explain(self, table: Table, values: tuple[Any, ...]) -> None:
        """After a call that raised: say what is wrong with its arguments, if that is the reason."""
        check(self.spec, table.order.slots(values), table.given)


def place_of(entry: Entry) -> Place:
    """The device and problem that an entry serves."""
    return entry.kind.call.device, entry.kind.call.problem
