"""Kernel Tuner's T4 results: read in, as trials, and written out.

A T4 file holds the evaluations of one kernel for one problem on one device. It
names neither: the file's name often does (``convolution-A100.t4.json.gz``).
Imported times carry a protocol of their own, so that nothing compares them
with times that tunekit measured. See
github.com/AutoTuningAssociation/autotuning_methodology for the format.
"""

from __future__ import annotations

import collections
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunekit import identity
from tunekit.errors import DatabaseError, UserError
from tunekit.model import Environment, Values, Variant
from tunekit.store import exchange, files, lines, rows
from tunekit.store.database import Store
from tunekit.trials import Outcome, Stage, Status, Trial

PROTOCOL = "kernel-tuner/t4"
IMPLEMENTATION = "kernel_tuner"
SCHEMA = "1.0.0"
_UNITS_US = {
    **dict.fromkeys(("s", "seconds"), 1e6),
    **dict.fromkeys(("", "ms", "milliseconds", "miliseconds"), 1e3),  # as Kernel Tuner 1.0 spells it
    **dict.fromkeys(("us", "microseconds"), 1.0),
    **dict.fromkeys(("ns", "nanoseconds"), 1e-3),
}
# T4's word for how an evaluation ended, and tunekit's stage and status.
_ENDINGS = {
    "correct": (Stage.MEASURE, Status.OK),
    "compile": (Stage.COMPILE, Status.COMPILE_ERROR),
    "runtime": (Stage.MEASURE, Status.LAUNCH_ERROR),
    "timeout": (Stage.MEASURE, Status.RUN_TIMEOUT),
    "correctness": (Stage.VERIFY, Status.WRONG_RESULT),
    "constraints": (Stage.PROBE, Status.OVER_BUDGET),
}
_INVALIDITY = {
    **{status: word for word, (_, status) in _ENDINGS.items()},
    **dict.fromkeys((Status.COMPILE_TIMEOUT, Status.RUN_TIMEOUT), "timeout"),
    **dict.fromkeys((Status.WRONG_RESULT, Status.NOT_DETERMINISTIC), "correctness"),
    **dict.fromkeys((Status.LAUNCH_ERROR, Status.DEVICE_FAULT), "runtime"),
}
_ERRORS = {"compile": "CompilationFailedConfig", "constraints": "InvalidConfig"}  # of Kernel Tuner; else RuntimeFailed


@dataclass(frozen=True)
class Evaluation:
    """One configuration of a T4 file: the objective in microseconds, or None and how it failed."""

    configuration: Values
    time_us: float | None
    invalidity: str
    runtimes_us: tuple[float, ...] = ()
    seconds: Values = Values()
    recorded_at: str = ""


def read_t4(path: Path) -> tuple[Evaluation, ...]:
    """The evaluations of a T4 file, gzipped or not, in its order.

    Raises:
        DatabaseError: the file can't be read, is no T4, or holds a result that is none.
    """
    found = _read(path)
    bad = next((each for each in found if isinstance(each, str)), None)
    if bad is not None:
        raise DatabaseError(f"{path} is no T4 file: {bad}")
    return tuple(each for each in found if isinstance(each, Evaluation))


def _read(path: Path) -> list[Evaluation | str]:
    """Each result of a T4 file: an evaluation, or why it is none.

    Raises:
        DatabaseError: the file can't be read, or is no T4.
    """
    try:
        content = path.read_bytes()
        plain = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (ValueError, EOFError, RecursionError, zlib.error, gzip.BadGzipFile) as error:
        raise DatabaseError(f"{path} is no T4 file: {type(error).__name__}: {error}") from error
    except OSError as error:
        raise DatabaseError(f"can't read {path}: {error.strerror or error}") from error
    results = plain.get("results") if isinstance(plain, dict) else None
    if not isinstance(results, list):
        raise DatabaseError(f"{path} is no T4 file: it is no object with a list of results")
    version = str(plain.get("schema_version", SCHEMA))
    if version.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise DatabaseError(f"{path} has T4's schema {version}, this tunekit reads {SCHEMA}")
    metadata = plain.get("metadata")
    unit = str((metadata.get("timeunit") if isinstance(metadata, dict) else None) or "")
    if unit not in _UNITS_US:
        raise DatabaseError(f"{path} is no T4 file: its timeunit {unit!r} is unknown")
    return [_evaluation_or_why(number, each, unit) for number, each in enumerate(results, start=1)]


def _evaluation_or_why(number: int, result: Any, unit: str) -> Evaluation | str:
    try:
        return _evaluation(result, unit)
    except KeyError as error:
        return f"result {number}: lacks {error}"
    except ValueError as error:
        return f"result {number}: {error}"


def _evaluation(result: Any, unit: str) -> Evaluation:
    """One result.

    Raises:
        KeyError, ValueError: it is malformed.
    """
    result = _object(result, "it")
    invalidity = result["invalidity"]
    if not isinstance(invalidity, str) or invalidity not in _ENDINGS:
        raise ValueError(f"invalidity {invalidity!r} is unknown (known: {', '.join(_ENDINGS)})")
    configuration = _object(result["configuration"], "configuration")
    for name, value in configuration.items():
        if not isinstance(value, (bool, int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"configuration.{name} is {value!r}, not a plain value")
    times, scale = _object(result["times"], "times"), _UNITS_US[unit]
    runtimes = [_number(each, "runtimes") * scale for each in _list(times.get("runtimes"), "runtimes")]
    time_us = _objective_us(result, unit) if invalidity == "correct" else None
    if invalidity == "correct" and (time_us is None or not all(_is_time(us) for us in (time_us, *runtimes))):
        time_us, invalidity = None, "runtime"
    phases = {"compile": "compilation", "verify": "validation", "measure": "benchmark"}
    seconds = {ours: _number(times.get(theirs) or 0.0, theirs) * scale / 1e6 for ours, theirs in phases.items()}
    stamp = result.get("timestamp")
    return Evaluation(
        Values(configuration),
        time_us,
        invalidity,
        tuple(runtimes) if time_us is not None else (),
        Values({name: spent for name, spent in seconds.items() if 0 < spent < math.inf}),
        stamp if isinstance(stamp, str) else "",
    )


def _objective_us(result: Mapping[str, Any], unit: str) -> float | None:
    """The first objective, which must be a time; None where it was not measured."""
    objectives = _list(result.get("objectives"), "objectives") or ["time"]
    for each in _list(result.get("measurements"), "measurements"):
        found = _object(each, "a measurement")
        if found["name"] == objectives[0]:
            its = str(found.get("unit") or unit)
            if its not in _UNITS_US:
                raise ValueError(f"the objective {objectives[0]!r} is in {its!r}, which is no unit of time")
            return _number(found["value"], str(objectives[0])) * _UNITS_US[its]
    return None


def _is_time(us: float) -> bool:
    return 0 < us < rows.LONGEST_US


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: {value!r} is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__}, not an object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    """A list; an absent one is empty."""
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, not a list")
    return value or []


def variant_of(evaluation: Evaluation, kernel: str, device: str) -> Variant:
    """The variant that a configuration is: of a spec named as the kernel, for an architecture named as the device."""
    return identity.variant(kernel, 1, IMPLEMENTATION, device, evaluation.configuration)


def import_t4(store: Store, path: Path, kernel: str | None = None, device: str | None = None) -> exchange.Exchanged:
    """Take in a T4 file as trials of the spec `kernel` for the architecture `device`.

    Without them they are the two halves of the file's name (``kernel-device.t4.json.gz``).
    Importing twice changes nothing. A result that is none is rejected, and the others go in.

    Raises:
        DatabaseError: the file is no T4, or none of its results is one; or the database can't be written.
        UserError: the file's name tells no device, and none is given.
    """
    first, _, second = path.name.split(".")[0].rpartition("-")
    kernel, device = kernel or first, device or (second if first else None)
    if not kernel or not device:
        raise UserError(
            f"{path.name} doesn't say the kernel and the device (KERNEL-DEVICE.t4.json): give --spec, --arch"
        )
    found = _read(path)
    rejected = tuple(each for each in found if isinstance(each, str))
    if rejected and len(rejected) == len(found):
        raise DatabaseError(f"{path} is no T4 file: {rejected[0]}")
    trials = ((number, each) for number, each in enumerate(found, start=1) if isinstance(each, Evaluation))
    done = exchange.import_lines(
        store,
        (
            (number, lines.trial_line(_trial(each, kernel, device), recorded_at=each.recorded_at).encode())
            for number, each in trials
        ),
    )
    return replace(done, rejected=(*rejected, *done.rejected))


def _trial(evaluation: Evaluation, kernel: str, device: str) -> Trial:
    variant = variant_of(evaluation, kernel, device)
    stage, status = _ENDINGS[evaluation.invalidity]
    ok = status is Status.OK
    outcome = Outcome(
        stage,
        status,
        "" if ok else f"Kernel Tuner recorded: {evaluation.invalidity}",
        seconds=evaluation.seconds,
        facts=Values(time_us=evaluation.time_us) if evaluation.time_us is not None else Values(),
        samples_us=evaluation.runtimes_us or ((evaluation.time_us,) if evaluation.time_us is not None else ()),
        protocol=PROTOCOL,
    )
    key = identity.digest(["t4", variant.id])
    return Trial(variant, Values(), key, outcome, Environment(gpu=device), protocol=PROTOCOL)


def evaluations_of(trials: Iterable[Trial]) -> tuple[Evaluation, ...]:
    """What trials of one spec, architecture and problem say, a variant each: its last time, else its last failure.

    Of several protocols that which timed the most variants counts: the search's, not the final's.

    Raises:
        UserError: nothing was evaluated, or for several problems, or on several GPUs.
    """
    told = [trial for trial in trials if trial.outcome.stage is not Stage.SIMULATE]
    timed = [trial for trial in told if trial.outcome.ok and trial.outcome.samples_us]
    for what, found in (
        ("problems", {str(trial.problem) for trial in timed}),
        ("GPUs", {str(trial.environment.gpu) for trial in timed}),
    ):
        if len(found) > 1:
            raise UserError(f"a T4 file is of one problem on one GPU; here are {what} {'; '.join(sorted(found))}")
    counts = collections.Counter(trial.protocol for trial in timed)
    protocol = max(counts, key=lambda each: counts[each], default="")
    kept: dict[str, Trial] = {}
    for trial in told:
        ok = trial.outcome.ok
        if ok and not (trial.outcome.samples_us and trial.protocol == protocol):
            continue
        there = kept.get(trial.variant.id)
        if there is None or ok or not there.outcome.ok:
            kept[trial.variant.id] = trial
    if not kept:
        raise UserError("no evaluation to export: nothing was measured, and nothing failed")
    mixed = len({trial.variant.implementation for trial in kept.values()}) > 1
    return tuple(_evaluated(trial, mixed) for trial in kept.values())


def _evaluated(trial: Trial, mixed: bool) -> Evaluation:
    outcome, variant = trial.outcome, trial.variant
    tunables = variant.tunables.merged({"implementation": variant.implementation}) if mixed else variant.tunables
    samples = outcome.samples_us
    given = outcome.facts.get("time_us")
    time_us = float(given) if given is not None else sorted(samples)[len(samples) // 2] if samples else None
    word = "correct" if outcome.ok else _INVALIDITY.get(outcome.status, "compile")
    return Evaluation(tunables, time_us if outcome.ok else None, word, samples, outcome.seconds)


def t4_of(evaluations: Iterable[Evaluation]) -> dict[str, Any]:
    """The T4 document, times in milliseconds."""
    results = []
    for each in evaluations:
        times: dict[str, Any] = {
            theirs: 1e3 * float(each.seconds.get(ours, 0.0))
            for ours, theirs in (("compile", "compilation"), ("verify", "validation"), ("measure", "benchmark"))
        }
        times |= {"framework": 0.0, "search_algorithm": 0.0, "runtimes": [us / 1e3 for us in each.runtimes_us]}
        value = _error(each.invalidity) if each.time_us is None else each.time_us / 1e3
        results.append(
            {
                **({"timestamp": each.recorded_at} if each.recorded_at else {}),
                "configuration": dict(each.configuration),
                "times": times,
                "invalidity": each.invalidity,
                "correctness": int(each.invalidity == "correct"),
                "measurements": [{"name": "time", "value": value, "unit": "ms" if each.time_us is not None else ""}],
                "objectives": ["time"],
            }
        )
    return {"schema_version": "1.0.0", "metadata": {"timeunit": "milliseconds"}, "results": results}


def cache_of(evaluations: Iterable[Evaluation], kernel: str, device: str) -> dict[str, Any]:
    """The cache file that Kernel Tuner's simulation mode reads: it has no reader of T4."""
    every = tuple(evaluations)
    names = list(every[0].configuration) if every else []
    if any(list(each.configuration) != names for each in every):
        raise UserError("Kernel Tuner needs the same tunables in every configuration")
    entries: dict[str, Any] = {}
    for each in every:
        value = _error(each.invalidity) if each.time_us is None else each.time_us / 1e3
        zeros = dict.fromkeys(("framework_time", "strategy_time"), 0.0)
        spent = {f"{theirs}_time": 1e3 * float(each.seconds.get(ours, 0.0)) for ours, theirs in
                 (("compile", "compile"), ("verify", "verification"), ("measure", "benchmark"))}  # fmt: skip
        times = [us / 1e3 for us in each.runtimes_us]
        key = ",".join(str(each.configuration[name]) for name in names)
        entries[key] = {**each.configuration, "time": value, "times": times, **spent, **zeros}
    values = {name: sorted({each.configuration[name] for each in every}, key=_order) for name in names}
    return {
        "device_name": device,
        "kernel_name": kernel,
        "problem_size": "callable",
        "tune_params_keys": names,
        "tune_params": values,
        "objective": "time",
        "cache": entries,
    }


def _error(invalidity: str) -> str:
    return _ERRORS.get(invalidity, "RuntimeFailedConfig")


def _order(value: Any) -> tuple[str, Any]:
    return ("", value) if isinstance(value, (int, float)) else (type(value).__name__, value)


def write_json(document: Mapping[str, Any], target: Path) -> None:
    """Write a document to a file, gzipped if its name ends so; whole or not at all.

    Raises:
        DatabaseError: it can't be written.
    """
    content = json.dumps(document, allow_nan=False).encode()
    try:
        packed = gzip.compress(content, mtime=0) if target.suffix == ".gz" else content
        files.publish(packed, target, target.absolute().parent)
    except OSError as error:
        raise DatabaseError(f"can't write {target}: {error.strerror}") from error
