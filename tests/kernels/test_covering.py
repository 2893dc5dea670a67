"""Choosing kernels that meet every value, on a toy spec whose constraints can be counted by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.kernels.covering import Space, choose
from tunekit.arch import ARCHES
from tunekit.model import Footprint
from tunekit.space import broken
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tunable


def toy(*constraints: Constraint) -> KernelSpec:
    return KernelSpec(
        name="toy",
        version=1,
        axes=(
            Axis("n", default=64),
            Axis("width", values=(64, 128, 256), static=True),
            Axis("listed", kind="flag", static=True, default=False),
            Axis("entries", minimum=0, default=0),
            Axis("page", minimum=0, static=True, default=0),
        ),
        signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
        implementations=(
            Implementation(
                name="toy",
                requires={"tma"},
                tunables=(
                    Tunable("tile", (64, 128, 256)),
                    Tunable("stages", (1, 2, 3, 4)),
                    Tunable("packed", (False, True)),
                ),
                defaults=({"tile": 64, "stages": 1, "packed": False},),
                constraints=(
                    Constraint("divides", "tile must divide width", lambda v: v.width % v.tile == 0),
                    Constraint("packed_pages", "only pages are packed", lambda v: not v.packed or v["page"] > 0),
                    *constraints,
                ),
                footprint=lambda v, arch: Footprint(smem_bytes=v.tile * v.stages * 256),
                build=lambda b: None,
            ),
        ),
        constraints=(
            Constraint("list", "listed iff there are entries", lambda p: p.listed == (p.entries > 0)),
            Constraint("page_size", "a page has 64 keys", lambda p: p.page in (0, 64)),
        ),
        reference=lambda problem, inputs: {},
        examples=({"width": 128}, {"width": 64, "page": 64}),
    )


def space(spec: KernelSpec, seed: int = 0, **more: Any) -> Space:
    problems = [spec.problem(example) for example in spec.examples]
    return Space(spec, spec.implementation("toy"), ARCHES["sm_90a"], problems, seed, **more)


@pytest.mark.parametrize("seed", range(5))
def test_every_value_is_met_by_valid_kernels(seed: int) -> None:
    """Also what two changes at once are needed for: `listed` needs entries, `packed` a page."""
    spec = toy()
    found = choose(space(spec, seed), 0)
    assert not found.barred
    for factor, values in space(spec).factors.items():
        assert {({**problem, **variant.tunables})[factor] for problem, variant in found.kernels} == set(values)
    for problem, variant in found.kernels:
        assert spec.problem({**problem}) == problem
        assert broken(spec.implementation("toy"), problem, variant.tunables) is None
        assert variant.tunables.tile * variant.tunables.stages * 256 <= 232_448, "what doesn't fit is no kernel"
    assert found == choose(space(spec, seed), 0), "the same for the same seed"


def test_pairs_are_met_as_far_as_the_count_goes() -> None:
    few, many = (choose(space(toy()), count) for count in (8, 40))
    assert len(few.kernels) >= 8 and few.pairs < many.pairs
    impossible = sum(
        [
            len([1 for width, tile in itertools.product((64, 128, 256), repeat=2) if width % tile]),
            1,  # packed without a page
            1,  # tile=256 stages=4 is over the budget
        ]
    )
    assert many.pairs == many.all_pairs - impossible
    assert len(many.kernels) < 40, "no more kernels than there are pairs for"


def test_a_value_that_nothing_can_have_is_told_with_its_rule() -> None:
    never = Constraint("not_yet_listed", "lists are yet to come", lambda v: not v.listed)
    found = choose(space(toy(never)), 0)
    assert list(found.barred) == [("listed", True)]
    assert "not_yet_listed" in found.barred["listed", True]


def test_problems_alone() -> None:
    """Every static value, and of the tunables what comes along."""
    found = choose(space(toy(), over_tunables=False), 0)
    assert not found.barred
    assert {problem.width for problem, _ in found.kernels} == {64, 128, 256}
    assert len(found.kernels) <= 4
