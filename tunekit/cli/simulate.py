"""``tunekit simulate``: the compiled kernel on the CPU, against the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from tunekit.cli import INTERRUPTION, Interruption, options
from tunekit.cli.problems import problems, tunables
from tunekit.cli.space_view import all_points, choose_arch, select
from tunekit.errors import UserError
from tunekit.model import Values, Variant
from tunekit.progress import SweepEvent
from tunekit.report import Printer, progress_display
from tunekit.space import default_variant, implementations_on
from tunekit.spec import KernelSpec, absolute_reference, load_spec
from tunekit.spec.packages import installed
from tunekit.trials import Outcome, Status

EXIT_NOT_MODELLED = 3
LINE_INFO = "--generate-line-info"


@click.command(cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@options.problem_option
@options.implementation_option
@options.variant_option
@options.tunables_option
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Run N times, each with other interleavings and completion times; results must not differ.",
)
@click.option(
    "--seed", type=options.SEED, metavar="N", default=0, show_default=True, help="Of the inputs and the first schedule."
)
@click.option(
    "--ctas",
    metavar="LIST",
    default="all",
    show_default=True,
    help="Which CTAs: 0-3,7 or first, sample (four) or all. The results are compared on what they write.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="CTAs (clusters) simulated at once. [default: as many as there are cores]",
)
@click.option("--time-limit", type=options.duration, metavar="S", help="Limit of one simulation. [default: none]")
@click.option(
    "--strict",
    is_flag=True,
    help="Demand also the tcgen05 fences and waits that kernels known to be right leave out.",
)
@click.option(
    "--line-info", is_flag=True, help="Compile with line info, so that the report names the kernel's source lines."
)
@options.limit_options
@options.json_option
@INTERRUPTION
def simulate(
    interruption: Interruption,
    spec: str,
    arch: str | None,
    problem_texts: tuple[str, ...],
    implementation: str | None,
    variant_ids: tuple[str, ...],
    tunable_texts: tuple[str, ...],
    schedules: int,
    seed: int,
    ctas: str,
    jobs: int | None,
    time_limit: float | None,
    strict: bool,
    line_info: bool,
    compile_timeout: float | None,
    trace_timeout: float | None,
    memory_limit: int | None,
    as_json: bool,
) -> int:
    """Run compiled kernels on the CPU, and check them as a sanitizer would.

    Compiles the variant (the default one unless --variant or --tunables choose), executes its PTX with the launch
    that its own host code makes, and compares the results with the spec's reference. Needs no GPU.

    Exit status 0: no fault and right results; 1: a fault, wrong results, or the time limit; 3: the kernel reached an
    instruction that is not modelled.
    """
    from tunekit.simulate.client import Simulator
    from tunekit.simulate.job import Simulation, SimulationJob
    from tunekit.simulate.run import ranges

    ranges(ctas)  # a mistake in it is told before anything is compiled
    loaded = load_spec(spec)
    chosen, why = choose_arch(loaded, arch)
    if chosen.name == "host":
        raise UserError("kernels for host run as they are: nothing is simulated")
    settings = options.settings(
        compile_limit_s=compile_timeout, trace_limit_s=trace_timeout, memory_limit_bytes=memory_limit
    )
    out = Printer(sys.stdout)
    collected: list[Any] = []
    statuses: list[Status] = []
    with progress_display(sys.stderr) as on_event, Simulator() as simulator:
        for problem in problems(loaded, problem_texts, None):
            variants = _variants(loaded, chosen, problem, implementation, variant_ids, tunable_texts)
            for variant in variants:
                library = installed(loaded.implementation(variant.implementation))
                if library:
                    raise UserError(f"{variant} is a function of {library}: there is no compiled kernel to simulate")
            for variant, found in _compiled(
                loaded, absolute_reference(spec), problem, variants, LINE_INFO if line_info else "", settings, on_event
            ):
                if isinstance(found, Outcome):
                    simulation = Simulation(None, status=found.status, failure=found.reason, seconds=found.seconds)
                else:
                    job = SimulationJob(
                        absolute_reference(spec),
                        problem,
                        variant,
                        **found,
                        schedules=schedules,
                        seed=seed,
                        ctas=ctas,
                        jobs=jobs,
                        time_limit_s=time_limit,
                        strict=strict,
                    )
                    simulation = simulator.simulate(job, _teller(on_event))
                outcome = simulation.outcome()
                statuses.append(outcome.status)
                ptx = None if isinstance(found, Outcome) else found["ptx"]
                collected.append(
                    {
                        "problem": problem,
                        "variant": variant,
                        "ptx": ptx,
                        "status": outcome.status,
                        "reason": outcome.reason,
                        "figures": simulation.figures,
                        "report": None if simulation.report is None else simulation.report.to_payload(),
                        "seconds": outcome.seconds,
                    }
                )
                if not as_json:
                    out.heading(f"{loaded.name} on {chosen.name} ({why}): {problem}")
                    _print(simulation, variant, ptx, out)
    if as_json:
        out.json(collected)
    if Status.NOT_MODELLED in statuses and all(s in (Status.OK, Status.NOT_MODELLED) for s in statuses):
        return EXIT_NOT_MODELLED
    return 0 if all(status is Status.OK for status in statuses) else 1


def _print(simulation: Any, variant: Variant, ptx: str | None, out: Printer) -> None:
    from tunekit.report.simulation import print_simulation

    out.line(f"  {variant.id} {variant}")
    if ptx is not None:
        out.line(f"  PTX: {ptx}")
    print_simulation(simulation, out)
    out.line()


def _teller(on_event: Callable[[SweepEvent], None]) -> Callable[[str, str], None]:
    return lambda phase, doing: on_event(SweepEvent("phase", text=f"simulate, {phase}: {doing}"))


def _variants(
    spec: KernelSpec,
    arch: Any,
    problem: Values,
    implementation: str | None,
    ids: Sequence[str],
    tunable_texts: Sequence[str],
) -> list[Variant]:
    """The variants that are asked for, or else the default one."""
    if not ids and not tunable_texts and implementation is None:
        default = default_variant(spec, arch, problem)
        if default is None:
            raise UserError(f"{spec.name} has no default variant for {problem} on {arch.name}; choose one by --variant")
        return [default]
    points = [point for point in all_points(spec, arch, problem, implementation) if point.dropped_by is None]
    if tunable_texts:
        wanted = {
            candidate.name: tunables(candidate, tunable_texts)
            for candidate in implementations_on(spec, arch, implementation)
        }
        points = [point for point in points if point.variant.tunables == wanted[point.variant.implementation]]
    found = [point.variant for point in select(points, ids)]
    if not found:
        raise UserError(f"no such variant of {spec.name} is valid for {problem} on {arch.name} (tunekit explain)")
    return found


def _compiled(
    spec: KernelSpec,
    reference: str,
    problem: Values,
    variants: Sequence[Variant],
    compile_options: str,
    settings: Any,
    on_event: Callable[[SweepEvent], None],
) -> list[tuple[Variant, Outcome | dict[str, str]]]:
    """Each variant with its artifact's paths and symbol, or with why it has none."""
    from tunekit.compiling import Compiler, compile_limits, units
    from tunekit.environment import environment
    from tunekit.jobs import Pool
    from tunekit.store.artifacts import ArtifactStore

    artifacts = ArtifactStore(settings.artifacts)
    wanted = {unit.variant.id: unit for unit in units(spec, reference, problem, variants, compile_options)}
    missing = [unit for unit in wanted.values() if artifacts.get(unit.key) is None]
    failed: dict[str, Outcome] = {}
    if missing:
        on_event(SweepEvent("phase", text="compile", total=len(missing)))
        backends = tuple({spec.implementation(variant.implementation).backend for variant in variants})
        with Pool(workers=settings.jobs, warm=backends, limits=compile_limits(spec, settings)) as pool:
            for unit, outcome in Compiler(pool, artifacts, None, environment()).compile(missing):
                if not outcome.ok:
                    failed[unit.variant.id] = outcome
    found: list[tuple[Variant, Outcome | dict[str, str]]] = []
    for variant in variants:
        unit = wanted[variant.id]
        artifact = artifacts.get(unit.key)
        if variant.id in failed:
            found.append((variant, failed[variant.id]))
            continue
        if artifact is None:
            raise UserError(f"the artifact of {variant} is gone from {artifacts.root}; compile again")
        if "ptx" not in artifact.files:
            raise UserError(f"the artifact of {variant} holds no PTX: there is nothing to simulate")
        so, ptx = artifacts.path(artifact), artifacts.path(artifact, "ptx")
        found.append((variant, {"so": str(so), "ptx": str(ptx), "symbol": artifact.symbol}))
    return found
