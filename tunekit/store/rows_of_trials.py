"""Rows and trials, both ways, as `rows` has it for all else: what serving never reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunekit.model import Environment, Footprint, Values
from tunekit.store.rows import (
    FOOTPRINT_COLUMNS,
    VARIANT_COLUMNS,
    Row,
    RowError,
    check_known,
    dump,
    number,
    optional_count,
    optional_text,
    plain,
    plain_values,
    seconds,
    text,
    time_us,
    values,
    variant_of,
    variant_row,
)
from tunekit.trials import KnownBad, Outcome, Stage, Status, Trial

TRIAL_COLUMNS = (
    *VARIANT_COLUMNS,
    *("problem", "compile_key", "stage", "status", "reason", "protocol", "seconds", "peak_rss_bytes", "artifact"),
    "windows",
)
KNOWN_BAD_COLUMNS = (
    *("compile_key", *VARIANT_COLUMNS, "status", "reason"),
    *("phase", "seconds", "peak_rss_bytes", "signal"),
)


def trial_row(trial: Trial) -> dict[str, Any]:
    """The row of a trial; samples and compile facts have tables of their own.

    A trial and its outcome share one protocol.
    """
    outcome = trial.outcome
    if trial.protocol and outcome.protocol not in ("", trial.protocol):
        raise RowError(f"protocol is {trial.protocol!r}, that of its outcome {outcome.protocol!r}")
    return {
        **variant_row(trial.variant),
        "problem": dump(trial.problem, "problem"),
        "compile_key": text(trial.compile_key, "compile_key"),
        "stage": Stage(outcome.stage).value,
        "status": Status(outcome.status).value,
        "reason": text(outcome.reason, "reason"),
        "protocol": text(trial.protocol or outcome.protocol, "protocol"),
        "seconds": dump(seconds(outcome.seconds), "seconds"),
        "peak_rss_bytes": optional_count(outcome.peak_rss_bytes, "peak_rss_bytes"),
        "artifact": optional_text(outcome.artifact, "artifact"),
        "windows": dump(outcome.windows, "windows") if outcome.windows else None,
    }


def facts_row(outcome: Outcome) -> dict[str, Any] | None:
    """The compile facts of an outcome: footprint columns and ``facts`` as JSON; None where it has none."""
    footprint = {name: optional_count(getattr(outcome.footprint, name), name) for name in FOOTPRINT_COLUMNS}
    if not outcome.facts and all(value is None for value in footprint.values()):
        return None
    return {**footprint, "facts": dump(outcome.facts, "facts")}


def samples_of(samples: Sequence[object]) -> tuple[float, ...]:
    """Samples in microseconds, each of them a time."""
    return tuple(time_us(value, f"samples_us[{index}]") for index, value in enumerate(samples))


def trial_of(
    row: Row, environment: Environment, facts: Row | None, samples_us: Sequence[object], sweep: int | None
) -> Trial:
    check_known(row, TRIAL_COLUMNS)
    if facts is not None:
        check_known(facts, (*FOOTPRINT_COLUMNS, "facts"))
    footprint = {name: optional_count(facts[name], name) for name in FOOTPRINT_COLUMNS} if facts else {}
    outcome = Outcome(
        stage=_member(Stage, row["stage"], "stage"),
        status=_member(Status, row["status"], "status"),
        reason=text(row["reason"], "reason"),
        seconds=seconds(values(row["seconds"], "seconds")),
        peak_rss_bytes=optional_count(row["peak_rss_bytes"], "peak_rss_bytes"),
        artifact=optional_text(row["artifact"], "artifact"),
        footprint=Footprint(**footprint),
        facts=values(facts["facts"], "facts") if facts else Values(),
        samples_us=samples_of(samples_us),
        protocol=text(row["protocol"], "protocol"),
        windows=_windows_of(row.get("windows")),  # a database of schema 4 on read-only media has none
    )
    return Trial(
        variant=variant_of(row),
        problem=values(row["problem"], "problem"),
        compile_key=text(row["compile_key"], "compile_key"),
        outcome=outcome,
        environment=environment,
        protocol=text(row["protocol"], "protocol"),
        sweep=sweep,
    )


def _windows_of(source: object) -> tuple[Values, ...]:
    found = [] if source is None else plain(source, "windows")
    if not isinstance(found, list):
        raise RowError("windows is not a list")
    return tuple(plain_values(item, f"windows[{index}]") for index, item in enumerate(found))


def _member(kind: Any, value: object, field: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise RowError(f"{field} is {value!r}, which this tunekit doesn't know") from None


def known_bad_row(bad: KnownBad) -> dict[str, Any]:
    return {
        "compile_key": text(bad.compile_key, "compile_key"),
        **variant_row(bad.variant),
        "status": Status(bad.status).value,
        "reason": text(bad.reason, "reason"),
        "phase": text(bad.phase, "phase"),
        "seconds": number(bad.seconds, "seconds", least=0.0),
        "peak_rss_bytes": optional_count(bad.peak_rss_bytes, "peak_rss_bytes"),
        "signal": None if bad.signal is None else int(number(bad.signal, "signal")),
    }


def known_bad_of(row: Row) -> KnownBad:
    check_known(row, KNOWN_BAD_COLUMNS)
    return KnownBad(
        compile_key=text(row["compile_key"], "compile_key"),
        variant=variant_of(row),
        status=_member(Status, row["status"], "status"),
        reason=text(row["reason"], "reason"),
        phase=text(row["phase"], "phase"),
        seconds=number(row["seconds"], "seconds", least=0.0),
        peak_rss_bytes=optional_count(row["peak_rss_bytes"], "peak_rss_bytes"),
        signal=None if row["signal"] is None else int(number(row["signal"], "signal")),
    )
