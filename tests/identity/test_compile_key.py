"""Case 16: editing anything that the code comes from makes a new key; editing nothing, anywhere, does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.arch import ARCHES
from tunekit.backends.contract import CompileRequest
from tunekit.compiling import units
from tunekit.model import Values
from tunekit.space import default_variant
from tunekit.spec import load_spec

EDITS = {
    "the build function itself": ("kernel.py", "Scale().source() + tail()", "Scale().source() + tail() + ' '"),
    "a module constant": ("kernel.py", "WIDTH = 4", "WIDTH = 8"),
    "a helper in an imported module": ("helper.py", "width * depth()", "width + depth()"),
    "a helper two imports deep": ("deep.py", "return DEPTH", "return DEPTH + 1"),
    "a constant two imports deep": ("deep.py", "DEPTH = 2", "DEPTH = 3"),
    "a base class's method, two modules away": ("rootbase.py", "return self.body()", "return self.body() * 2"),
    "a module imported inside build": ("parts/late.py", "';'", "';;'"),
    "a package's __init__": ("parts/__init__.py", "", "X = 1"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_makes_a_new_key(tree, key_in_a_new_process, edit):
    """Case 16: each kind of edit is seen from a new process."""
    file, old, new = edit
    before = key_in_a_new_process(tree)
    text = (tree / file).read_text()
    (tree / file).write_text(text.replace(old, new, 1))
    after = key_in_a_new_process(tree)
    assert before.split()[0] == after.split()[0]  # the variant is the same, its compile is not
    assert before.split()[1] != after.split()[1]


def test_nothing_edited_is_the_same_key_everywhere(tree, tmp_path, key_in_a_new_process):
    """Case 16: other hash seeds, working directories, file times and checkouts keep the key."""
    first = key_in_a_new_process(tree, seed="1")
    assert key_in_a_new_process(tree, cwd=tree, seed="2") == first
    (tree / "unrelated.py").write_text("X = 2\n")
    (tree / "kernel.py").touch()
    assert key_in_a_new_process(tree, cwd=tmp_path, seed="3") == first
    moved = tmp_path / "moved" / "elsewhere"
    shutil.copytree(tree, moved)
    assert key_in_a_new_process(moved, cwd=tmp_path, seed="4") == first


def variant(**changes):
    fields = {"spec": "s", "version": 1, "implementation": "i", "arch": "sm_100a"}
    return identity.variant(**{**fields, "tunables": Values(tile=1, stages=2), **changes})


def key(**changes):
    arguments = {"variant": variant(), "static": Values(d=1), "sources": "s", "options": "o", "tools": {"t": "1"}}
    return identity.compile_key(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": "t"},
        {"version": 2},
        {"implementation": "j"},
        {"arch": "sm_90a"},
        {"tunables": Values(tile=1, stages=3)},
        {"tunables": Values(tile=True, stages=2)},
        {"tunables": Values(tile=1.0, stages=2)},
        {"tunables": Values(tile=1)},
        {"tunables": Values(tile=2, stages=1)},
    ],
    ids=str,
)
def test_every_field_is_in_the_variants_id(changes):
    assert variant(**changes).id != variant().id
    assert key(variant=variant(**changes)) != key()


@pytest.mark.parametrize(
    "changes",
    [{"static": Values(d=2)}, {"static": Values(d=True)}, {"sources": "t"}, {"options": "p"}, {"tools": {"t": "2"}}],
    ids=str,
)
def test_everything_that_changes_the_code_is_in_the_key(changes):
    assert key(**changes) != key()


def test_the_order_of_tunables_does_not_count():
    assert variant(tunables=Values(stages=2, tile=1)).id == variant().id


def test_options_of_one_compile_make_a_key_of_its_own():
    """Line info asked for on the command line: another artifact, not the one that a sweep measures."""
    spec = load_spec("fmha")
    problem = spec.problem(spec.examples[0])
    chosen = default_variant(spec, ARCHES["sm_100a"], problem)
    plain, again, lines = (
        units(spec, "fmha", problem, [chosen], options)[0] for options in ("", "", "--generate-line-info")
    )
    assert plain.key == again.key != lines.key
    assert plain.symbol != lines.symbol
    assert lines.request(Path("out")).options == "--generate-line-info"
    assert CompileRequest.from_payload(lines.request(Path("out")).to_payload()) == lines.request(Path("out"))
