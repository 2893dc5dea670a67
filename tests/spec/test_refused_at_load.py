"""Case 68: a malformed spec is refused when it is loaded, with file, line and field."""

from __future__ import annotations

import pytest

from tunekit.errors import SpecError, UserError
from tunekit.spec import load_spec

# (what is wrong, text to replace, by, the field named, part of the message)
MALFORMED = [
    ("an empty list", "[16, 32, 64]", "[]", "tile", "has no values"),
    ("duplicates", "[1, 2, 3]", "[1, 2, 2]", "stages", "lists 2 twice"),
    ("mixed types", "[1, 2, 3]", "[1, 2, '3']", "stages", "mixes int and str"),
    ("an int among flags", "[False, True]", "[False, 1]", "vector", "mixes bool and int"),
    ("an unhashable value", "[1, 2, 3]", "[1, [2]]", "stages", "[2] is list"),
    ("a set, which has no order", "[1, 2, 3]", "{1, 2, 3}", "stages", "must be a list, not set"),
    ("a string for a list", "[1, 2, 3]", "'123'", "stages", "must be a list, not str"),
    ("NaN", "[1, 2, 3]", "[1.0, float('nan')]", "stages", "nan is not finite"),
    ("None among values", "[1, 2, 3]", "[1, None]", "stages", "None is NoneType"),
    ("a misspelt field", "tolerance={", "tolerence={", "tolerence", "did you mean tolerance"),
    ("a misspelt tunable field", '"stages", [1, 2, 3]', '"stages", valeus=[1]', "valeus", "did you mean values"),
    ("a misspelt axis field", "minimum=1", "minimun=1", "minimun", "did you mean minimum"),
    ("an axis of no kind", 'kind="flag"', 'kind="bool"', "fast", "must be dim, dtype, flag or name"),
    ("a name axis without values", 'kind="flag"', 'kind="name"', "fast", "a name axis must list its values"),
    ("a name with a comma", 'kind="flag", static=True, default=False', 'kind="name", values=("a,b",)', "fast",
     "'a,b' is no word"),
    ("a number for a name", 'kind="flag", static=True, default=False', 'kind="name", values=(1,)', "fast", "no word"),
    ("edges of a flag", 'kind="flag"', 'kind="flag", edges=(1,)', "fast", "has edges, but it is a flag"),
    ("a dtype axis without values", '"dtype", values=("float32",)', '"dtype"', "dtype", "list its values"),
    ("a default outside an axis", 'default="float32"', 'default="float16"', "dtype", "not allowed"),
    ("an unknown dtype", '"float32",), default="float32"', '"float33",), default="float33"', "dtype", "float33"),
    ("a lone surrogate", "[1, 2, 3]", "['\\ud800']", "stages", "can't be printed"),
    ("an escape sequence", "[1, 2, 3]", "['\\x1b[31m']", "stages", "can't be printed"),
    ("a bad bucket", 'bucket="pow2"', 'bucket="pow3"', "rows", "exact or pow2"),
    ("a version of zero", "version=1", "version=0", "version", "an int from 1"),
    ("a version that is text", "version=1", "version='1'", "version", "an int from 1"),
    ("a name with a space", 'name="toy"', 'name="my toy"', "my toy", "not an identifier"),
    ("an unknown feature", 'requires={"host"}', 'requires={"tcgen6"}', "requires", "unknown feature tcgen6"),
    ("no implementation", "implementations=(", "implementations=()and(", "implementations", "is empty"),
    ("a default outside the space", '"stages": 1', '"stages": 9', "defaults", "stages=9 lies outside the space"),
    ("True given for 1", '"stages": 1', '"stages": True', "defaults", "stages=True lies outside the space"),
    ("a default that leaves one out", '"stages": 1, ', "", "defaults", "leaves out stages"),
    ("a default with a misspelt tunable", '"stages": 1', '"stage": 1', "defaults", "did you mean stages"),
    ("a tunable named twice", 'Tunable("stages"', 'Tunable("tile"', "tunables", "names tile twice"),
    ("a tunable with an axis's name", 'Tunable("stages", [1, 2, 3])', 'Tunable("rows", [1])', None, "rows"),
    ("an unknown axis in a shape", '("x", ("rows", "cols")', '("x", ("rows", "colls")', "x", "did you mean cols"),
    ("a flag in a shape", '("x", ("rows", "cols")', '("x", ("rows", "fast")', "x", "unknown axis 'fast'"),
    ("a dim of another kind", '("x", ("rows", "cols")', '("x", ("rows * 2", "cols")', "x", "'rows * 2' is no dim"),
    ("a number that is no size", '("x", ("rows", "cols")', '("x", ("rows", 2.0)', "x", "shape holds 2.0"),
    ("a shape that is a name", '("x", ("rows", "cols")', '("x", "rows"', "x", "shape is 'rows'"),
    ("a form without a predicate", '"cols"), "dtype")', '"cols"), "dtype", forms=(("rows",),))', "x",
     "a form is a pair"),
    ("an unknown axis in a form", '"cols"), "dtype")', '"cols"), "dtype", forms=((bool, ("rosw",)),))', "x",
     "did you mean rows"),
    ("an argument with an axis's name", 'TensorArg("x"', 'TensorArg("rows"', "signature", "the name of an axis"),
    ("a workspace that is no function", "build=build,", "build=build, workspace=64,", "workspace", "a function"),
    ("work that is no function", "build=build,", "build=build, work=64,", "work", "work must be a function"),
    ("an unknown dtype in the signature", '"cols"), "dtype")', '"cols"), "dtyp")', "x", "did you mean dtype"),
    ("a positive that is no bool", "positive=True", "positive=1", "scale", "positive is 1; it must be a bool"),
    ("no output", 'role="output"', 'role="input"', "signature", "has no output"),
    ("a bad role", 'role="output"', 'role="out"', "y", "input, output or inout"),
    ("a tolerance for no output", 'tolerance={"y"', 'tolerance={"z"', "tolerance", "unknown output 'z'"),
    ("an impossible tolerance", "cosine=0.999", "cosine=1.5", "tolerance", "cosine must lie in (0, 1]"),
    ("a rounding gate without the rounded oracle", "cosine=0.999", "cosine=0.999, rounding=1.25", "tolerance",
     "y has rounding=1.25, and the spec has no rounded oracle"),
    ("a rounding gate that nothing passes", "cosine=0.999", "cosine=0.999, rounding=0.9", "tolerance",
     "no kernel beats 1"),
    ("a negative relative bound", "cosine=0.999", "cosine=0.999, relative=-1e-4", "tolerance", "relative is -0.0001"),
    ("a rounded oracle that is no function", "tolerance={", "rounded=1, tolerance={", "rounded", "must be a function"),
    ("an example that leaves out an axis", '"rows": 7, ', "", "examples", "the problem needs rows"),
    ("an example outside an axis", '"cols": 64}', '"cols": 65}', "examples", "cols: 65 is not allowed"),
    ("a constraint without a reason", '"the tile must divide cols"', '""', "tile_divides_cols", "a reason"),
    ("two constraints of one name", '"one_stage_if_vector"', '"tile_divides_cols"', "constraints", "twice"),
    ("a reference that is no function", "reference=lambda problem, inputs: {\"y\": inputs[\"x\"]}", "reference=None",
     "reference", "must be a function"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "field", "message"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_refused_with_file_line_and_field(valid, write, old, new, field, message):
    """Case 68: one line with the file, a line inside the mistaken declaration, the field, and what is wrong."""
    assert old in valid
    text = valid.replace(old, new, 1)
    path = write(text)
    with pytest.raises(SpecError) as caught:
        load_spec(str(path))
    said = str(caught.value)
    assert message in said
    assert "\n" not in said
    place, _, _ = said.partition(": ")
    file, _, line = place.rpartition(":")
    assert file == str(path)
    if field is not None:
        assert f"field '{field}'" in said
        changed = valid[: valid.index(old)].count("\n") + 1
        named = text.splitlines()[int(line) - 1].strip()
        # The changed line, or the one that opens the group whose members contradict each other.
        assert abs(int(line) - changed) <= 1 or named.startswith((f"{field}=", f'"{field}"'))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("SPEC = (\n", 1, "never closed"),
        ("import json\nraise RuntimeError('broken on import')\n", 2, "RuntimeError: broken on import"),
        ("import json\n\nimport no_such_module_anywhere\n", 3, "no_such_module_anywhere"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("x = 1\0\n", 1, "null bytes"),
        ("from tunekit.spec import Axis\n\nAxis()\n", 3, "Axis lacks 1 required positional argument: 'name'"),
        (
            "class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\n\n\nraise Odd\n",
            6,
            "Odd: (its message fails",
        ),
    ],
)
def test_a_file_that_does_not_run_names_its_line(write, text, line, message):
    path = write(text, "broken.py")
    with pytest.raises(SpecError) as caught:
        load_spec(str(path))
    assert message in str(caught.value)
    assert f"{path}:{line}" in str(caught.value)


def test_the_valid_file_loads(valid, write):
    spec = load_spec(str(write(valid)))
    assert (spec.name, [a.name for a in spec.axes]) == ("toy", ["rows", "cols", "dtype", "fast"])


def test_a_corrected_file_loads_in_the_same_process(valid, write):
    path = write(valid.replace("[1, 2, 3]", "[]"))
    with pytest.raises(SpecError):
        load_spec(str(path))
    write(valid)
    assert load_spec(str(path)).name == "toy"


def test_what_a_file_prints_is_no_result(valid, write, capsys):
    path = write("print('hello')\n" + valid)
    assert load_spec(str(path)).name == "toy"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_many_values_are_checked_in_no_time(valid, write):
    path = write(valid.replace("[1, 2, 3]", "range(1, 100_001)"))
    assert len(load_spec(str(path)).implementations[0].tunables[1].values) == 100_000


@pytest.mark.parametrize("name", ["a" * 5000, "./" + "a" * 5000 + ".py", "a\0b"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(UserError, match=r"unknown spec|no spec file"):
        load_spec(name)


def test_a_missing_file_and_an_unknown_name_are_the_callers_mistake(tmp_path):
    with pytest.raises(UserError, match="no spec file"):
        load_spec(str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="unknown spec 'nonesuch'"):
        load_spec("nonesuch")


def test_several_specs_in_a_file_need_a_name(valid, write):
    path = write(valid + "\nimport dataclasses\nOTHER = dataclasses.replace(SPEC, name='other')\n")
    with pytest.raises(UserError, match="holds 2 specs"):
        load_spec(str(path))
    assert load_spec(f"{path}:other").name == "other"
    with pytest.raises(UserError, match="has no spec 'third'"):
        load_spec(f"{path}:third")


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"rows": 0, "cols": 64}, "rows", "below the minimum 1"),
        ({"rows": True, "cols": 64}, "rows", "True is bool, not int"),
        ({"rows": 2.0, "cols": 64}, "rows", "2.0 is float, not int"),
        ({"rows": 2, "cols": 64, "fast": 1}, "fast", "1 is int, not bool"),
        ({"rows": 2, "cols": 64, "row": 1}, None, "did you mean rows"),
        ({"cols": 64}, None, "the problem needs rows"),
    ],
)
def test_a_problem_is_checked_axis_by_axis(valid, write, given, field, message):
    spec = load_spec(str(write(valid)))
    with pytest.raises(SpecError, match=message) as caught:
        spec.problem(given)
    assert (caught.value.where, caught.value.field) == ("toy", field)
