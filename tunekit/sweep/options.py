"""What a sweep is asked to do, and what follows from the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunekit.arch import Arch
from tunekit.environment import environment
from tunekit.errors import UserError
from tunekit.measure.final import DEFAULT_ROUNDS, DEFAULT_SECONDS, Rules
from tunekit.measure.protocol import DEFAULT_CACHE, Cache
from tunekit.measure.sequential import DEFAULT_CONFIDENCE, DEFAULT_MARGIN
from tunekit.model import Environment, Value, Values
from tunekit.space import Expansion, choose_arch, named
from tunekit.spec import KernelSpec

VERIFIERS = ("auto", "gpu", "simulate", "none")
CASES = ("full", "problem")


@dataclass(frozen=True)
class SweepOptions:
    """`budget`: evaluations (``40``) or time (``10m``); `verify`: ``gpu`` demands a device of the
    target architecture, ``simulate`` runs the compiled kernels on the CPU and measures nothing,
    ``auto`` uses a device if it is here and else simulates, ``none`` ends after compiling.
    `cases`: on the device, ``full`` verifies under several seeds and at the edges of every size,
    ``problem`` one draw of the problem itself. `variants` restricts the sweep to those whose ids
    begin so; each must be there for one of the problems, and for each problem one of them.

    Of the final: `cache` is what it makes of the L2 cache (see measure.protocol), `margin` the share within
    which variants count as equal, `confidence` that of its decision, `final_rounds` and
    `final_seconds` what it may take at most."""

    arch: str | None = None
    implementation: str | None = None
    jobs: int | None = None
    budget: str | None = None
    search: str = "auto"
    seed: int = 0
    resume: bool = True
    force: bool = False
    retry_failed: bool = False
    verify: str = "auto"
    cases: str = "full"
    device: int = 0
    variants: tuple[str, ...] = ()
    cache: Cache = DEFAULT_CACHE
    margin: float = DEFAULT_MARGIN
    confidence: float = DEFAULT_CONFIDENCE
    final_rounds: int = DEFAULT_ROUNDS
    final_seconds: float = DEFAULT_SECONDS

    def rules(self) -> Rules:
        """How finals are held.

        Raises:
            UserError: an option of the final that is none.
        """
        return Rules(self.final_rounds, self.final_seconds, self.cache, self.margin, self.confidence).checked()


@dataclass(frozen=True)
class Target:
    """Where the kernels are to run. `device` is None where nothing here can run them, and `why` says so;
    `simulated` then says whether they are simulated instead."""

    arch: Arch
    environment: Environment
    device: int | Literal["host"] | None
    why: str = ""
    simulated: bool = False


def choose_target(spec: KernelSpec, options: SweepOptions) -> Target:
    """The architecture asked for, else the GPU's, else the preferred one that the spec supports.

    Raises:
        UserError: no implementation runs there, or ``--verify gpu`` without such a device.
    """
    if options.verify not in VERIFIERS:
        raise UserError(f"unknown --verify '{options.verify}' (known: {', '.join(VERIFIERS)})")
    if options.cases not in CASES:
        raise UserError(f"unknown --cases '{options.cases}' (known: {', '.join(CASES)})")
    here = environment(options.device)
    arch, _ = choose_arch(spec, options.arch, here.arch, options.implementation)
    if options.verify == "none":
        return Target(arch, here, None, "--verify none ends after compiling")
    if arch.name == "host":
        if options.verify == "simulate":
            raise UserError("--verify simulate: kernels for host run as they are; use auto")
        return Target(arch, here, "host")
    if options.verify == "simulate":
        return Target(arch, here, None, "--verify simulate measures nothing", simulated=True)
    if here.arch == arch.name:
        return Target(arch, here, options.device)
    found = f"a {here.gpu} ({here.arch or 'unknown architecture'})" if here.gpu else "no NVIDIA GPU"
    why = f"kernels for {arch.name} can't run here: this machine has {found}"
    if options.verify == "gpu":
        raise UserError(f"--verify gpu: {why}")
    return Target(arch, here, None, why, simulated=True)


def complete_problems(spec: KernelSpec, given: Sequence[Mapping[str, Value]]) -> tuple[Values, ...]:
    """The problems to tune for, complete and without repeats; the spec's examples where none is given.

    Raises:
        UserError: a malformed problem, or none at all.
    """
    problems = [spec.problem(one) for one in (given or spec.examples)]
    if not problems:
        raise UserError(f"{spec.name} has no example problems: give one with --problem")
    return tuple(dict.fromkeys(problems))


def restrict(expansion: Expansion, ids: Sequence[str]) -> Expansion:
    """The expansion's variants whose ids begin with one of `ids`; all of them if there are none.

    An id of a variant that is not for this problem is passed over, as long as another one is.

    Raises:
        UserError: no variant begins with any of the ids, or more than one with the same.
    """
    here = [id for id in ids if any(variant.id.startswith(id) for variant in expansion.variants)]
    left = tuple(named(expansion.variants, here or ids))
    removed = {**expansion.removed, "--variant": len(expansion.variants) - len(left)}
    return dataclasses.replace(expansion, variants=left, removed={k: n for k, n in removed.items() if n})


def check_named(expansions: Sequence[Expansion], ids: Sequence[str]) -> None:
    """Raise UserError where an id begins that of no variant of any problem: it is misspelt."""
    known = [variant.id for expansion in expansions for variant in expansion.variants]
    for wanted in ids:
        if not any(id.startswith(wanted) for id in known):
            raise UserError(
                f"no variant id begins with '{wanted}' for these problems and this architecture "
                "(tunekit list shows them)"
            )
