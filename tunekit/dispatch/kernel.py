"""Kernels: callables that pick the recorded winner of every call and run it.

The hot path is one call of a table's function, native where it can be (hot_path.c). All else (checks, winners,
artifacts, compiles) happens once per key.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tunekit.dispatch.calls import CallForm, Given, Order, Place
from tunekit.dispatch.checks import Call, check
from tunekit.dispatch.counters import Counters
from tunekit.dispatch.entries import Entry, Kind, kind_of, make_entry, maker
from tunekit.dispatch.faults import as_device_fault, classify
from tunekit.dispatch.forked import Guard
from tunekit.dispatch.graphs import beside_captures, capturing
from tunekit.dispatch.hot_path import HotPath, hot_path
from tunekit.dispatch.resolver import Asked, Resolver
from tunekit.dispatch.routes import Routes
from tunekit.dispatch.stats import live
from tunekit.dispatch.tables import CAPACITY, MISS, NativeTable, PythonTable, Table
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Choice, Level, Value, Values, Variant
from tunekit.space import workspace
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore

MAX_KEYS = 16_384
"""Keys kept of one way of writing calls, at some 5 KB each; past it all are dropped and found again."""
MAX_PLACES = 1024
"""Ways of writing calls, each with the axes that it gives, that are kept; past it likewise."""


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
        self._routes = Routes(self._form)
        self.by_count, self.by_names = self._routes.by_count, self._routes.by_names  # what caller.c reads
        self._late: set[Variant] = set()
        """What was compiled in the background and could not be put in place there."""
        self._lock = Guard()
        self._counters = Counters(self._tables, self._lock)
        resolver.on_arrival = weakref.WeakMethod(self._arrived)
        live(self, resolver.counts, self._counters)

    def __repr__(self) -> str:
        return f"<tunekit kernel {self.spec.name} version {self.spec.version}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            f"a kernel is not copied or pickled, since it holds code loaded into this process: share it, or call "
            f"tunekit.load for {self.spec.name} where it is wanted"
        )

    def _call(self, /, *args: Any, **keywords: Any) -> Any:
        place: Place = len(args)
        if keywords:
            place, args = self._form.read(args, keywords)
        try:
            function, finish = self._routes.of(place)
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

    @beside_captures()
    def bind(self, problem: Mapping[str, Value], device: int | None = None) -> Callable[..., Any]:
        """The function that serves one problem, for inner loops and CUDA graphs: nothing is looked up or checked.

        It takes all the arguments that exist for `problem`, outputs and numbers too, in the signature's order. Where
        the variant needs scratch memory, this function has its own: calls must then follow one another on a stream.
        `device` is torch's index, the current one by default, -1 for the CPU.

        Raises:
            NoKernelError: nothing can serve the problem.
            UserError: the problem lacks an axis, or has a value that is not allowed; no such device; nothing was called
                or bound for it before, and a CUDA graph is being captured; torch makes no memory now but fake tensors.
        """
        complete = self.spec.problem(problem)
        if device is not None and not isinstance(device, int):
            raise UserError(f"device is {device!r}; it must be torch's index of a GPU, or -1 for the CPU")
        index = self._resolver.devices.current() if device is None else device
        choice, function = self._resolver.pick(self._outside_capture(Call(complete, index, ())))
        elements = workspace(self.spec, choice.variant, complete)
        if not elements:
            return function
        import torch

        scratch = maker("workspace", (elements,), torch.float32, "cpu" if index < 0 else f"cuda:{index}")()
        return lambda *arguments: function(*arguments, scratch)

    @beside_captures()
    def choice(self, /, *args: Any, **keywords: Any) -> Choice:
        """What the same call would run, and why; nothing is launched."""
        slots, given = self._form.arrange(args, keywords)
        return self._resolver.pick(self._outside_capture(check(self.spec, slots, given)))[0]

    def refresh(self) -> None:
        """Read the recorded winners again: what another process tuned or compiled serves from now on.

        What has been called is resolved and loaded before it is put in place of the present entries, so that no call
        finds a cold key; what nothing serves any more stays as it is.

        Raises:
            UserError: a CUDA graph is being captured on this thread's stream.
        """
        if capturing():
            raise UserError(f"{self.spec.name}: refresh() while a CUDA graph is captured; call it before or after")
        self.reread()

    @beside_captures()
    def reread(self) -> None:
        """`refresh`, by a thread that captures nothing itself (see graphs): asking CUDA could disturb who does."""
        self._resolver.forget()
        renewed = self._renew(lambda choice: True)
        self._resolver.drop(lambda asked, _: asked not in renewed)

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
        return self._counters.by_level()

    @property
    def entries(self) -> int:
        """How many keys of calls are kept."""
        with self._lock:
            return sum(len(table.items()) for table in self._tables.values())

    @property
    def native(self) -> bool:
        """Whether calls are dispatched natively, once there were some."""
        with self._lock:
            return any(isinstance(table, NativeTable) for table in self._tables.values())

    def record(self, on: bool) -> None:
        """Count calls by problem from now on, from nothing; or no more. See ``tunekit.capture``."""
        if on:
            self._counters.record()
        else:
            self._counters.stop()

    def problems(self) -> tuple[Counter[Values], int]:
        """The calls by problem while they are recorded; and how many more there were, of problems beyond count."""
        return self._counters.by_problem()

    @beside_captures()
    def _learn(self, place: Place, values: tuple[Any, ...]) -> Any:
        """The cold path: check a call, find what serves it, remember that, and carry it out."""
        given, order = self._form.meaning(place)
        slots = order.slots(values)
        call = self._outside_capture(check(self.spec, slots, given))
        self._counters.cold(call.problem)
        if self._late and not capturing():
            self._install()
        entry = self._entry(kind_of(call, order, slots))
        with self._lock:
            self._remember(place, given, values, entry)
        try:
            return entry.run(slots)
        except Exception as error:
            self._raise_fault(entry, error)
            raise

    def _outside_capture(self, call: Call) -> Call:
        """A call for which nothing has to be loaded while a CUDA graph is captured on this thread's stream."""
        if not self._resolver.knows(call) and capturing():
            raise UserError(
                f"{self.spec.name} {call.problem} is called for the first time while a CUDA graph is being captured, "
                "and nothing may be loaded then: call it once before, or bind() it"
            )
        return call

    def _entry(self, kind: Kind) -> Entry:
        served = self._resolver.pick(kind.call)
        elements = workspace(self.spec, served[0].variant, kind.call.problem)
        return make_entry(kind, served, elements, self._hot() is not None)

    def _hot(self) -> HotPath | None:
        return None if self._native_from is None else hot_path(self._native_from)

    def _remember(self, place: Place, given: Given, values: tuple[Any, ...], entry: Entry) -> None:
        table = self._tables.get(place)
        if table is None:
            if len(self._tables) >= MAX_PLACES:
                for dropped in list(self._tables.values()):
                    self._counters.gone(dropped)
                self._tables.clear()
                self._routes.clear()
            table = self._open(given, entry.kind.order, CAPACITY, entry.like)
        key = table.key(values)
        if key is None:
            return
        while not table.add(key, entry):
            capacity = table.capacity * 2
            table = self._copy(table, capacity) if capacity <= MAX_KEYS else self._copy(table, CAPACITY, lambda _: None)
        self._put(place, table)

    def _put(self, place: Place, table: Table) -> None:
        self._tables[place] = table
        self._routes.lay(place, table)

    def _open(self, given: Given, order: Order, capacity: int, like: int | None) -> Table:
        hot = self._hot()
        return PythonTable(given, order, capacity) if hot is None else NativeTable(given, order, capacity, hot, like)

    def _copy(self, table: Table, capacity: int, again: Callable[[Entry], Entry | None] | None = None) -> Table:
        """A table with the same entries, or what `again` makes of each; the calls of the old one are counted."""
        renewed = [(key, again(entry) if again else entry) for key, entry in table.items()]
        entries = [(key, entry) for key, entry in renewed if entry is not None]
        while capacity <= len(entries):
            capacity *= 2
        copy = self._open(table.given, table.order, capacity, table.like)
        for key, entry in entries:
            copy.add(key, entry)
        self._counters.gone(table)
        return copy

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
        self._resolver.drop(lambda asked, choice: choice.better in late and asked not in renewed)

    def _renew(self, outdated: Callable[[Choice], bool]) -> set[Asked]:
        """Choose again for the entries of outdated choices, all loaded before any is put in place of the old ones.

        Returns what they are for.
        """
        with self._lock:
            entries = [entry for table in self._tables.values() for _, entry in table.items()]
        renewed = self._resolver.renew(entry.kind.call for entry in entries if outdated(entry.choice))
        with self._lock:
            for place, table in list(self._tables.items()):
                if any(entry.asked in renewed for _, entry in table.items()):
                    self._put(place, self._copy(table, CAPACITY, lambda entry: self._renewed(entry, renewed)))
        return renewed

    def _renewed(self, entry: Entry, renewed: set[Asked]) -> Entry:
        """What serves the calls of an entry now, if that was chosen again."""
        if entry.asked not in renewed:
            return entry
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
