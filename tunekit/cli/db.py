"""``tunekit db``: moving, checking and cleaning what is recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunekit.cli import options
from tunekit.errors import DatabaseError
from tunekit.report import Printer, Table, units

if TYPE_CHECKING:
    from tunekit.store.exchange import Exchanged

spec_option = click.option("--spec", metavar="NAME", help="Only this spec's records.")


@click.group()
def db() -> None:
    """Export, import, merge, verify and clean the results."""


@db.command("export")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), default="-")
@spec_option
@click.option("--arch", metavar="ARCH", help="Only this architecture's records.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(["sweep", "trial", "winner", "known_bad"]),
    help="Only such records; repeatable. [default: all]",
)
@click.option(
    "--ship", is_flag=True, help="FILE is a directory, such as tuning_db: put the winners into its reviewable file."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "t4", "kernel-tuner"]),
    default="jsonl",
    show_default=True,
    help="t4: one spec's evaluations of one problem, as Kernel Tuner's T4; kernel-tuner: its simulation's cache file.",
)
@click.option("--problem", "problem_texts", multiple=True, metavar="K=V", help="With t4: only this problem's.")
@options.db_option
@options.json_option
def export(
    file: Path,
    spec: str | None,
    arch: str | None,
    kinds: tuple[str, ...],
    ship: bool,
    form: str,
    problem_texts: tuple[str, ...],
    db: Path | None,
    as_json: bool,
) -> int:
    """Write records as JSON Lines to FILE, or to stdout."""
    from tunekit.store import exchange

    database = options.settings(db).database
    out = Printer(sys.stdout)
    if form != "jsonl":
        if spec is None or arch is None or str(file) == "-" or ship or kinds:
            raise click.UsageError(f"--format {form} takes a FILE, --spec and --arch, and neither --kind nor --ship")
        count = _export_t4(database, file, spec, arch, form, problem_texts)
        out.json({"file": str(file), "evaluations": count}) if as_json else out.line(
            f"wrote {count} evaluations to {file}"
        )
        return 0
    if problem_texts:
        raise click.UsageError("--problem belongs to --format t4 and kernel-tuner")
    wanted = tuple(kind for kind in exchange.KINDS if not kinds or kind in kinds)
    if ship:
        if spec is None or arch is None or str(file) == "-":
            raise click.UsageError("--ship takes a directory, --spec and --arch")
        done = exchange.ship(database, file, spec=spec, arch=arch)
        found = {"file": str(done.file), "winners": done.written, "kept": done.kept}
        out.json(found) if as_json else out.line(f"wrote {done.written} winners to {done.file}, {done.kept} kept")
        return 0
    if str(file) == "-":
        if as_json:
            raise click.UsageError("an export to stdout is JSON Lines already; give a FILE with --json")
        for line in exchange.export_lines(database, spec=spec, arch=arch, kinds=wanted):
            out.line(line)
        return 0
    count = exchange.export_jsonl(database, file, spec=spec, arch=arch, kinds=wanted)
    out.json({"file": str(file), "records": count}) if as_json else out.line(f"wrote {count} records to {file}")
    return 0


def _export_t4(database: Path, file: Path, spec: str, arch: str, form: str, problem_texts: Sequence[str]) -> int:
    """Write one spec's evaluations of one problem for Kernel Tuner; how many."""
    from tunekit.cli.problems import pairs
    from tunekit.store import t4
    from tunekit.store.database import Store

    wanted = pairs(problem_texts)
    if not database.exists():
        raise DatabaseError(f"no database {database}")
    with Store.open(database, create=False) as store:
        trials = [
            trial
            for trial in store.trials(spec=spec, arch=arch)
            if all(str(trial.problem.get(name)) == value for name, value in wanted.items())
        ]
    gpu = next((trial.environment.gpu for trial in trials if trial.environment.gpu), arch)
    evaluations = t4.evaluations_of(trials)
    t4.write_json(t4.t4_of(evaluations) if form == "t4" else t4.cache_of(evaluations, spec, gpu), file)
    return len(evaluations)


@db.command("import", short_help="Take in JSON Lines, or a T4 file.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "t4"]),
    default="jsonl",
    show_default=True,
    help="t4: Kernel Tuner's results, gzipped or not, as trials.",
)
@click.option("--spec", metavar="NAME", help="With t4: the kernel. [default: the file's name, KERNEL-DEVICE]")
@click.option("--arch", metavar="ARCH", help="With t4: the device. [default: likewise]")
@options.db_option
@options.json_option
def import_(file: Path, form: str, spec: str | None, arch: str | None, db: Path | None, as_json: bool) -> int:
    """Take in a file of JSON Lines, or of Kernel Tuner's T4; what is there already stays.

    Exit status 1: some lines were rejected.
    """
    from tunekit.store.database import Store
    from tunekit.store.exchange import import_jsonl
    from tunekit.store.t4 import import_t4

    if form == "jsonl" and (spec or arch):
        raise click.UsageError("--spec and --arch belong to --format t4")
    with Store.open(options.settings(db).database) as store:
        done = import_jsonl(store, file) if form == "jsonl" else import_t4(store, file, spec, arch)
        return _taken_in(done, as_json)


@db.command()
@click.argument("other", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@options.db_option
@options.json_option
def merge(other: Path, db: Path | None, as_json: bool) -> int:
    """Take in all of the database OTHER, which is only read."""
    from tunekit.store import exchange
    from tunekit.store.database import Store

    with Store.open(options.settings(db).database) as store:
        return _taken_in(exchange.merge(store, other), as_json)


def _taken_in(done: Exchanged, as_json: bool) -> int:
    out = Printer(sys.stdout)
    out.json(done) if as_json else out.line(str(done))
    for line in done.rejected:
        click.echo(f"tunekit: {line}", err=True)
    return 1 if done.rejected else 0


@db.command(short_help="Check the database and every artifact, or a file.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@options.db_option
@options.json_option
def verify(file: Path | None, db: Path | None, as_json: bool) -> int:
    """Check the database's pages and rows and every artifact; or an exported or shipped FILE. Changes nothing.

    Exit status 1: damage was found.
    """
    from tunekit.store.artifacts import ArtifactStore
    from tunekit.store.verify import verify as check
    from tunekit.store.verify import verify_lines

    chosen = options.settings(db)
    findings = verify_lines(file) if file else check(chosen.database, ArtifactStore(chosen.artifacts))
    out = Printer(sys.stdout)
    if as_json:
        out.json(findings)
    else:
        for finding in findings:
            out.line(str(finding))
        errors = sum(1 for finding in findings if finding.severity == "error")
        out.line(f"{file or chosen.database}: {errors} errors, {len(findings) - errors} warnings")
    return 1 if any(finding.severity == "error" for finding in findings) else 0


@db.command(short_help="Remove what nothing refers to any more.")
@click.option("--older-than", "days", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="DAYS",
              help="Spare what is younger; an hour at least.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@options.db_option
@options.json_option
def gc(days: float, dry_run: bool, db: Path | None, as_json: bool) -> int:
    """Remove artifacts that nothing refers to, unfinished work and what was moved aside."""
    from tunekit.store.artifacts import ArtifactStore
    from tunekit.store.gc import gc as collect

    chosen = options.settings(db)
    done = collect([chosen.database], ArtifactStore(chosen.artifacts), older_than_days=days, dry_run=dry_run)
    out = Printer(sys.stdout)
    if as_json:
        removed = [str(path) for path in done.removed]
        out.json({"removed": removed, "freed_bytes": done.freed_bytes, "kept": done.kept, "dry_run": dry_run})
        return 0
    for path in done.removed if dry_run else ():
        out.line(str(path))
    verb = "would remove" if dry_run else "removed"
    out.line(f"{verb} {len(done.removed)} files, {units.mebibytes(done.freed_bytes)}; {done.kept} artifacts stay")
    return 0


@db.command(short_help="Say what the database holds.")
@options.db_option
@options.json_option
def info(db: Path | None, as_json: bool) -> int:
    """Say what the database holds: sweeps, trials by status, winners, remembered failures. Changes nothing."""
    database = options.settings(db).database
    if not database.exists():
        raise DatabaseError(f"no database {database}")
    summary = _summary(database)
    out = Printer(sys.stdout)
    if as_json:
        out.json({"database": str(database), **summary})
        return 0
    out.line(f"{database}: {units.mebibytes(database.stat().st_size)}")
    rows = [(str(count), name) for name, count in summary.items() if isinstance(count, int)]
    out.table(Table(("count", "what"), rows, right=frozenset({"count"})))
    by_status = summary["trials_by_status"]
    if isinstance(by_status, dict) and by_status:
        out.table(Table(("trials", "status"), [(str(n), s) for s, n in by_status.items()], right=frozenset({"trials"})))
    return 0


def _summary(database: Path) -> dict[str, int | dict[str, int]]:
    from tunekit.store.readonly import UnreadableError, reading

    try:
        with reading(database, 10.0) as connection:

            def count(table: str, where: str = "1") -> int:
                return int(connection.execute(f"SELECT COUNT(*) FROM {table} WHERE {where}").fetchone()[0])

            by_status = connection.execute(
                "SELECT stage || ' ' || status, COUNT(*) FROM trials GROUP BY 1 ORDER BY 2 DESC, 1"
            ).fetchall()
            return {
                "sweeps": count("sweeps"),
                "trials": count("trials"),
                "winners": count("winners", "current = 1"),
                "known_bad": count("known_bad"),
                "environments": count("environments"),
                "trials_by_status": {row[0]: row[1] for row in by_status},
            }
    except UnreadableError as error:
        raise DatabaseError(f"{database} {error}") from error
