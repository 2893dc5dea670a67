"""Expansion is pure, ordered and counted, and one predicate decides everywhere (case 65)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit import space
from tunekit.arch import parse_arch
from tunekit.cli.space_view import all_points
from tunekit.errors import SpecError, UserError
from tunekit.model import Footprint, Values
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tunable, load_spec

HOST = parse_arch("host")


def make_spec(tunables, constraints=(), footprint=None, defaults=None, requires=frozenset({"host"}), workspace=None):
    knobs = tuple(Tunable(name, values) for name, values in tunables.items())
    return KernelSpec(
        name="toy",
        version=1,
        axes=(Axis("n"),),
        signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
        implementations=(
            Implementation(
                name="toy_host",
                requires=requires,
                tunables=knobs,
                build=lambda b: "",
                defaults=defaults or ({knob.name: knob.values[0] for knob in knobs},),
                constraints=constraints,
                footprint=footprint,
                backend="host",
                workspace=workspace,
            ),
        ),
        reference=lambda problem, inputs: inputs,
    )


def test_all_variants_in_the_order_of_the_declaration():
    spec = make_spec({"a": (3, 1), "b": ("x", "y")})
    expansion = space.expand(spec, HOST, Values(n=1))
    assert [str(v.tunables) for v in expansion.variants] == ["a=3 b=x", "a=3 b=y", "a=1 b=x", "a=1 b=y"]
    assert (expansion.total, expansion.removed, expansion.blame()) == (4, {}, "4 variants, none dropped")


def test_each_removed_variant_counts_for_the_first_constraint_it_breaks(valid, write):
    spec = load_spec(str(write(valid)))
    expansion = space.expand(spec, HOST, spec.problem({"rows": 1, "cols": 64}))
    assert expansion.removed == {"one_stage_if_vector": 6}
    assert expansion.blame() == "12 of 18 variants; dropped: 6 by one_stage_if_vector"


def test_no_variant_left_names_the_constraint_to_blame():
    never = Constraint("never", "nothing is ever allowed", lambda v: False)
    expansion = space.expand(make_spec({"a": (1, 2, 3)}, (never,)), HOST, Values(n=1))
    assert expansion.variants == ()
    assert expansion.blame() == "0 of 3 variants; dropped: 3 by never"


@pytest.mark.parametrize("predicate", [lambda v: v.misspelt > 1, lambda v: v.a / 0, lambda v: v["b"] > 1])
def test_a_constraint_that_fails_is_the_specs_mistake_and_is_named(predicate):
    spec = make_spec({"a": (1, 2)}, (Constraint("odd", "must be odd", predicate),))
    with pytest.raises(SpecError, match="constraint odd fails for n=1"):
        space.expand(spec, HOST, Values(n=1))


def test_a_footprint_that_fails_is_the_specs_mistake():
    spec = make_spec({"a": (1,)}, footprint=lambda v, arch: Footprint(smem_bytes=v.tile))
    with pytest.raises(SpecError, match="footprint fails for n=1 a=1"):
        space.default_variant(spec, HOST, Values(n=1))


def test_an_architecture_that_lacks_a_feature_is_refused_in_a_sentence():
    """Case 14: a tcgen05 implementation asked for sm_90a, sm_120a or sm_121a; sm_103a and sm_100a work."""
    spec = make_spec({"a": (1,)}, requires=frozenset({"tcgen05"}))
    for name in ("sm_90a", "sm_120a", "sm_121a"):
        with pytest.raises(UserError, match=f"needs tcgen05, which {name} has not"):
            space.expand(spec, parse_arch(name), Values(n=1))
    for name in ("sm_100a", "sm_103a"):
        assert len(space.expand(spec, parse_arch(name), Values(n=1)).variants) == 1


def test_a_kernel_for_gpus_that_requires_nothing_is_not_for_the_host():
    toy = make_spec({"a": (1,)}, requires=frozenset())
    (plain,) = toy.implementations
    for_gpus = dataclasses.replace(plain, backend="cutedsl")
    assert plain.unsupported(HOST) is None and for_gpus.unsupported(parse_arch("sm_120a")) is None
    assert for_gpus.unsupported(HOST) == "toy_host is for the cutedsl backend, which can't build for host"


@pytest.mark.parametrize(("need", "fits"), [(232_448, True), (232_449, False)])
def test_shared_memory_at_the_limit_fits_and_one_byte_more_does_not(need, fits):
    """Case 12: both numbers are in the message."""
    misfit = Footprint(smem_bytes=need).misfit(parse_arch("sm_100a"))
    assert misfit == (None if fits else "smem 232449 B > 232448 B (sm_100a)")


def test_tensor_memory_over_the_limit_says_both_numbers():
    """Case 12: 544 columns."""
    assert Footprint(tmem_columns=544).misfit(parse_arch("sm_100a")) == "tmem 544 columns > 512 columns (sm_100a)"
    assert Footprint(tmem_columns=512).misfit(parse_arch("sm_100a")) is None


def test_the_default_is_the_first_one_that_is_allowed_and_fits():
    small = Constraint("small", "a must be below 4", lambda v: v.a < 4)
    spec = make_spec(
        {"a": (1, 2, 4)},
        (small,),
        footprint=lambda v, arch: Footprint(threads=2048 if v.a == 2 else 32),
        defaults=({"a": 4}, {"a": 2}, {"a": 1}),
    )
    variant = space.default_variant(spec, HOST, Values(n=1))
    assert variant is not None and variant.tunables == Values(a=1)


values = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)
rules = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abcn"), st.integers(1, 4)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(a=values, b=values, c=values, rules=rules, n=st.integers(1, 9), limit=st.integers(0, 12))
def test_list_sweep_probe_and_dispatch_agree_on_the_valid_set(a, b, c, rules, n, limit):
    """Case 65: what expansion yields, what list shows, what dispatch may serve, and brute force: one set."""
    constraints = tuple(
        Constraint(f"rule{i}", "a rule", lambda v, x=x, y=y, m=m: (v[x] + v[y]) % m != 1)
        for i, (x, y, m) in enumerate(rules)
    )
    spec = make_spec(
        {"a": a, "b": b, "c": c}, constraints, lambda v, arch: Footprint(threads=1024 + v.a + v.b + v.c - limit)
    )
    problem = spec.problem({"n": n})
    brute = [
        Values(a=x, b=y, c=z)
        for x, y, z in itertools.product(a, b, c)
        if all(constraint.holds(Values(n=n, a=x, b=y, c=z)) for constraint in constraints)
    ]
    expansion = space.expand(spec, HOST, problem)
    assert [v.tunables for v in expansion.variants] == brute
    assert expansion.total == len(a) * len(b) * len(c) == len(brute) + sum(expansion.removed.values())
    assert len({v.id for v in expansion.variants}) == len(brute)
    points = all_points(spec, HOST, problem)
    assert [p.variant for p in points if p.dropped_by is None] == list(expansion.variants)
    assert all(p.fits == (sum(p.variant.tunables.values()) <= limit) for p in points if p.dropped_by is None)
    assert all((space.serves(spec, p.variant, problem) is None) == (p.dropped_by is None) for p in points)
    default = space.default_variant(spec, HOST, problem)
    assert default is None or default in expansion.variants


def raises(error):
    def function(*arguments):
        raise error

    return function


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(7), RecursionError("deep"), OSError("no file")])
def test_whatever_a_specs_own_function_raises_is_its_mistake(error):
    spec = make_spec({"a": (1,)}, constraints=(Constraint("c", "why", raises(error)),))
    with pytest.raises(SpecError, match=f"constraint c fails for .*{type(error).__name__}"):
        space.expand(spec, HOST, Values(n=1))
    spec = make_spec({"a": (1,)}, footprint=raises(error))
    with pytest.raises(SpecError, match=f"footprint fails for .*{type(error).__name__}"):
        space.default_variant(spec, HOST, Values(n=1))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "it returned NoneType, not a Footprint"),
        ("1 KiB", "it returned str, not a Footprint"),
        (Footprint(smem_bytes=-1), "smem_bytes is -1, not an int from 0"),
        (Footprint(threads=1.5), "threads is 1.5, not an int from 0"),
        (Footprint(threads=True), "threads is True, not an int from 0"),
    ],
)
def test_a_footprint_that_is_none(returned, said):
    spec = make_spec({"a": (1,)}, footprint=lambda v, arch: returned)
    with pytest.raises(SpecError, match=said):
        space.default_variant(spec, HOST, Values(n=1))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "it is None, not an int from 0"),
        (-1, "it is -1, not an int from 0"),
        (1.0, "it is 1.0, not an int from 0"),
        (True, "it is True, not an int from 0"),
    ],
)
def test_a_workspace_is_a_number_of_elements(returned, said):
    spec = make_spec({"a": (1,)}, workspace=lambda v, arch: returned)
    (variant,) = space.expand(spec, HOST, Values(n=1)).variants
    with pytest.raises(SpecError, match=f"workspace fails for n=1 a=1: {said}"):
        space.workspace(spec, variant, Values(n=1))


def test_a_workspace_depends_on_problem_tunables_and_architecture():
    spec = make_spec({"a": (3,)}, workspace=lambda v, arch: v.n * v.a if arch.name == "host" else 0)
    (variant,) = space.expand(spec, HOST, Values(n=5)).variants
    assert space.workspace(spec, variant, Values(n=5)) == 15
    spec = make_spec({"a": (3,)})
    assert space.workspace(spec, variant, Values(n=5)) == 0
    with pytest.raises(SpecError, match="workspace fails for n=5 a=3: ZeroDivisionError"):
        space.workspace(make_spec({"a": (3,)}, workspace=lambda v, arch: 1 // 0), variant, Values(n=5))


def test_a_workspace_too_large_to_pass_fits_nowhere():
    """At the limit it fits; past it neither a default nor a recorded winner serves, and both numbers are said."""
    spec = make_spec({"a": (2, 1)}, workspace=lambda v, arch: v.n * v.a, defaults=({"a": 2}, {"a": 1}))
    (implementation,) = spec.implementations
    half = Values(n=2**30)
    assert space.misfit(implementation, HOST, half, Values(a=1)) is None
    assert space.misfit(implementation, HOST, half, Values(a=2)) == (
        "workspace 2147483648 elements > 2147483647 (an int32 size)"
    )
    assert space.default_variant(spec, HOST, half).tunables.a == 1


def test_a_constraint_without_a_return_drops_nothing_silently():
    spec = make_spec({"a": (1,)}, constraints=(Constraint("c", "why", lambda v: None),))
    with pytest.raises(SpecError, match=r"constraint c fails for .*it returned None"):
        space.expand(spec, HOST, Values(n=1))


def test_a_space_too_large_to_list_is_refused_at_once():
    spec = make_spec({name: range(30) for name in "abcdefgh"})
    with pytest.raises(SpecError, match=r"656100000000 combinations of tunables \(a 30 x b 30 x"):
        space.expand(spec, HOST, Values(n=1))
