"""The fallback ladder, without artifacts: which variant, at which level, in what words."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tunekit.dispatch import ladder
from tunekit.dispatch.ladder import Candidate, Miss, distance, explain_no_kernel, make_table, steps, walk
from tunekit.dispatch.lookup import present_protocols
from tunekit.environment import environment
from tunekit.measure.protocol import VERSION
from tunekit.model import Environment, Level, Values
from tunekit.spec import load_spec
from tunekit.store.shipped import shipped_winners

HERE = Environment(
    gpu="NVIDIA H200", arch="sm_90a", driver="580.1", power_limit_w=700.0, mig="off", cuda="13.0", cutlass_dsl="4.8.1"
)


def top(table, problem):
    """The first candidate of the ladder."""
    return next(step for step in steps(table, table.spec.problem(problem)) if isinstance(step, Candidate))


def levels(table, problem):
    return [(step.level, isinstance(step, Candidate)) for step in steps(table, table.spec.problem(problem))]


@pytest.fixture
def host_table(tuned):
    def build(*winners, shipped=(), protocols=None):
        return make_table(tuned.spec, "host", environment(0), winners, shipped, protocols)

    return build


def test_exact_before_bucket_before_nearest_before_shipped_before_default(tuned, host_table):
    exact = tuned.winner(tuned.variant(unroll=1), {"rows": 48})
    bucket = tuned.winner(tuned.variant(unroll=2, delay_us=0), {"rows": 64})
    near = tuned.winner(tuned.variant(unroll=4, delay_us=0), {"rows": 4096})
    shipped = tuned.winner(tuned.variant(unroll=8, delay_us=0), {"rows": 48})
    table = host_table(near, bucket, exact, shipped=[shipped])
    found = [step for step in steps(table, tuned.spec.problem({"rows": 48})) if isinstance(step, Candidate)]
    assert [step.level for step in found] == list(Level)
    assert [step.variant.tunables.unroll for step in found] == [1, 2, 4, 8, 1]
    assert "measured here" in found[0].why and "for this problem: 10 us" in found[0].why
    assert "in the same bucket, at rows=64" in found[1].why
    assert "(sizes 85.3x apart)" in found[2].why
    assert "it comes with tunekit" in found[3].why


def test_a_bucket_winner_serves_the_bucket_and_no_other(tuned, host_table):
    """Case 52: tuned at 64, asked for 48: the bucket's winner; 65 is in another bucket."""
    winner = tuned.winner(tuned.variant(unroll=4, delay_us=0), {"rows": 64})
    table = host_table(winner)
    assert (top(table, {"rows": 48}).level, top(table, {"rows": 48}).variant.id) == (Level.BUCKET, winner.variant.id)
    assert top(table, {"rows": 33}).level is Level.BUCKET
    assert top(table, {"rows": 65}).level is top(table, {"rows": 32}).level is Level.NEAREST


def test_static_axes_are_never_mixed(tuned, host_table):
    table = host_table(tuned.winner(tuned.variant(unroll=4, delay_us=0), {"rows": 64, "cols": 128}))
    assert levels(table, {"rows": 64}) == [(level, level is Level.DEFAULT) for level in Level]


def test_the_nearest_is_by_octaves_and_ours_goes_first_at_one_distance(tuned, host_table):
    far = tuned.winner(tuned.variant(unroll=1), {"rows": 16})
    near = tuned.winner(tuned.variant(unroll=2, delay_us=0), {"rows": 1024})
    strange = replace(near, variant=tuned.variant(unroll=8, delay_us=0), environment=replace(HERE))
    table = host_table(far, strange, near)
    asked = tuned.spec.problem({"rows": 200})
    found = [step.variant.tunables.unroll for step in steps(table, asked) if isinstance(step, Candidate)]
    assert found[:3] == [2, 8, 1]
    assert distance(tuned.spec, tuned.spec.problem({"rows": 16}), tuned.spec.problem({"rows": 64})) == 2.0


def test_what_follows_from_a_size_does_not_count_again():
    spec = load_spec(f"{Path(__file__).parents[1] / 'specs' / 'host_pages.py'}:host_pages")
    paged = {"cols": 8, "page": 8, "batch": 2, "s": 16}
    near, far = spec.problem(paged), spec.problem({**paged, "s": 64})
    assert distance(spec, near, far) == 2.0, "not 2 for each of s, table_pages, pages and total"
    assert distance(spec, near, spec.problem({**paged, "pages": 8})) == 1.0, "given, not derived"
    window = {"cols": 8, "s": 16, "reduce": "window"}
    assert math.isinf(distance(spec, spec.problem(window), spec.problem({**window, "left": 4}))), "-1 is no size"
    assert math.isinf(distance(spec, near, spec.problem({**paged, "reduce": "last"})))


@pytest.mark.parametrize("field", ["gpu", "driver", "power_limit_w", "mig", "cuda", "cutlass_dsl"])
def test_a_winner_from_another_environment_is_a_labelled_fallback(tuned, field):
    """Case 17: the same row with another CuTeDSL, driver, GPU or power limit is not served as if measured here."""
    other = "550.0" if field != "power_limit_w" else 500.0
    winner = tuned.winner(tuned.variant(arch="sm_90a"), {"rows": 64}, environment=replace(HERE, **{field: other}))
    table = make_table(tuned.spec, "sm_90a", HERE, [winner])
    found = [step for step in steps(table, tuned.spec.problem({"rows": 64})) if isinstance(step, Candidate)]
    assert all(step.level not in (Level.EXACT, Level.BUCKET) for step in found)


def test_the_label_says_what_differs(tuned, host_table):
    """Case 17: and the sentence has both values."""
    strange = replace(environment(0), cutlass_dsl="4.7.0")
    found = top(host_table(tuned.winner(tuned.variant(), {"rows": 64}, environment=strange)), {"rows": 64})
    assert found.level is Level.NEAREST
    assert "measured elsewhere (cutlass_dsl 4.7.0, here 4.8.1)" in found.why
    assert "measured here" not in found.why


def test_a_process_without_a_compiler_does_not_differ_in_the_compiler(tuned):
    """A serving machine has no CuTeDSL: the artifact that was measured is the one that it loads."""
    there = replace(environment(0), cutlass_dsl="4.8.1")
    winner = tuned.winner(tuned.variant(), {"rows": 64}, environment=there)
    table = make_table(tuned.spec, "host", replace(there, cutlass_dsl=None), [winner])
    assert top(table, {"rows": 64}).level is Level.EXACT


def test_another_protocol_is_not_comparable(tuned, host_table):
    """Case 20: after the measuring protocol changed, the old winner no longer counts as measured here."""
    now = present_protocols(tuned.spec, "host", environment(0))
    winner = tuned.winner(tuned.variant(), {"rows": 64})
    assert winner.protocol in now
    assert top(host_table(winner, protocols=now), {"rows": 64}).level is Level.EXACT
    older = replace(winner, protocol=winner.protocol.replace(f"/{VERSION} ", f"/{VERSION - 1} "))
    found = top(host_table(older, protocols=now), {"rows": 64})
    assert found.level is Level.NEAREST
    assert f"measured elsewhere (protocol '{older.protocol}', not comparable" in found.why


def test_times_of_two_protocols_are_not_compared(tuned, host_table):
    """Case 20: of winners by rotation and by flush, both of this version, the later one serves, not the lower time."""
    rotated = tuned.winner(tuned.variant(unroll=8, delay_us=0), {"rows": 64}, protocol="final/2 rotate", median_us=10.0)
    flushed = tuned.winner(tuned.variant(unroll=2, delay_us=0), {"rows": 64}, protocol="final/2 flush", median_us=14.0)
    assert top(host_table(rotated, flushed), {"rows": 64}).winner == flushed
    assert top(host_table(flushed, rotated), {"rows": 64}).winner == rotated
    older = replace(flushed, protocol="final/1 cold")
    now = frozenset({"final/2 rotate"})
    assert top(host_table(rotated, older, protocols=now), {"rows": 64}).winner == rotated


def test_what_ships_under_an_older_protocol_is_served_and_labelled():
    """Case 20: a winner that ships stays usable after the protocol has changed; its label says which it is of."""
    spec = load_spec("fmha")
    shipped = shipped_winners("fmha", "sm_90a", version=spec.version)
    old = [winner for winner in shipped if winner.protocol.startswith("final/1 ")]
    if not old:
        pytest.skip("all that ships is of the present protocol")
    here = old[0].environment
    now = present_protocols(spec, "sm_90a", here)
    table = make_table(spec, "sm_90a", here, (), shipped, now)
    assert not table.unusable
    found = top(table, dict(old[0].problem))
    assert found.level is Level.SHIPPED
    assert found.winner.protocol in now or "not comparable with this version's" in found.why


def test_the_protocols_of_a_gpu_name_its_clocks(tuned):
    """Case 20: other clocks, another protocol; a search's time is never a final's."""
    now = present_protocols(tuned.spec, "sm_90a", replace(HERE, clocks_policy="application clock 1500 MHz"))
    assert "final/2 cuda_graph flush_l2 random clocks_1500_mhz" in now
    assert all(text.startswith("final/") and text.endswith("clocks_1500_mhz") for text in now)


@pytest.mark.parametrize("field", ["gpu", "driver"])
def test_a_row_without_gpu_or_driver_is_a_miss_with_one_sentence(tuned, field):
    """Case 23: NULL driver or GPU: left out, and said."""
    winner = tuned.winner(tuned.variant(arch="sm_90a"), {"rows": 64}, environment=replace(HERE, **{field: None}))
    table = make_table(tuned.spec, "sm_90a", HERE, [winner, winner])
    assert table.measured == ()
    (line,) = table.unusable
    assert f"no {field}" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: replace(v, version=2), "version 2 of host_scale, now 1"),
        (lambda v: replace(v, tunables=v.tunables.merged({"unroll": 3})), "no longer in the space"),
        (lambda v: replace(v, tunables=v.tunables.merged({"new": 1})), "no longer in the space"),
        (lambda v: replace(v, implementation="gone"), "unknown implementation 'gone'"),
        (lambda v: replace(v, spec="other"), "it is for other on host"),
    ],
)
def test_a_winner_that_the_spec_no_longer_knows_is_left_out(tuned, host_table, change, words):
    table = host_table(replace(tuned.winner(tuned.variant(), {"rows": 64}), variant=change(tuned.variant())))
    assert table.measured == () and words in table.unusable[0]


def test_a_winner_whose_constraints_exclude_the_shape_is_refused(tuned):
    """Case 52: the variant's own valid range must contain the shape, also inside its bucket."""
    tuned.reference = str(tuned.specs / "host_moments.py")
    winner = tuned.winner(tuned.variant(block=16), {"rows": 4, "cols": 32})
    table = make_table(tuned.spec, "host", environment(0), [winner])
    asked = tuned.spec.problem({"rows": 3, "cols": 24})
    found = list(steps(table, asked))
    refused = next(step for step in found if isinstance(step, Miss) and step.level is Level.NEAREST)
    assert "block=16 may not serve it (block_divides: the block must divide cols)" in refused.why
    assert [step.level for step in found if isinstance(step, Candidate)] == [Level.DEFAULT]
    assert found[-1].variant.tunables.block == 8


def test_only_the_winners_that_the_walk_comes_to_are_looked_at(tuned, host_table, monkeypatch):
    """A new size waits for one variant's constraints, not for those of all that were ever measured."""
    winners = [tuned.winner(tuned.variant(unroll=4, delay_us=0), {"rows": rows}) for rows in range(1, 100)]
    asked = []
    may_not = ladder._cannot_serve
    monkeypatch.setattr(ladder, "_cannot_serve", lambda *given: asked.append(given) or may_not(*given))
    done = walk(host_table(*winners), tuned.spec.problem({"rows": 100}), lambda candidate: (candidate, ""))
    assert done.candidate.winner.problem.rows == 99 and len(asked) == 1


def test_no_valid_variant_says_which_constraint_is_to_blame(tuned):
    """Case 57: the shape and the constraints."""
    tuned.reference = str(tuned.specs / "host_moments.py")
    asked = tuned.spec.problem({"rows": 3, "cols": 25})
    table = make_table(tuned.spec, "host", environment(0), [])
    done = walk(table, asked, lambda candidate: (candidate, ""))
    assert done.candidate is None
    words = explain_no_kernel(tuned.spec, "host", asked)
    assert "2 by block_divides" in words and "the block must divide cols" in words


def test_the_walk_stops_at_the_first_that_can_serve(tuned, host_table):
    exact = tuned.winner(tuned.variant(unroll=1), {"rows": 64})
    near = tuned.winner(tuned.variant(unroll=4, delay_us=0), {"rows": 1024})
    done = walk(
        host_table(exact, near),
        tuned.spec.problem({"rows": 64}),
        lambda c: (c.variant.id, "") if c.variant.tunables.unroll == 4 else (None, "not compiled"),
    )
    assert done.candidate.level is Level.NEAREST and done.thing == near.variant.id
    assert done.missed == (f"exact: {exact.variant}: not compiled", "bucket: nothing was measured here in this bucket")
    assert done.better.variant == exact.variant


def test_flags_tell_true_from_one(tuned):
    tuned.reference = str(tuned.specs / "host_moments.py")
    spec = tuned.spec
    plain, centred = spec.problem({"rows": 4, "cols": 16}), spec.problem({"rows": 4, "cols": 16, "centred": True})
    assert distance(spec, plain, centred) == float("inf")
    assert distance(spec, plain, Values(rows=8, cols=16, centred=False)) == 1.0
