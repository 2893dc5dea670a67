"""The cost model of a spec on an architecture: its coefficients from recorded trials, and how far they are off.

    python benchmarks/cost_model.py extract --db RESULTS.db ... --assume schedule=static --out TRIALS.jsonl
    python benchmarks/cost_model.py fit TRIALS.jsonl --write tuning_db/fmha.sm_90a.cost.json
    python benchmarks/cost_model.py fit --db RESULTS.db
    python benchmarks/cost_model.py replay TRIALS.jsonl --seeds 40
    python benchmarks/cost_model.py winners

`extract` keeps what the fit needs of the search's measurements in databases, one JSON object a line: a group (problem,
protocol, environment, version of the spec), then its trials. Those of an older version of the spec count where their
problem and tunables can be read as today's; `--assume NAME=VALUE` says what a tunable was before it was one. Libraries
are left out, and what declares no work. `fit` prints the coefficients and their error on held-out problems; `replay`
lets strategies search the largest groups, with and without the order of a model that was fitted without their problem;
`winners` says where the winners that ship stand in the shipped model's order of today's whole spaces.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunekit import identity
from tunekit.arch import ARCHES
from tunekit.errors import SpecError
from tunekit.model import Footprint, Value, Values, Variant, to_json
from tunekit.search import Budget, Told, make_strategy
from tunekit.search.cost_fit import Observed, fit, held_out, log_error, ranking, usable
from tunekit.search.cost_model import CostModel, Launch, Machine, Ranking, launch_of, parse_cost_model, resident
from tunekit.search.encoding import Space
from tunekit.search.replay import replay
from tunekit.space import expand
from tunekit.spec import KernelSpec, Work, load_spec
from tunekit.store.database import read_records
from tunekit.store.shipped import shipped_cost_model, shipped_winners
from tunekit.trials import Stage, Trial

# NVIDIA's data sheet of the H200 SXM (132 SMs); of an SM, the CUDA C++ Programming Guide 13.0, compute capability 9.0.
MACHINES = {"NVIDIA H200": Machine("NVIDIA H200", 132, 233_472, 2048, 65_536)}
# Groups of at least so many trials are whole spaces, of the others' short lists this many say something of an order.
LEAST_TRIALS = (100, 5)
NEAR = 1.05


@dataclasses.dataclass(frozen=True)
class Measured:
    """A trial as the fit sees it."""

    group: str
    problem: Values
    variant: Variant
    launch: Launch
    compiled: Footprint
    spill_bytes: int | None
    time_us: float

    def observed(self) -> Observed:
        return Observed(self.group, str(self.problem), self.launch, self.time_us)


def lines_of(databases: Iterable[Path], spec: KernelSpec, arch: str, assumed: dict[str, Value]) -> Iterator[dict]:
    """The trial file's lines from databases."""
    groups: dict[str, list[dict]] = {}
    skipped: collections.Counter[str] = collections.Counter()
    for path in databases:
        trials = read_records(path, spec=spec.name, arch=arch).trials
        compiled = {t.compile_key: t.outcome.footprint for t in trials if t.outcome.stage is Stage.COMPILE}
        for trial in trials:
            outcome = trial.outcome
            if outcome.stage is not Stage.MEASURE or not outcome.ok or not trial.protocol.startswith("search/"):
                continue
            try:
                problem = spec.problem(trial.problem)
                implementation = spec.implementation(trial.variant.implementation)
                if implementation.work is None:
                    skipped["no work is declared"] += 1
                    continue
                missing = assumptions(spec, trial, assumed)
            except SpecError as error:
                skipped[str(error)] += 1
                continue
            found = compiled.get(trial.compile_key, Footprint())
            group = {
                "spec": spec.name,
                "version": trial.variant.version,
                "arch": arch,
                "protocol": trial.protocol,
                "problem": {k: v for k, v in problem.items() if k not in spec.derived(problem)},
                "environment": {k: v for k, v in to_json(trial.environment).items() if v is not None},
                "assumed": {implementation.name: missing} if missing else {},
            }
            line = {
                "implementation": implementation.name,
                "tunables": dict(trial.variant.tunables),
                "us": float(f"{statistics.median(outcome.samples_us):.7g}"),
                "samples": len(outcome.samples_us),
                "registers": found.registers,
                "spill_bytes": found.spill_bytes,
            }
            groups.setdefault(json.dumps(group), []).append(line)
    for reason, count in skipped.items():
        print(f"left out {count}: {reason}", file=sys.stderr)
    for group, found_lines in sorted(groups.items()):
        yield json.loads(group)
        yield from found_lines


def assumptions(spec: KernelSpec, trial: Trial, assumed: dict[str, Value]) -> dict[str, Value]:
    """What a trial's variant lacks of today's tunables, as assumed.

    Raises:
        SpecError: it can't be said in today's tunables.
    """
    names = [tunable.name for tunable in spec.implementation(trial.variant.implementation).tunables]
    missing = [name for name in names if name not in trial.variant.tunables]
    if set(trial.variant.tunables) - set(names) or set(missing) - set(assumed):
        raise SpecError(f"version {trial.variant.version} has other tunables", field=trial.variant.implementation)
    return {name: assumed[name] for name in missing}


def measured_of(lines: Iterable[dict[str, Any]], spec: KernelSpec) -> list[Measured]:
    """The trials of a trial file's lines."""
    found: list[Measured] = []
    group: dict[str, Any] = {}
    problem = Values()
    for line in lines:
        if "problem" in line:
            group, problem = line, spec.problem(line["problem"])
            continue
        tunables = Values({**line["tunables"], **group["assumed"].get(line["implementation"], {})})
        variant = identity.variant(spec.name, spec.version, line["implementation"], group["arch"], tunables)
        launch = launch_of(spec, problem, variant)
        if launch is not None:
            compiled = dataclasses.replace(launch.footprint, registers=line["registers"])
            name = f"v{group['version']} {group['protocol'].partition(' ')[0]}: {problem}"
            found.append(Measured(name, problem, variant, launch, compiled, line["spill_bytes"], line["us"]))
    return found


def read(arguments: argparse.Namespace, spec: KernelSpec) -> tuple[list[dict[str, Any]], list[Measured]]:
    if arguments.trials is None and not arguments.db:
        raise SystemExit("name a file of trials, or databases with --db")
    if arguments.trials is not None:
        lines = [json.loads(line) for line in arguments.trials.read_text().splitlines()]
    else:
        lines = list(lines_of(arguments.db, spec, arguments.arch, dict(arguments.assume)))
    return lines, measured_of(lines, spec)


def machine_of(lines: Sequence[dict[str, Any]]) -> Machine:
    gpus = {line["environment"].get("gpu") for line in lines if "problem" in line}
    if len(gpus) != 1 or not gpus <= set(MACHINES):
        raise SystemExit(
            f"a model is of one known GPU ({', '.join(MACHINES)}); the trials are of {sorted(map(str, gpus))}"
        )
    return MACHINES[gpus.pop()]


def fitted(lines: Sequence[dict[str, Any]], trials: Sequence[Measured], spec: KernelSpec, arch: str) -> CostModel:
    """The model with its error, from trials."""
    machine = machine_of(lines)
    observed = usable(trial.observed() for trial in trials)
    predicted = held_out(observed, machine)
    rankings = [ranking(observed, predicted, least) for least in LEAST_TRIALS]
    groups = [line for line in lines if "problem" in line]
    environments = {json.dumps(line["environment"], sort_keys=True) for line in groups}
    return CostModel(
        spec=spec.name,
        version=spec.version,
        arch=arch,
        machine=machine,
        coefficients=fit(observed, machine),
        error=round(log_error(observed, predicted), 4),
        rankings=tuple(each for each in rankings if each is not None),
        trials=len(observed),
        fitted={
            "command": f"python benchmarks/cost_model.py fit {trials_name(spec.name, arch)}",
            "problems": len({each.problem for each in observed}),
            "versions": sorted({line["version"] for line in groups}),
            "protocols": sorted({line["protocol"] for line in groups}),
            "environments": [json.loads(each) for each in sorted(environments)],
        },
    )


def trials_name(spec: str, arch: str) -> str:
    return f"benchmarks/trials/{spec}.{arch}.jsonl"


def without_work(trial: Measured, machine: Machine) -> Measured:
    """The trial as if its spec declared no work: an even share of the problem's cost on each SM."""
    cost, smem = trial.launch.cost, trial.launch.footprint.smem_bytes or 1
    work = Work(machine.sms, 1.0, smem / 1e5, cost.flops / machine.sms, cost.bytes / machine.sms, 0.0)
    return dataclasses.replace(trial, launch=dataclasses.replace(trial.launch, work=work))


def do_extract(arguments: argparse.Namespace) -> None:
    spec = load_spec(arguments.spec)
    lines = list(lines_of(arguments.db, spec, arguments.arch, dict(arguments.assume)))
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = sum("problem" in line for line in lines)
    print(f"{len(lines) - groups} trials in {groups} groups to {arguments.out}")


def do_fit(arguments: argparse.Namespace) -> None:
    spec = load_spec(arguments.spec)
    lines, trials = read(arguments, spec)
    if arguments.without_work:
        trials = [without_work(trial, machine_of(lines)) for trial in trials]
    model = fitted(lines, trials, spec, arguments.arch)
    print(f"{model.trials} trials, {model.fitted['problems']} problems; held out by problem: ", end="")
    print(f"root mean square of log(predicted / measured) {model.error}\n")
    print("| term | us a unit |\n|---|---:|")
    for name, value in model.coefficients.items():
        print(f"| {name} | {value:g} |")
    print("\n| groups | of at least | Spearman, median | worst |", end="")
    firsts = list(model.rankings[0].regret)
    print("".join(f" best of first {k}, median | worst |" for k in firsts))
    print("|---:|---:|---:|---:|" + "---:|---:|" * len(firsts))
    for each in model.rankings:
        print(row_of(each))
    tell_more(trials, model.machine)
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(model.to_json(), indent=1) + "\n")
        print(f"wrote {arguments.write}")


def row_of(each: Ranking) -> str:
    regrets = "".join(f" {median:.3f} | {worst:.3f} |" for median, worst in each.regret.values())
    middle, worst = each.spearman
    return f"| {each.problems} | {each.least_trials} trials | {middle:.2f} | {worst:.2f} |{regrets}"


def tell_more(trials: Sequence[Measured], machine: Machine) -> None:
    """What would be lost by dropping what is predicted slow, and whether compiling told more than declaring."""
    observed = [trial.observed() for trial in trials]
    predicted = held_out(observed, machine)
    groups: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for each, guess in zip(observed, predicted, strict=True):
        groups[each.group].append((each.time_us, guess))
    worst = max(min(found)[1] / min(guess for _, guess in found) for found in groups.values())
    print(f"\nthe best measured was predicted at up to {worst:.2f} times the least prediction of its group")
    compiled = [dataclasses.replace(trial.launch, footprint=trial.compiled) for trial in trials]
    held = [(resident(t.launch, machine), resident(c, machine)) for t, c in zip(trials, compiled, strict=True)]
    differ, spilled = sum(a != b for a, b in held), sum(bool(trial.spill_bytes) for trial in trials)
    print(f"compiled, {differ} of {len(trials)} trials have other CTAs an SM than declared; {spilled} spill registers")


def do_replay(arguments: argparse.Namespace) -> None:
    spec = load_spec(arguments.spec)
    lines, trials = read(arguments, spec)
    predicted = held_out([trial.observed() for trial in trials], machine_of(lines))
    groups: dict[str, list[tuple[Measured, float]]] = collections.defaultdict(list)
    for trial, guess in zip(trials, predicted, strict=True):
        groups[trial.group].append((trial, guess))
    print(f"evaluations to within {100 * (NEAR - 1):.0f} % of the best, by eights; {arguments.seeds} seeds\n")
    print("| space | variants | so near | search | cost model | median | mean | most |")
    print("|---|---:|---:|---|---|---:|---:|---:|")
    for name, found in groups.items():
        if len(found) < LEAST_TRIALS[0]:
            continue
        best = min(trial.time_us for trial, _ in found)
        near = sum(trial.time_us <= NEAR * best for trial, _ in found)
        for search in ("exhaustive", "surrogate"):
            seeds = range(arguments.seeds if search == "surrogate" else 1)
            for word, guesses in (("no", {}), ("yes", {t.variant.id: guess for t, guess in found})):
                counts = [evaluations(search, [t for t, _ in found], guesses, seed, best) for seed in seeds]
                middle, mean = statistics.median(counts), statistics.mean(counts)
                print(
                    f"| {name} | {len(found)} | {near} | {search} | {word} | {middle:g} | {mean:.1f} | {max(counts)} |"
                )


def evaluations(search: str, trials: Sequence[Measured], predicted: dict[str, float], seed: int, best_us: float) -> int:
    """How many evaluations a strategy needs to come near the best."""
    told = {trial.variant.id: Told(trial.variant, trial.time_us) for trial in trials}
    space = Space([trial.variant for trial in trials], predicted)
    strategy = make_strategy(search, space, Budget(), seed)
    best = replay(strategy, told, len(trials), batch=8).best_us
    return 1 + next(place for place, us in enumerate(best) if us is not None and us <= NEAR * best_us)


def do_winners(arguments: argparse.Namespace) -> None:
    spec, arch = load_spec(arguments.spec), ARCHES[arguments.arch]
    model = parse_cost_model(shipped_cost_model(spec.name, arch.name))
    latest = {winner.problem: winner.variant for winner in shipped_winners(spec.name, arch.name, version=spec.version)}
    places: list[float] = []
    factors: list[float] = []
    for given, winner in latest.items():
        problem = spec.problem(given)
        launches = {v.id: launch_of(spec, problem, v) for v in expand(spec, arch, problem).variants}
        predicted = {id: model.predict_us(launch) for id, launch in launches.items() if launch is not None}
        if winner.id not in predicted:
            continue
        before = sum(us < predicted[winner.id] for us in predicted.values())
        places.append(before / len(predicted))
        factors.append(predicted[winner.id] / min(predicted.values()))
    print(f"{len(places)} shipped winners: the share of their space that is predicted faster has median ", end="")
    print(f"{statistics.median(places):.3f}, most {max(places):.3f}; they are predicted at ", end="")
    print(f"{statistics.median(factors):.2f} times the least prediction (median), {max(factors):.2f} at most")


def pair(text: str) -> tuple[str, Value]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, do in (("extract", do_extract), ("fit", do_fit), ("replay", do_replay), ("winners", do_winners)):
        one = commands.add_parser(name)
        one.set_defaults(do=do)
        one.add_argument("--spec", default="fmha")
        one.add_argument("--arch", default="sm_90a", choices=list(ARCHES))
        if name == "winners":
            continue
        one.add_argument("--db", type=Path, nargs="+", default=[], help="databases to take the trials from")
        one.add_argument("--assume", type=pair, action="append", default=[], metavar="NAME=VALUE")
        if name == "extract":
            one.add_argument("--out", type=Path, required=True)
        else:
            one.add_argument("trials", type=Path, nargs="?", help="a file that `extract` wrote")
        if name == "fit":
            one.add_argument("--write", type=Path, help="where the numbers go that ship")
            one.add_argument("--without-work", action="store_true", help="cost and footprint alone, to compare")
        if name == "replay":
            one.add_argument("--seeds", type=int, default=40)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
