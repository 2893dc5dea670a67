"""Each command's results, and its answer to bad input: one line on stderr, exit status 2."""

from __future__ import annotations

import json
import shlex

import pytest

from tunekit.cli import COMMANDS
from tunekit.cli import tunekit as group
from tunekit.cli.options import LONGEST_S, budget, duration, memory


def test_the_groups_lines_are_the_commands_own():
    """`tunekit --help` prints lines that it need not import the commands for; they may not drift."""
    import click

    context = click.Context(group)
    for name, (_, _, line) in COMMANDS.items():
        command = group.get_command(context, name)
        assert command is not None
        assert (command.help or "").strip().partition("\n")[0] == line
        assert command.name == name


def test_list_shows_the_variants_with_their_footprints(tunekit, scale):
    done = tunekit("list", scale, "--problem", "rows=8")
    assert done.status == 0
    assert "6 of 12 variants; dropped: 6 by delay" in done.out
    assert done.out.count(" loop ") == 6


def test_list_without_a_spec_names_the_shipped_ones(tunekit):
    from tunekit.spec import list_specs

    done = tunekit("list", "--json")
    assert [spec["name"] for spec in json.loads(done.out)] == [spec.name for spec in list_specs()]


def test_explain_says_which_constraint_dropped_how_many(tunekit, scale):
    done = tunekit("explain", scale, "--problem", "rows=8")
    assert "6 of 12 variants remain" in done.out
    assert "delay" in done.out and "an unrolled loop isn't tried with a delay" in done.out


def test_explain_tells_a_dropped_variants_story(tunekit, scale):
    done = tunekit("explain", scale, "-p", "rows=8", "--tunables", "unroll=8", "delay_us=200")
    assert "dropped by delay: an unrolled loop isn't tried with a delay" in done.out
    (story,) = json.loads(
        tunekit("explain", scale, "-p", "rows=8", "--tunables", "unroll=8", "delay_us=200", "--json").out
    )
    assert story["dropped_by"]["by"] == "delay"
    by_id = tunekit("explain", scale, "-p", "rows=8", "--variant", story["variant"]["id"][:8])
    assert by_id.out == done.out


def test_explain_shows_the_stored_outcomes(tunekit, scale, tmp_path):
    from tunekit import space
    from tunekit.arch import parse_arch
    from tunekit.model import Environment, Values
    from tunekit.spec import load_spec
    from tunekit.store.database import Store
    from tunekit.trials import Outcome, Stage, Status, Trial

    spec = load_spec(scale)
    problem = spec.problem({"rows": 8})
    variant = space.expand(spec, parse_arch("host"), problem).variants[0]
    outcome = Outcome(Stage.COMPILE, Status.COMPILE_TIMEOUT, "mlir: over 5 s", Values(trace=0.5, mlir=5.0), 2**28)
    with Store.open(tmp_path / "t.db") as store:
        store.record(Trial(variant, spec.static(problem), "k" * 64, outcome, Environment(cutlass_dsl="4.8.1")))
        elsewhere = Outcome(Stage.VERIFY, Status.WRONG_RESULT, "wrong for 9 rows")
        store.record(Trial(variant, spec.problem({"rows": 9}), "k" * 64, elsewhere, Environment()))
        parted = Outcome(Stage.COMPILE, Status.OK, facts=Values(footprint_disagreement="smem: declared 1, traced 2"))
        store.record(Trial(variant, spec.static(problem), "k" * 64, parted, Environment()))
    done = tunekit("explain", scale, "-p", "rows=8", "--variant", variant.id, "--db", str(tmp_path / "t.db"))
    assert "compile: compile_timeout (trace 0.50 s, mlir 5.00 s; peak 256 MiB)" in done.out
    assert "mlir: over 5 s" in done.out
    assert "readings disagree: smem: declared 1, traced 2" in done.out
    assert "wrong for 9 rows" not in done.out, "another problem's outcome is no part of this one's story"


def test_explain_tells_only_of_the_problem_asked_for(tunekit, scale, tmp_path):
    """A compile for other static axes says nothing of this problem."""
    from tunekit import space
    from tunekit.arch import parse_arch
    from tunekit.model import Environment, Values
    from tunekit.spec import load_spec
    from tunekit.store.database import Store
    from tunekit.trials import Outcome, Stage, Status, Trial

    spec = load_spec(scale)
    small, large = (spec.problem({"rows": 8, "cols": cols}) for cols in (64, 128))
    variant = space.expand(spec, parse_arch("host"), small).variants[0]
    with Store.open(tmp_path / "t.db") as store:
        outcome = Outcome(Stage.COMPILE, Status.OK)
        store.record(Trial(variant, spec.static(small), "k" * 64, outcome, Environment(cutlass_dsl="4.8.1")))
        figures = Values(cosine=0.999998, relative_norm=2e-3, max_abs_error=1e-3, rounding_ratio=0.98)
        outcome = Outcome(Stage.VERIFY, Status.OK, facts=figures)
        store.record(Trial(variant, small, "k" * 64, outcome, Environment(cutlass_dsl="4.8.1")))

    def told(problem) -> str:
        words = ["--variant", variant.id, "--db", str(tmp_path / "t.db"), "-p", *str(problem).split()]
        return tunekit("explain", scale, "--arch", "host", *words).out

    of_small, of_large = told(small), told(large)
    assert "compile: ok" in of_small and "verify: ok" in of_small
    figures = "cosine 0.99999800, relative norm error 2.00e-03, 0.98 times the rounded oracle's, largest error 1.00e-03"
    assert of_small.count(figures) == 1
    assert "compile: ok" not in of_large and "stored outcomes: none" in of_large


@pytest.mark.parametrize("group", [[], ["db"], ["check"]], ids=" ".join)
def test_a_group_alone_prints_its_help_and_has_status_2(tunekit, group):
    done = tunekit(*group)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"Usage: {' '.join(['tunekit', *group])}")
    assert "..." not in done.err.split("Commands:")[1], "a line is cut off"
    assert "(see" not in done.err


def test_best_says_how_to_compile_what_it_would_pick(tunekit, scale):
    done = tunekit("best", scale, "-p", "rows=8")
    (line,) = (line for line in done.out.splitlines() if "artifact" in line and "none yet: " in line)
    again = shlex.split(line.partition("none yet: tunekit ")[2])
    assert again[0] == "compile" and tunekit(*again).status == 0
    assert "none yet" not in tunekit("best", scale, "-p", "rows=8").out


def test_the_environment_as_json(tunekit, tmp_path):
    pytest.importorskip("tunekit.jobs")
    done = tunekit("env", "--json")
    assert done.status == 0
    shown = json.loads(done.out)
    assert shown["environment"]["python"] and shown["workers"] >= 1 and shown["limits"]["run_s"] > 0
    assert shown["database"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swep"], "no command 'swep'; did you mean sweep?"),
        (["list", "fmha2"], "unknown spec 'fmha2'"),
        (["list", "./none.py"], "no spec file none.py"),
        (["list", "SPEC", "--arch", "sm_100"], "unknown architecture 'sm_100'; did you mean sm_100a?"),
        (["list", "SPEC", "--arch", "sm_90a"], "can't run on sm_90a: loop needs host"),
        (["list", "SPEC", "--implementation", "lop"], "unknown implementation 'lop'; did you mean loop?"),
        (["explain", "SPEC", "--variant", "zzz"], "no variant id begins with 'zzz' for this problem"),
        (["explain", "SPEC", "--tunables", "unrol=1"], "unknown tunable 'unrol'; did you mean unroll?"),
        (["explain", "SPEC", "--tunables", "unroll=3", "delay_us=0"], "unroll=3 lies outside its space (1, 2, 4, 8)"),
        (["explain", "SPEC", "--tunables", "unroll=1"], "leaves out delay_us"),
        (["sweep", "SPEC", "--budget", "soon"], "'soon' is no positive time"),
        (["sweep", "SPEC", "--budget", "0"], "at least 1"),
        (["sweep", "SPEC", "--compile-timeout", "-3"], "'-3' is no positive time"),
        (["sweep", "SPEC", "--memory-limit", "lots"], "'lots' is no amount of memory"),
        (["sweep", "SPEC", "--jobs", "0"], "0 is not in the range"),
        (["sweep", "SPEC", "--search", "magic"], "'magic' is not one of"),
        (["sweep"], "Missing argument 'SPEC'"),
        (["list", "--nope"], "No such option"),
        (["list", "--problem", "rows=8"], "are about one spec: name it"),
        (["probe", "SPEC", "--compile", "--declared"], "not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_status_2(tunekit, scale, arguments, said):
    done = tunekit(*(scale if word == "SPEC" else word for word in arguments))
    assert (done.status, done.out) == (2, "")
    assert said.lower() in done.err.lower()
    assert done.err.count("\n") == 1


def test_a_bad_environment_variable_is_named(tunekit, scale, monkeypatch):
    monkeypatch.setenv("TUNEKIT_COMPILE_TIMEOUT", "soon")
    done = tunekit("best", scale, "-p", "rows=8")
    assert done.status == 2 and "TUNEKIT_COMPILE_TIMEOUT='soon'" in done.err


def test_a_malformed_spec_is_named_with_its_line(tunekit, tmp_path):
    """Case 68, as the command line shows it."""
    path = tmp_path / "bad.py"
    path.write_text("from tunekit.spec import Tunable\n\nT = Tunable('tile', [])\n")
    done = tunekit("list", str(path))
    assert (done.status, done.err) == (2, f"tunekit: {path}:3: field 'tile': has no values\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5s", 1.5), ("5m", 300.0), ("2h", 7200.0), ("250ms", 0.25), ("9999999999h", LONGEST_S)],
)
def test_times(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize(("text", "size"), [("512", 2**29), ("512MiB", 2**29), ("4GiB", 2**32), ("1.5g", 3 * 2**29)])
def test_amounts_of_memory(text, size):
    assert memory(text) == size


def test_budgets():
    assert (budget("40"), budget("10m"), budget("1.5s")) == ("40", "600s", "1.5s")


def test_a_reader_that_stops_early_causes_no_traceback(scale):
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    command = f"{sys.executable} -m tunekit list {scale} | true"
    done = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_full_disk_is_one_line(scale, flags):
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tunekit", "list", scale, *flags]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=root, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "tunekit: can't write the result: No space left on device\n"


NEVER = """
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tunable

SPEC = KernelSpec(
    name="never",
    version=1,
    axes=(Axis("n", default=4),),
    signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
    implementations=(
        Implementation(
            "nope",
            {"host"},
            (Tunable("a", (1, 2)),),
            lambda b: "",
            {"a": 1},
            constraints=(Constraint("forbids", "nothing is allowed", lambda v: False),),
            backend="host",
        ),
    ),
    reference=lambda problem, inputs: inputs,
)
"""


@pytest.mark.parametrize(
    ("command", "status"), [("best", 1), ("sweep", 2), ("compile", 2), ("list", 0), ("explain", 0), ("probe", 0)]
)
def test_where_nothing_is_valid_the_constraint_is_blamed(tunekit, tmp_path, command, status):
    """Zero valid variants end in seconds, with the constraint's name; Case 57 for `best`."""
    (tmp_path / "never.py").write_text(NEVER)
    done = tunekit(command, str(tmp_path / "never.py"))
    assert done.status == status
    assert "Traceback" not in done.err
    assert "forbids" in done.out + done.err or "tunekit explain says why" in done.out


def test_a_place_that_no_file_system_takes_is_one_line(shell, scale):
    done = shell("-m", "tunekit", "sweep", scale, "-p", "rows=8", TUNEKIT_CACHE="/tmp/" + "d" * 300)
    assert (done.status, done.out) == (2, "")
    assert "File name too long" in done.err and done.err.count("\n") == 1
