"""T4 files: read in as trials, written out again, and read by Kernel Tuner."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.cli import main
from tunekit.errors import DatabaseError, UserError
from tunekit.model import Environment, Values
from tunekit.store import t4
from tunekit.store.database import Store
from tunekit.trials import Outcome, Stage, Status, Trial

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "data" / "searchspaces"


def result(x: int, invalidity: str = "correct", value: object = None) -> dict:
    times = {"compilation": 900.0, "framework": 1.0, "search_algorithm": 0, "validation": 0}
    ok = invalidity == "correct"
    if ok:
        times["runtimes"] = [2.0 * x, 2.0 * x + 1]
    value = value if value is not None else 2.0 * x + 0.5 if ok else "RuntimeFailedConfig"
    return {
        "timestamp": "2023-12-22 09:54:05.502007+00:00",
        "configuration": {"block_size_x": x, "layout": "row", "unroll": x > 1},
        "times": times,
        "invalidity": invalidity,
        "correctness": int(ok),
        "measurements": [{"name": "time", "value": value, "unit": ""}],
        "objectives": ["time"],
    }


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """Three configurations, one of them failed at run time and one at the compile."""
    plain = {
        "schema_version": "1.0.0",
        "metadata": {"timeunit": "miliseconds"},
        "results": [result(1), result(2), result(4, "runtime"), result(8, "compile")],
    }
    path = tmp_path / "toy-A100.t4.json.gz"
    path.write_bytes(gzip.compress(json.dumps(plain).encode()))
    return path


def test_a_file_reads_in_microseconds(sample: Path) -> None:
    first, second, third, fourth = t4.read_t4(sample)
    assert first.time_us == 2500.0 and first.runtimes_us == (2000.0, 3000.0)
    assert first.configuration == Values(block_size_x=1, layout="row", unroll=False)
    assert second.seconds == Values(compile=0.9)
    assert (third.time_us, third.invalidity) == (None, "runtime")
    assert fourth.invalidity == "compile"


def test_import_makes_trials_and_twice_changes_nothing(sample: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        done = t4.import_t4(store, sample)
        assert (done.added, done.rejected) == (4, ())
        again = t4.import_t4(store, sample)
        assert (again.added, again.known) == (0, 4)
        trials = store.trials(spec="toy", arch="A100")
    assert [trial.outcome.status for trial in trials] == [
        Status.OK, Status.OK, Status.LAUNCH_ERROR, Status.COMPILE_ERROR,
    ]  # fmt: skip
    assert {trial.protocol for trial in trials} == {t4.PROTOCOL}
    assert trials[0].environment.gpu == "A100"


def test_export_gives_back_what_was_imported(sample: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        t4.import_t4(store, sample)
        evaluations = t4.evaluations_of(store.trials(spec="toy", arch="A100"))
    out = tmp_path / "out.t4.json"
    t4.write_json(t4.t4_of(evaluations), out)
    before, after = t4.read_t4(sample), t4.read_t4(out)
    kept = ("configuration", "time_us", "invalidity", "runtimes_us", "seconds")
    assert [[getattr(e, k) for k in kept] for e in after] == [[getattr(e, k) for k in kept] for e in before]


@pytest.mark.parametrize("name", ["convolution-A100", "dedispersion-A100"])
def test_recorded_spaces_read_whole(name: str) -> None:
    path = RECORDED / f"{name}.t4.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout (../shared/data/searchspaces)")
    found = t4.read_t4(path)
    plain = json.loads(gzip.decompress(path.read_bytes()))["results"]
    assert len(found) == len(plain)
    assert sum(e.time_us is None for e in found) == sum(r["invalidity"] != "correct" for r in plain)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"results": [{}]}', b'{"results": 3}', b"\x1f\x8bno gzip", b"\xff\xfe"]
)
def test_what_is_no_t4_is_refused_in_a_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a-b.json"
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match="no T4 file"):
        t4.read_t4(path)


def test_a_time_that_is_none_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "a-b.json"
    path.write_text(json.dumps({"metadata": {}, "results": [result(1, value=float("nan")), result(2, value=-1.0)]}))
    assert [(e.time_us, e.invalidity) for e in t4.read_t4(path)] == [(None, "runtime")] * 2


def measured(tile: int, problem: Values, protocol: str = "search/3", status: Status = Status.OK) -> Trial:
    variant = identity.variant("mine", 1, "only", "sm_90a", Values(tile=tile))
    samples = (10.0 + tile, 11.0 + tile, 30.0 + tile) if status is Status.OK else ()
    reason = "" if status is Status.OK else "why"
    outcome = Outcome(Stage.MEASURE, status, reason, samples_us=samples, protocol=protocol)
    return Trial(variant, problem, f"{tile:064x}", outcome, Environment(), protocol=protocol)


def test_own_trials_export_their_median_and_their_failures() -> None:
    here = Values(rows=8)
    found = t4.evaluations_of([measured(1, here), measured(2, here, status=Status.DEVICE_FAULT)])
    assert [(e.time_us, e.invalidity) for e in found] == [(12.0, "correct"), (None, "runtime")]


def test_one_file_is_of_one_problem_and_the_searchs_protocol() -> None:
    with pytest.raises(UserError, match="problems rows=8; rows=9"):
        t4.evaluations_of([measured(1, Values(rows=8)), measured(2, Values(rows=9))])
    with pytest.raises(UserError, match="no evaluation to export"):
        t4.evaluations_of([])
    trials = [measured(1, Values(rows=8)), measured(2, Values(rows=8)), measured(2, Values(rows=8), "final/3")]
    assert len(t4.evaluations_of(trials)) == 2
    assert [e.time_us for e in t4.evaluations_of([*trials, measured(3, Values(rows=8), "final/3")])] == [12.0, 13.0]


def test_the_command_line_imports_and_exports(sample: Path, tmp_path: Path, capsys) -> None:
    db, out = str(tmp_path / "t.db"), tmp_path / "out.t4.json.gz"
    assert main(["db", "import", str(sample), "--format", "t4", "--db", db]) == 0
    assert "4 added" in capsys.readouterr().out
    arguments = ["db", "export", str(out), "--format", "t4", "--spec", "toy", "--arch", "A100", "--db", db]
    assert main(arguments) == 0
    assert "4 evaluations" in capsys.readouterr().out
    assert len(t4.read_t4(out)) == 4
    cache = tmp_path / "cache.json"
    arguments = ["db", "export", str(cache), "--format", "kernel-tuner", "--spec", "toy", "--arch", "A100", "--db", db]
    assert main(arguments) == 0
    assert json.loads(cache.read_text())["cache"]["1,row,False"]["time"] == 2.5


def test_the_schema_and_the_simulation_of_kernel_tuner_accept_an_export(tmp_path: Path) -> None:
    kernel_tuner = pytest.importorskip("kernel_tuner")
    jsonschema = pytest.importorskip("jsonschema")
    from kernel_tuner.file_utils import output_file_schema

    trials = [measured(tile, Values(rows=8)) for tile in (1, 2, 4)]
    found = t4.evaluations_of([*trials, measured(8, Values(rows=8), status=Status.COMPILE_ERROR)])
    jsonschema.validate(t4.t4_of(found), output_file_schema("results")[1])
    cache = t4.cache_of(found, "mine", "H200")
    path = tmp_path / "cache.json"
    t4.write_json(cache, path)
    results, _ = kernel_tuner.tune_kernel(
        "mine", "", lambda: 1, [], cache["tune_params"], lang="CUDA", cache=str(path), simulation_mode=True, quiet=True
    )
    times = [each["time"] for each in results if isinstance(each["time"], float)]
    assert min(times) == 0.012


def t4_file(directory: Path, *results: object, **more: object) -> Path:
    path = directory / "toy-A100.t4.json"
    path.write_text(json.dumps({"schema_version": "1.0.0", "results": list(results), **more}))
    return path


BAD_RESULTS = {
    "unknown invalidity": ({"invalidity": "cosmic"}, "'cosmic' is unknown"),
    "no name of one": ({"invalidity": ["correct"]}, "is unknown"),
    "a time in words": ({"measurements": [{"name": "time", "value": "fast", "unit": "ms"}]}, "'fast' is no number"),
    "a truth for a time": ({"measurements": [{"name": "time", "value": True, "unit": "ms"}]}, "True is no number"),
    "no unit of time": (
        {"objectives": ["GFLOP/s"], "measurements": [{"name": "GFLOP/s", "value": 9, "unit": "GFLOP/s"}]},
        "'GFLOP/s', which is no unit of time",
    ),
    "a nested value": ({"configuration": {"x": [1, 2]}}, "configuration.x is [1, 2]"),
    "NaN in a configuration": ({"configuration": {"x": float("nan")}}, "configuration.x is nan"),
    "no configuration": ({"configuration": [1]}, "configuration is list"),
    "no times": ({"times": None}, "times is NoneType"),
    "runtimes in words": ({"times": {"runtimes": ["x"]}}, "'x' is no number"),
    "one runtime": ({"times": {"runtimes": 2.5}}, "runtimes is float"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_bad_result_is_rejected_by_number_and_the_others_go_in(name: str, tmp_path: Path) -> None:
    change, words = BAD_RESULTS[name]
    path = t4_file(tmp_path, result(1), {**result(2), **change}, result(4))
    with Store.open(tmp_path / "results.db") as store:
        done = t4.import_t4(store, path)
        assert len(store.trials(spec="toy")) == 2
    assert done.added == 2
    (why,) = done.rejected
    assert why.startswith("result 2: ") and words in why
    with pytest.raises(DatabaseError, match="is no T4 file: result 2: "):
        t4.read_t4(path)


@pytest.mark.parametrize("times", [[float("nan")], [0.0], [-1.0], [float("inf")], [1e300], [10**400]])
def test_a_runtime_that_is_none_is_a_failure(times: list, tmp_path: Path) -> None:
    path = t4_file(tmp_path, {**result(1), "times": {"runtimes": [2.0, *times], "compilation": float("nan")}})
    with Store.open(tmp_path / "results.db") as store:
        assert t4.import_t4(store, path).added == 1
        (trial,) = store.trials(spec="toy")
    assert (trial.outcome.status, trial.outcome.samples_us) == (Status.LAUNCH_ERROR, ())
    assert trial.outcome.seconds == Values()


PACKED = gzip.compress(json.dumps({"results": [result(1)]}).encode())
BAD_FILES = {
    "empty": b"",
    "nested too deep": b"[" * 100_000,
    "truncated gzip": PACKED[:-20],
    "damaged gzip": PACKED[:30] + bytes([PACKED[30] ^ 0xFF]) + PACKED[31:],
    "not gzip": b"\x1f\x8bnothing",
    "a newer schema": json.dumps({"schema_version": "9.0.0", "results": [result(1)]}).encode(),
    "an unknown unit": json.dumps({"metadata": {"timeunit": "parsec"}, "results": [result(1)]}).encode(),
    "nothing but bad results": json.dumps({"results": [None, "x"]}).encode(),
    "results by name": json.dumps({"results": {"a": 1}}).encode(),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line(name: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "toy-A100.t4.json"
    path.write_bytes(BAD_FILES[name])
    assert main(["db", "import", str(path), "--format", "t4", "--db", str(tmp_path / "results.db")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1


def test_a_result_without_measurements_or_with_an_odd_timestamp_reads(tmp_path: Path) -> None:
    path = t4_file(
        tmp_path,
        {**result(1, "compile"), "measurements": None, "objectives": []},
        {**result(2), "timestamp": None},
    )
    first, second = t4.read_t4(path)
    assert first.invalidity == "compile"
    assert second.recorded_at == "" and second.time_us == 4500.0


def test_a_problem_of_an_export_as_lines_is_refused(tmp_path: Path, capsys) -> None:
    Store.open(tmp_path / "results.db").close()
    assert main(["db", "export", "-", "--problem", "n=1", "--db", str(tmp_path / "results.db")]) == 2
    assert "--problem belongs to" in capsys.readouterr().err
