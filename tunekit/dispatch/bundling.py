"""What goes into a bundle: for each problem the variant that dispatch would serve, with its compiled kernel.

Of each GPU's winners (two GPUs of one architecture have their own) those measured last count, the user's before the
shipped ones. A winner that is a package's function goes in as a record, beside the spec's own default for where the
package is missing.
"""

from __future__ import annotations

import logging
import platform
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunekit import identity, space
from tunekit.arch import parse_arch
from tunekit.backends.load import RUNTIME_PACKAGE
from tunekit.dispatch.hot_path import native_parts, publish
from tunekit.dispatch.ladder import Candidate, make_table, steps, usable
from tunekit.dispatch.library import Library, compile_command
from tunekit.dispatch.on_request import not_compiled
from tunekit.environment import environment
from tunekit.errors import TunekitError, UserError
from tunekit.model import Artifact, Level, Values, Variant, Winner
from tunekit.progress import SweepEvent
from tunekit.settings import Settings
from tunekit.spec import KernelSpec, absolute_reference
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.bundle import Bundle, Entry, arguments_of, axes_of, newest
from tunekit.store.bundle_writer import Part, check_target, write_bundle
from tunekit.store.shipped import shipped_winners
from tunekit.store.winners import read_winners

logger = logging.getLogger("tunekit")

OnEvent = Callable[[SweepEvent], None]


@dataclass(frozen=True)
class LeftOut:
    """A variant that should serve a problem and has no kernel; `why` in words, and the command that compiles it."""

    problem: Values
    variant: Variant
    why: str
    command: str


@dataclass(frozen=True)
class Bundled:
    """What `bundle` wrote: `kernels` files of `size_bytes` for `problems`; `libraries` are the packages whose
    functions won some, which serve where those are installed."""

    directory: str
    spec: str
    arch: str
    problems: int
    kernels: int
    size_bytes: int
    libraries: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class Wanted:
    """A candidate for one problem."""

    problem: Values
    candidate: Candidate

    @property
    def variant(self) -> Variant:
        return self.candidate.variant


def bundle(
    spec: KernelSpec,
    reference: str,
    arch: str,
    out: Path,
    settings: Settings,
    problems: Sequence[Values] = (),
    *,
    compile: bool = False,
    force: bool = False,
    on_event: OnEvent = lambda event: None,
) -> Bundled:
    """Make the bundle of `spec` for `arch` in the directory `out`.

    It holds all recorded winners, or, where `problems` are given, what serves those. `compile` compiles
    what is missing, isolated and with limits; else that is left out. `force` replaces a bundle.

    Raises:
        UserError: nothing to bundle, or `out` is taken.
        DatabaseError: a file can't be read or written.
    """
    check_target(out, force=force)
    library = Library(spec, ArtifactStore(settings.artifacts))
    wanted = list(choose(spec, arch, problems, settings.database))
    if not wanted:
        raise UserError(
            f"no winner of {spec.name} on {arch} is recorded: tune it with "
            f"`tunekit sweep {shlex.quote(reference)} --arch {arch}`, or name problems with --problem or --workload"
        )
    failed = _compile(spec, reference, library, wanted, settings, on_event) if compile else {}
    parts: list[Part] = []
    winners: list[Winner] = []
    left_out: list[LeftOut] = []
    libraries: set[str] = set()
    for each in wanted:
        winner = each.candidate.winner
        if spec.is_library(each.variant):
            if winner is not None:
                libraries.add(winner.library or spec.implementation(each.variant.implementation).package)
                winners.append(winner)
            continue
        artifact, why = library.find(each.candidate, each.problem)
        if artifact is None:
            why = failed.get(library.present_key(each.candidate, each.problem), why)
            left_out.append(
                LeftOut(each.problem, each.variant, why, compile_command(reference, each.variant, each.problem))
            )
            continue
        parts.append(Part(_entry(spec, each, artifact, library), artifact))
        if winner is not None:
            winners.append(replace(winner, artifact=artifact.key, symbol=artifact.symbol))
    if not parts and not libraries:
        raise UserError(
            f"none of the {len(left_out)} variants of {spec.name} to bundle is compiled for {arch} "
            f"({left_out[0].why}): --compile compiles them, or `{left_out[0].command}` one"
        )
    made = _bundle(spec, arch, out, parts, winners, library)
    written = write_bundle(made, parts, library.store, besides=_native(library.store), force=force)
    files = {entry.file for entry in written.entries}
    return Bundled(
        str(out),
        spec.name,
        arch,
        len({entry.problem for entry in written.entries} | {w.problem for w in winners if w.library}),
        len(files),
        sum((out / name).stat().st_size for name in files),
        tuple(sorted(libraries)),
        tuple(left_out),
    )


def choose(spec: KernelSpec, arch: str, problems: Sequence[Values], database: Path) -> Iterator[Wanted]:
    """What the bundle should hold, each variant once a problem: for `problems`, or for all that have a winner."""
    measured, shipped = read_winners(database, spec.name, arch), shipped_winners(spec.name, arch)
    chosen: dict[tuple[Values, str, str | None], Wanted] = {}
    unserved = dict.fromkeys(problems)
    for gpu in dict.fromkeys(winner.environment.gpu for winner in (*measured, *shipped)):
        for wanted in _choose_of(spec, arch, problems, _of(measured, gpu), _of(shipped, gpu)):
            unserved.pop(wanted.problem, None)
            chosen.setdefault((wanted.problem, wanted.variant.id, gpu), wanted)
    for problem in unserved:
        for step in steps(make_table(spec, arch, environment(0)), problem):
            if isinstance(step, Candidate) and not spec.is_library(step.variant):
                chosen[problem, step.variant.id, None] = Wanted(problem, step)
                break
        else:
            raise UserError(f"no variant of {spec.name} can serve {problem} on {arch}")
    yield from _with_fallbacks(spec, arch, list(chosen.values()))


def _of(winners: Iterable[Winner], gpu: str | None) -> list[Winner]:
    return [winner for winner in winners if winner.environment.gpu == gpu]


def _choose_of(
    spec: KernelSpec, arch: str, problems: Sequence[Values], measured: list[Winner], shipped: list[Winner]
) -> Iterator[Wanted]:
    """One GPU's: what it would be served, as it was when it last measured something; and the problem's own winner,
    where a nearer level comes before it."""
    present = {
        problem: winner for winner in (*shipped, *measured) if (problem := usable(spec, arch, winner)[0]) is not None
    }
    if not present:
        return
    *_, last = present.values()
    table = make_table(spec, arch, last.environment, measured, shipped)
    for problem in problems or present:
        found = [step for step in steps(table, problem) if isinstance(step, Candidate) and step.winner is not None]
        own = [each for each in found if each.winner is not None and usable(spec, arch, each.winner)[0] == problem]
        for candidate in dict.fromkeys((*found[:1], *own[:1])):
            yield Wanted(problem, candidate)


def _with_fallbacks(spec: KernelSpec, arch: str, chosen: list[Wanted]) -> Iterator[Wanted]:
    """The candidates, and beside a package's function the first default of the spec that is none."""
    compiled = {each.problem for each in chosen if not spec.is_library(each.variant)}
    for each in chosen:
        yield each
        if each.problem in compiled:
            continue
        compiled.add(each.problem)
        for variant in space.default_variants(spec, parse_arch(arch), each.problem):
            if not spec.is_library(variant):
                yield Wanted(each.problem, Candidate(Level.DEFAULT, "where the package is missing", variant))
                break


def _entry(spec: KernelSpec, wanted: Wanted, artifact: Artifact, library: Library) -> Entry:
    winner = wanted.candidate.winner
    toolchain = identity.toolchain()
    if winner is not None and artifact.key != library.present_key(wanted.candidate, wanted.problem):
        there = winner.environment
        toolchain = {"nvidia-cutlass-dsl": there.cutlass_dsl, "apache-tvm-ffi": there.tvm_ffi}
    if spec.implementation(wanted.variant.implementation).backend != "cutedsl":
        del toolchain["nvidia-cutlass-dsl"]
    return Entry(
        problem=wanted.problem,
        variant=wanted.variant,
        key=artifact.key,
        symbol=artifact.symbol,
        file="",
        arguments=arguments_of(spec, wanted.problem),
        workspace=space.workspace(spec, wanted.variant, wanted.problem),
        toolchain=toolchain,
    )


def _bundle(
    spec: KernelSpec, arch: str, out: Path, parts: list[Part], winners: list[Winner], library: Library
) -> Bundle:
    tools = identity.toolchain()
    needs = {"apache-tvm-ffi": tools["apache-tvm-ffi"]}
    compiler = newest(dsl for part in parts if (dsl := part.entry.toolchain.get("nvidia-cutlass-dsl")))
    if compiler:
        needs[RUNTIME_PACKAGE] = compiler
    made_with = {"tunekit": environment(0).tunekit, **tools}
    unique = tuple(dict.fromkeys(winners))
    machine = platform.machine()
    return Bundle(out, spec.name, spec.version, arch, machine, axes_of(spec), (), unique, needs, made_with)


def _native(store: ArtifactStore) -> list[Artifact]:
    """The native half of dispatch, which a serving machine can't compile; a warning for each part that is missing."""
    found: list[Artifact] = []
    for part in native_parts():
        try:
            publish(store, part)
            artifact = store.get(part.key)
        except TunekitError as error:
            logger.warning("the bundle has no %s, so its calls take longer: %s", part.name, error)
        else:
            found += [artifact] if artifact is not None else []
    return found


def _compile(
    spec: KernelSpec, reference: str, library: Library, wanted: list[Wanted], settings: Settings, on_event: OnEvent
) -> dict[str, str]:
    """Compile what is not in the store; why each that failed did, by key."""
    from tunekit.compiling import Compiler, compile_limits, units
    from tunekit.jobs import Event, Pool
    from tunekit.store.database import Store

    missing = [
        each
        for each in wanted
        if not spec.is_library(each.variant) and library.find(each.candidate, each.problem)[0] is None
    ]
    library.look_again()
    by_key = {
        unit.key: unit
        for each in missing
        for unit in units(spec, absolute_reference(reference), each.problem, [each.variant])
    }
    if not by_key:
        return {}
    failed: dict[str, str] = {}
    backends = tuple(dict.fromkeys(spec.implementation(u.variant.implementation).backend for u in by_key.values()))
    limits = compile_limits(spec, settings)
    on_event(SweepEvent("phase", text="compile", total=len(by_key)))
    with (
        Store.open(settings.database) as records,
        Pool(workers=settings.jobs, warm=backends, limits=limits) as pool,
    ):
        compiler = Compiler(pool, library.store, records, environment(0))
        done = 0

        def tell(event: Event) -> None:
            running = tuple((str(by_key[now.task].variant), now.phase, now.seconds) for now in pool.running())
            on_event(SweepEvent("phase", done=done, total=len(by_key), running=running))

        for unit, outcome in compiler.compile(list(by_key.values()), tell):
            done += 1
            on_event(SweepEvent("finished", unit.variant, outcome, done=done, total=len(by_key)))
            if not outcome.ok:
                failed[unit.key] = not_compiled(outcome)
    return failed
