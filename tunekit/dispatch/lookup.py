"""``tunekit.best``: what dispatch would pick, and why; imports no torch, no compiler, no loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tunekit.arch import ARCHES, parse_arch
from tunekit.dispatch.ladder import Candidate, Known, Table, explain_no_kernel, sort_out, walk
from tunekit.dispatch.library import Library
from tunekit.environment import environment
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Artifact, Choice, Environment, Value, Values, Winner
from tunekit.settings import Settings, load_settings
from tunekit.spec import KernelSpec, load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.shipped import shipped_winners
from tunekit.store.winners import read_winners

if TYPE_CHECKING:
    from tunekit.store.bundle import Bundle

logger = logging.getLogger("tunekit")

HOST = parse_arch("host")


def best(spec: str | KernelSpec, arch: str | None = None, device: int = 0, **problem: Value) -> Choice:
    """What dispatch would pick for a problem, and why.

    `problem` gives the problem axes by name; those with a default may be left out.
    `arch` defaults to that of CUDA device `device`. A choice whose `artifact` is None
    is what would be picked were it compiled: nothing in the store can serve.

    Raises:
        NoKernelError: no variant can serve the problem; the message names shape and constraints.
        UserError: an unknown spec, architecture or axis, or a value that is not allowed.
    """
    return look_up(spec, problem, arch=arch, device=device)


def look_up(
    spec: str | KernelSpec,
    problem: Mapping[str, Value],
    *,
    arch: str | None = None,
    device: int = 0,
    settings: Settings | None = None,
) -> Choice:
    """:func:`best`, with the problem as a mapping and the places of the database and the artifacts."""
    loaded = spec if isinstance(spec, KernelSpec) else load_spec(spec)
    complete = loaded.problem(problem)
    here = environment(device)
    target = parse_arch(arch).name if arch is not None else arch_here(loaded, here, device)
    settings = settings or load_settings()
    table = read_table(loaded, target, here, settings.database)
    library = Library(loaded, ArtifactStore(settings.artifacts))

    def acquire(candidate: Candidate) -> tuple[Artifact | None, str]:
        return library.find(candidate, complete)

    done = walk(table, complete, acquire)
    if done.candidate is None:
        reference = spec if isinstance(spec, str) else spec.name
        why = explain_no_kernel(loaded, target, complete)
        raise NoKernelError(no_kernel(library, reference, target, complete, why, done.missed))
    return done.choice(done.candidate, done.thing, "" if done.thing else "; neither it nor any fallback is compiled")


def arch_here(spec: KernelSpec, here: Environment, device: int) -> str:
    """The architecture that a lookup without one means: the GPU's, or the host for a spec of host kernels."""
    if all(implementation.unsupported(HOST) is None for implementation in spec.implementations):
        return "host"
    if here.arch is None:
        found = f"CUDA device {device} ({here.gpu}) is of no known architecture" if here.gpu else "there is no GPU here"
        raise UserError(f"{found}: name the architecture, for example arch='sm_90a' (--arch sm_90a)")
    return here.arch


def read_table(spec: KernelSpec, arch: str, here: Environment, source: Path | Bundle) -> Table:
    """The recorded winners of a spec on `arch`, the user's and the shipped ones; logs what is of no use.

    `source` is the user's database, beside which those of tuning_db count; or a bundle, which has its own of both.

    Raises:
        NoKernelError: a bundle for another architecture.
    """
    shipped: Callable[[], list[Winner]]
    if isinstance(source, Path):
        measured, shipped = read_winners(source, spec.name, arch), lambda: shipped_winners(spec.name, arch)
    elif source.arch != arch:
        raise NoKernelError(
            f"bundle {source.root} holds {spec.name} for {source.arch}, and this device is {arch}: "
            f"`tunekit bundle {spec.name} --arch {arch} --out DIR` makes one for it"
        )
    else:
        measured, shipped = source.measured(), source.shipped

    def sorted_out(winners: list[Winner]) -> tuple[Known, ...]:
        protocols = present_protocols(spec, arch, here) if winners else None
        known, unusable = sort_out(spec, arch, here, winners, protocols)
        if unusable:
            more = f" (and {len(unusable) - 1} more)" if len(unusable) > 1 else ""
            logger.warning("%s%s", unusable[0], more)
        return known

    return Table(spec, arch, sorted_out(measured), lambda: sorted_out(shipped()))


def present_protocols(spec: KernelSpec, arch: str, here: Environment) -> frozenset[str]:
    """The protocols that a final in this environment, by this version, could have stated for a spec."""
    from tunekit.measure.protocol import CACHES, Method, clocks_word, protocol  # here: 20 ms, and only winners need it

    clocks = clocks_word(here.clocks_policy) if parse_arch(arch).is_gpu else "host"
    own_inputs = spec.inputs is not None
    return frozenset(
        protocol("final", method, cache=cache, own_inputs=own_inputs, clocks=clocks)
        for method in get_args(Method)
        for cache in CACHES
    )


def no_kernel(library: Library, reference: str, arch: str, problem: Values, why: str, missed: tuple[str, ...]) -> str:
    """The message of a NoKernelError: shape, `why` in the spec's words, what was tried and the way out."""
    spec = library.spec
    runs_on = [name for name, at in ARCHES.items() if not all(each.unsupported(at) for each in spec.implementations)]
    if runs_on and arch not in runs_on:
        there, known = ("the CPU" if name == "host" else name for name in (arch, ", ".join(runs_on)))
        return (
            f"no kernel serves {spec.name} {problem} on {there}: it has implementations for {known}; "
            "use tensors that lie there"
        )
    return (
        f"no kernel serves {spec.name} {problem} on {arch}: {why}. "
        f"Tried {'; '.join(missed)}. {library.way_out(reference, arch, problem)}"
    )
