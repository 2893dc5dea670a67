"""What a build function closes over is part of its identity (case 18), and what can't matter is not."""

from __future__ import annotations

import functools
import importlib.util
import sys
import textwrap
import time

import pytest

from tunekit.identity import fingerprint, source_closure


def module(path, text):
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def factory(tmp_path):
    """``make(thing)`` returns a build function that closes over the thing."""
    text = """
        def make(thing, *, by_default=None):
            def build(b, option=by_default):
                return thing
            return build
    """
    return module(tmp_path / "factory.py", text).make


def test_two_specs_from_a_factory_have_two_identities(factory):
    """Case 18: the same source closing over another N is another kernel."""
    assert fingerprint(factory(1)) != fingerprint(factory(2))
    assert fingerprint(factory(1)) == fingerprint(factory(1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ("1", 1),
        ([1, 2], [2, 1]),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (None, 0),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (int, float),
        (len, max),
        ([[1]], [[2]]),
    ],
    ids=str,
)
def test_closed_over_values_tell(factory, one, other):
    """Case 18: whatever is closed over, builtin classes and functions too."""
    assert fingerprint(factory(one)) == fingerprint(factory(one))
    assert fingerprint(factory(one)) != fingerprint(factory(other))


def test_defaults_of_arguments_tell(factory):
    assert fingerprint(factory(1, by_default=1)) != fingerprint(factory(1, by_default=2))


def test_the_class_of_a_closed_over_object_tells(factory, tmp_path):
    """Case 16: the object's class lies in a file that the build function's own file does not import."""
    path = tmp_path / "body.py"
    source = """
        class Base:
            def run(self):
                return 1

        class Body(Base):
            def __init__(self, n):
                self.n = n
    """
    first = fingerprint(factory(module(path, source).Body(4)))
    assert first == fingerprint(factory(module(path, source).Body(4)))
    assert first != fingerprint(factory(module(path, source).Body(5)))
    assert first != fingerprint(factory(module(path, source.replace("return 1", "return 2")).Body(4)))


def test_addresses_never_tell(factory):
    """An object whose repr holds its address has the same identity in every process."""

    class Slotted:
        __slots__ = ()

    assert fingerprint(factory(Slotted())) == fingerprint(factory(Slotted()))
    assert fingerprint(factory(object())) == fingerprint(factory(object()))


def test_a_function_that_closes_over_itself_ends(factory):
    def build(b):
        return build(b)

    assert fingerprint(build) == fingerprint(build)


def test_two_files_of_one_name_both_count(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name / "common").mkdir(parents=True)
        (tmp_path / name / "common" / f"{name}.py").write_text(f"from shared_{name} import X\n")
        (tmp_path / name / f"shared_{name}.py").write_text("X = 1\n")
    (tmp_path / "one" / "same").mkdir()
    (tmp_path / "two" / "same").mkdir()
    (tmp_path / "one" / "same" / "n.py").write_text("A = 1\n")
    (tmp_path / "two" / "same" / "n.py").write_text("B = 1\n")
    (tmp_path / "one" / "first.py").write_text("from .same import n\n")
    (tmp_path / "two" / "second.py").write_text("from .same import n\n")
    main = tmp_path / "main" / "main.py"
    main.parent.mkdir()
    main.write_text("import first, second\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "two"), *sys.path])
    before = source_closure(main, {})
    (tmp_path / "two" / "same" / "n.py").write_text("B = 2\n")
    assert source_closure(main, {}) != before
    (tmp_path / "two" / "same" / "n.py").write_text("B = 1\n")
    (tmp_path / "one" / "same" / "n.py").write_text("A = 2\n")
    assert source_closure(main, {}) != before


def test_installed_packages_count_by_version_not_by_content(tmp_path, factory):
    """A class from an installed package does not drag that package's thousands of files into the key."""
    import click

    begun = time.perf_counter()
    fingerprint(factory(click.Group("g")))
    assert time.perf_counter() - begun < 2.0
    path = tmp_path / "k.py"
    path.write_text("import click\nimport json\nfrom tunekit.spec import Axis\n")
    assert list(source_closure(path, {})) == ["k.py"]
