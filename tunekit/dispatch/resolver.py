"""The cold path: which variant serves a checked call, decided and loaded once per device and problem."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.dispatch.checks import Call
from tunekit.dispatch.devices import DeviceFacts, Devices
from tunekit.dispatch.faults import as_device_fault
from tunekit.dispatch.forked import Guard, renew
from tunekit.dispatch.kept import Kept
from tunekit.dispatch.ladder import Candidate, Table, Walk, explain_no_kernel, walk
from tunekit.dispatch.library import Function, Library, compile_command, sweep_command
from tunekit.dispatch.lookup import no_kernel, read_table
from tunekit.dispatch.policy import Policy
from tunekit.errors import NoKernelError, TunekitError
from tunekit.model import Artifact, Choice, Level, Values, Variant
from tunekit.spec import KernelSpec
from tunekit.store.readonly import FilesMark, files_mark

if TYPE_CHECKING:
    from tunekit.dispatch.on_request import OnRequestCompiler
    from tunekit.dispatch.ranks import Ranks
    from tunekit.store.bundle import Bundle

logger = logging.getLogger("tunekit")

Served = tuple[Choice, Function]
Asked = tuple[int, Values]
"""A device and a problem."""

MOST_SERVED = 16_384
"""Problems whose choice is kept; one that is forgotten is resolved again."""
MOST_WARNINGS = 4096
SAY_S = 2.0
"""A thread that waits this long for another says what for."""


class Resolution:
    """A problem being resolved by one thread, while others may wait for it. `doing` says what takes time.

    `wanted` is the variant that is to be compiled in the background for it.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.doing = "its lookup"
        self.served: Served | None = None
        self.wanted: Variant | None = None
        self._done = threading.Event()

    def end(self) -> None:
        self._done.set()

    def wait(self, spec: str) -> None:
        """Until it has ended: a lookup, a load, or a compile, which has a limit."""
        if not self._done.wait(SAY_S):
            logger.warning("a call of %s %s waits for %s in another thread", spec, self.call.problem, self.doing)
            self._done.wait()


class Resolver:
    """What serves the calls of one spec: the recorded winners, the artifacts and, if asked for, the compiler.

    `source` is where the winners are recorded: the user's database (beside what ships), or a bundle.
    `counts` is for `Kernel.stats`. Safe to call from several threads: one resolves a problem, others that want the
    same wait for it, and nobody else does. `on_arrival` is told of a variant that was compiled in the background
    (or could not be), by the thread that did it.
    """

    def __init__(
        self,
        spec: KernelSpec,
        reference: str,
        source: Path | Bundle,
        library: Library,
        compiler: OnRequestCompiler | None,
        policy: Policy,
        devices: Devices,
        ranks: Ranks | None = None,
    ) -> None:
        self.spec = spec
        self.policy = policy
        self.devices = devices
        self.counts: Counter[str] = Counter()
        self.on_arrival: weakref.WeakMethod[Callable[[Variant], None]] | None = None
        self._reference = reference
        self._source = source
        self._library = library
        self._compiler = compiler
        self._ranks = ranks
        self._tables: dict[int, tuple[DeviceFacts, Table]] = {}
        self._read: FilesMark = ()
        """What the database was when the first of the tables was read."""
        self._missed = False
        """Nothing served a call: the next one looks whether somebody tuned meanwhile. It may be one of many, by a
        server that catches the error, so what can't have changed is not read again."""
        self._served: Kept[Asked, Served] = Kept(MOST_SERVED)
        self._under_way: dict[tuple[Asked, int], Resolution] = {}
        self._refreshes = 0
        self._generation = 0
        """Counts what made earlier choices outdated, so that one that was under way then is not kept."""
        self._guard = Guard()
        self._reading = Guard()
        self._warned: Kept[str, bool] = Kept(MOST_WARNINGS)
        self._unserved: Kept[tuple[str, Values], str] = Kept(MOST_WARNINGS)
        renew(self)

    def pick(self, call: Call) -> Served:
        """The choice for a checked call, and its function; made once per device and problem.

        Raises:
            NoKernelError: nothing can serve it; or nothing that the policy allows.
        """
        known = self._served.get((call.device, call.problem))
        return known if known is not None else self._once(call, fresh=False)

    def knows(self, call: Call) -> bool:
        """Whether `pick` would neither load nor look anything up."""
        return (call.device, call.problem) in self._served

    def forget(self) -> None:
        """Read the winners again when they are next wanted, and look again for what was missing or failed.

        The choices made stand until they are made again (`renew`).
        """
        with self._guard:
            self._generation += 1
            self._refreshes += 1
        with self._reading:
            self._tables.clear()
        self._library.look_again(failed=True)

    def renew(self, calls: Iterable[Call]) -> set[Asked]:
        """Choose again for these calls. Returns what for: without those that nothing can serve now, each said."""
        renewed: set[Asked] = set()
        for asked, call in {(call.device, call.problem): call for call in calls}.items():
            try:
                self._once(call, fresh=True)
            except NoKernelError as error:
                logger.warning("%s", error)
            else:
                renewed.add(asked)
        return renewed

    def drop(self, unwanted: Callable[[Asked, Choice], bool]) -> None:
        """Forget the choices that are unwanted: each is made again when it is next asked for."""
        self._served.drop(lambda asked, served: unwanted(asked, served[0]))

    def _once(self, call: Call, fresh: bool) -> Served:
        """Resolve a call, unless another thread does or (where not `fresh`) did."""
        asked = call.device, call.problem
        while True:
            with self._guard:
                known = None if fresh else self._served.get(asked)
                if known is not None:
                    return known
                generation = self._generation
                other = self._under_way.get((asked, generation))
                if other is None:
                    mine = self._under_way[asked, generation] = Resolution(call)
                    break
            other.wait(self.spec.name)
            if other.served is not None:
                return other.served
        try:
            mine.served = self._resolve(mine)
            return mine.served
        finally:
            with self._guard:
                self._under_way.pop((asked, generation), None)
                if mine.served is not None and generation == self._generation:
                    self._served.put(asked, mine.served)
            mine.end()

    def _resolve(self, resolution: Resolution) -> Served:
        call = resolution.call
        facts, table = self._table(call.device)
        self.count("problems")
        try:
            chosen = None if self._ranks is None else self._agreed(self._ranks, table, resolution)
            done = walk(table, call.problem, lambda candidate: self._acquire(candidate, resolution, facts.arch, chosen))
            if done.candidate is None or done.thing is None:
                why = self._why_none(facts.arch, call.problem)
                message = no_kernel(self._library, self._reference, facts.arch, call.problem, why, done.missed)
                raise NoKernelError(message)
        except NoKernelError:
            self.count("error")
            self._missed = True
            self._library.look_again()
            raise
        return self._chosen(done, done.candidate, done.thing, call.problem, facts.arch)

    def _chosen(
        self,
        done: Walk[tuple[Artifact, Function]],
        candidate: Candidate,
        thing: tuple[Artifact, Function],
        problem: Values,
        arch: str,
    ) -> Served:
        artifact, function = thing
        self.count(candidate.level.value)
        if candidate.level not in (Level.EXACT, Level.BUCKET):
            self._warn_once(
                f"level {candidate.level}",
                f"{self.spec.name} {problem} on {arch} is served by {candidate.level}: {candidate.variant} "
                f"({candidate.why}); later ones of this level are only counted",
            )
        return done.choice(candidate, artifact), function

    def _agreed(self, ranks: Ranks, table: Table, resolution: Resolution) -> str:
        """The key of the artifact that every rank has loaded for a problem; empty where there is none."""
        problem = resolution.call.problem
        offers: dict[str, tuple[Candidate, Artifact]] = {}

        def offer(candidate: Candidate) -> tuple[None, str]:
            if self.policy.allows(candidate.level):
                artifact, lacks = self._library.find(candidate, problem)
                if artifact is None and not offers:
                    artifact, _ = self._compile(candidate, resolution, lacks)
                if artifact is not None:
                    offers.setdefault(artifact.key, (candidate, artifact))
            return None, ""

        def load(key: str) -> str:
            if key not in offers:
                return "it is not there any more"
            candidate, artifact = offers[key]
            return self._load(candidate, artifact, resolution.call.device)[1]

        walk(table, problem, offer)
        resolution.doing = "the other ranks' choice"
        subject = f"{self.spec.name} version {self.spec.version} {problem} on {table.arch}"
        return ranks.agree(subject, self._refreshes, list(offers), load) or ""

    def _load(self, candidate: Candidate, artifact: Artifact, device: int) -> tuple[Function | None, str]:
        """A candidate's function; or None and why it can't be loaded, which rules its artifact out.

        Raises:
            DeviceFaultError: the GPU is lost to this process.
        """
        try:
            function, new = self._library.load(artifact)
        except TunekitError as error:
            fault = as_device_fault(error, self.spec.name, candidate.variant, device)
            if fault is not None:  # no other variant would load in a context that is lost
                raise fault from error
            self._library.rule_out(artifact.key, str(error))
            return None, str(error)
        self.count("loaded", int(new))
        return function, ""

    def _acquire(
        self, candidate: Candidate, resolution: Resolution, arch: str, chosen: str | None
    ) -> tuple[tuple[Artifact, Function] | None, str]:
        """A candidate's artifact, loaded; or None and what it lacks. `chosen`: the one that the ranks chose.

        Raises:
            NoKernelError: it is not what the policy allows, and nothing that it allows can serve.
        """
        problem = resolution.call.problem
        artifact, lacks = self._library.find(candidate, problem)
        if not self.policy.allows(candidate.level):
            if artifact is None:
                return None, lacks
            raise NoKernelError(
                f"{self.spec.name} {problem} on {arch} would be served by {candidate.level} ({candidate.variant}: "
                f"{candidate.why}), but fallback='{self.policy.fallback}' ends before that. "
                f"{self._way_to_better(arch, problem)}, or allow fallback='{candidate.level}'"
            )
        if artifact is None and chosen is None:
            artifact, lacks = self._compile(candidate, resolution, lacks)
        if artifact is not None and chosen not in (None, artifact.key):
            artifact, lacks = None, "not every rank has it"
        if artifact is not None:
            resolution.doing = f"the load of {candidate.variant}"
            function, lacks = self._load(candidate, artifact, resolution.call.device)
            if function is not None:
                return (artifact, function), ""
        self._lacking(candidate, lacks)
        if self.policy.strict:
            raise NoKernelError(
                f"strict mode: {self.spec.name} {problem} would be served by {candidate.level} "
                f"({candidate.variant}: {candidate.why}), but {lacks}{self._way_to_have(candidate, arch, problem)}"
            )
        return None, lacks

    def _compile(self, candidate: Candidate, resolution: Resolution, lacks: str) -> tuple[Artifact | None, str]:
        """What compiling, as the policy has it, makes of a candidate whose artifact is missing."""
        variant, problem = candidate.variant, resolution.call.problem
        if self.spec.is_library(variant):
            return None, lacks  # there is nothing to compile
        key = self._library.present_key(candidate, problem)
        if self._compiler is None:
            self.count("would_compile")
            return None, lacks
        if self._library.has_failed(key):
            return None, lacks
        if self.policy.compile == "background":
            if resolution.wanted is None:  # only the best that is missing: the rest serves less well
                resolution.wanted = variant
                lacks = self._compiler.ask(key, variant, problem, self)
            return None, lacks
        resolution.doing = f"the compile of {variant}"
        return self.compile_now(key, variant, problem, lambda: False)

    def _way_to_better(self, arch: str, problem: Values) -> str:
        """What to do for a problem that no allowed level serves, in a sentence without its full stop."""
        if isinstance(self._source, Path):
            return f"Tune it with `{sweep_command(self._reference, arch, problem)}`"
        return self._library.way_out(self._reference, arch, problem)

    def _way_to_have(self, candidate: Candidate, arch: str, problem: Values) -> str:
        """What to do for a candidate whose artifact is missing, as a sentence; empty where that says it already."""
        if not isinstance(self._source, Path):
            return f". {self._library.way_out(self._reference, arch, problem)}"
        variant = candidate.variant
        key = self._library.present_key(candidate, problem)
        if self.spec.is_library(variant) or self._library.has_failed(key):
            return ""
        return f". Compile it with `{compile_command(self._reference, variant, problem)}`"

    def compile_now(
        self, key: str, variant: Variant, problem: Values, stopped: Callable[[], bool]
    ) -> tuple[Artifact | None, str]:
        """Compile, in a process of its own; what fails is not tried again. `stopped`: give up when it says so."""
        if self._compiler is None:
            return None, "compiling is not asked for"
        done = self._compiler.compile(variant, problem, stopped)
        self.count("compiled", int(done.compiled))
        if done.artifact is not None:
            self._library.add(done.artifact)
        elif done.failed:
            self._library.rule_out(key, done.why)
        return done.artifact, done.why

    def count(self, what: str, times: int = 1) -> None:
        with self._guard:
            self.counts[what] += times

    def arrived(self, variant: Variant) -> None:
        """A variant was compiled in the background, or could not be."""
        with self._guard:
            self._generation += 1
        told = self.on_arrival() if self.on_arrival is not None else None
        if told is not None:
            told(variant)

    def _lacking(self, candidate: Candidate, why: str) -> None:
        """Count and say, once a variant, that a recorded choice can't serve."""
        if candidate.winner is not None and self._warn_once(
            f"lacking {candidate.variant.id}",
            f"{self.spec.name}: {candidate.variant} ({candidate.level}) can't serve: {why}",
        ):
            self.count("recovered")

    def _table(self, device: int) -> tuple[DeviceFacts, Table]:
        with self._reading:
            if self._missed and self._read != self._mark():
                self._tables.clear()
            self._missed = False
            found = self._tables.get(device)
            if found is None:
                if not self._tables:
                    self._read = self._mark()
                facts = self.devices.facts(device)
                table = read_table(self.spec, facts.arch, facts.environment, self._source)
                found = self._tables[device] = facts, table
            return found

    def _why_none(self, arch: str, problem: Values) -> str:
        """Why nothing serves a problem, worked out once: it takes 0.3 s for the largest space."""
        why = self._unserved.get((arch, problem))
        if why is None:
            why = explain_no_kernel(self.spec, arch, problem)
            self._unserved.put((arch, problem), why)
        return why

    def _mark(self) -> FilesMark:
        return files_mark(self._source) if isinstance(self._source, Path) else ()

    def _warn_once(self, what: str, message: str) -> bool:
        """Whether it was said now."""
        with self._guard:
            if what in self._warned:
                return False
            self._warned.put(what, True)
        logger.warning("%s", message)
        return True

    def after_fork(self) -> None:
        self._under_way.clear()
