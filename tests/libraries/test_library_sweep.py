"""A library races in the sweep, wins or loses, and is served where it is installed: nowhere else, never silently."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import tunekit
from tests.libraries.conftest import (
    ABSENT,
    BY_FAKE,
    BY_TORCH,
    ON_GPU,
    ONLY_FAKE,
    PACKAGE,
    SLOW,
    Cache,
    Install,
    ids,
    statuses,
)
from tunekit.errors import NoKernelError, UserError
from tunekit.identity import distribution_version
from tunekit.model import Level, Winner
from tunekit.spec import load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.exchange import export_lines, import_lines
from tunekit.store.verify import verify
from tunekit.sweep import SweepOptions
from tunekit.sweep.measuring import incumbent_of
from tunekit.sweep.options import choose_target
from tunekit.trials import Stage

X = torch.randn(8, 64)


def winner_of(cache: Cache, reference: str, **pauses: int) -> Winner:
    (problem,) = cache.run(reference, variants=ids(reference, **pauses)).problems
    assert problem.winner is not None, problem.why_no_winner
    return problem.winner


def served(cache: Cache, reference: str, **options: object) -> tuple[object, object]:
    """A kernel and its choice, having served a call right."""
    kernel = tunekit.load(reference, **cache.places, **options)  # type: ignore[arg-type]
    y = kernel(X)
    assert torch.equal(y, X * 0.5)
    into = torch.empty_like(X)
    assert kernel(X, into, 3.0) is into and torch.equal(into, X * 3.0)
    return kernel, kernel.choice(X)


def test_a_library_wins_and_is_served(cache: Cache) -> None:
    winner = winner_of(cache, BY_TORCH, loop=SLOW, by_torch=0)
    assert winner.variant.implementation == "by_torch" and winner.median_us < SLOW
    assert winner.library == f"torch {distribution_version('torch')}"
    with cache.store() as store:
        (compiled,) = store.trials(stage=Stage.COMPILE, variant=winner.variant.id)
    assert compiled.outcome.facts["library"] == winner.library
    kernel, choice = served(cache, BY_TORCH, strict=True)
    assert choice.level is Level.EXACT and choice.artifact == winner.artifact
    assert kernel.stats()["loaded"] == 1 and kernel.stats()["compiled"] == 0


def test_a_library_that_is_slower_loses(cache: Cache) -> None:
    winner = winner_of(cache, BY_TORCH, loop=0, by_torch=SLOW)
    assert winner.variant.implementation == "loop" and winner.library == ""
    _, choice = served(cache, BY_TORCH)
    assert choice.variant.implementation == "loop"


@pytest.mark.slow
def test_what_the_store_keeps_of_a_library(cache: Cache) -> None:
    """An entry of plain JSON under the compile key, its hash checked; a damaged one is a miss for the sweep."""
    winner = winner_of(cache, BY_TORCH, by_torch=0)
    store = ArtifactStore(cache.places["artifacts"])
    artifact = store.get(winner.artifact)
    assert artifact is not None and list(artifact.files) == ["library"]
    entry = json.loads(store.path(artifact).read_bytes())
    assert entry == {
        "format": 1,
        "reference": BY_TORCH,
        "spec": "library_scale",
        "version": 1,
        "implementation": "by_torch",
        "arch": "host",
        "static": {"cols": 64},
        "tunables": {"pause_us": 0},
        "library": winner.library,
    }
    assert verify(cache.places["database"], store) == []
    path = store.path(artifact)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"by_torch", b"by_hand!"))
    assert store.get(winner.artifact) is None
    assert winner_of(cache, BY_TORCH, by_torch=0).artifact == winner.artifact
    assert store.get(winner.artifact) is not None


def test_a_library_that_is_not_installed_is_left_out_and_named(cache: Cache, install: Install) -> None:
    report = cache.run(BY_FAKE)
    (problem,) = report.problems
    assert problem.expansion == f"2 of 4 variants; dropped: 2 by {PACKAGE}_installed"
    assert report.notes.count(ABSENT) == 1
    assert {row.variant.implementation for row in problem.rows} == {"loop"}
    assert problem.winner is not None and problem.winner.variant.implementation == "loop"
    with pytest.raises(UserError) as caught:
        cache.run(ONLY_FAKE)
    assert ABSENT in str(caught.value)


def test_a_winner_whose_library_went_is_passed_over_with_one_warning(
    cache: Cache, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("1.0")
    winner = winner_of(cache, BY_FAKE, loop=SLOW, fake=0)
    assert winner.variant.implementation == "fake" and winner.library == f"{PACKAGE} 1.0"
    install(None)
    with caplog.at_level(logging.WARNING, "tunekit"):
        kernel, choice = served(cache, BY_FAKE)
    assert choice.variant.implementation == "loop" and choice.level is Level.DEFAULT
    assert kernel.stats()["recovered"] == 1
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "not installed" in line] == [
        f"library_fake: fake pause_us=0 (exact) can't serve: {ABSENT.partition(': ')[2]}"
    ]
    with pytest.raises(NoKernelError, match=f"strict mode.*{PACKAGE} is not installed"):
        tunekit.load(BY_FAKE, **cache.places, strict=True)(X)
    install("1.0")
    _, choice = served(cache, BY_FAKE)
    assert choice.level is Level.EXACT and choice.variant == winner.variant


def test_a_missing_library_is_not_compiled_on_request(cache: Cache, install: Install) -> None:
    install("1.0")
    winner_of(cache, BY_FAKE, fake=0)
    install(None)
    kernel, choice = served(cache, BY_FAKE, compile="allow")
    assert choice.variant.implementation == "loop" and kernel.stats()["compiled"] == 1


@pytest.mark.slow
def test_a_winner_of_another_version_is_a_seed_and_a_labelled_fallback(
    cache: Cache, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("1.0")
    first = winner_of(cache, BY_FAKE, loop=SLOW, fake=0)
    install("2.0")
    with caplog.at_level(logging.WARNING, "tunekit"):
        _, choice = served(cache, BY_FAKE)
    assert choice.level is Level.NEAREST and choice.variant == first.variant
    assert f"{PACKAGE} 1.0, here 2.0" in choice.why
    assert any("served by nearest" in record.getMessage() for record in caplog.records)
    spec = load_spec(BY_FAKE)
    target = choose_target(spec, SweepOptions(arch="host"))
    with cache.store() as store:
        assert incumbent_of(store, spec, spec.problem({"rows": 8}), target, ()) == (None, [first.variant])
    second = winner_of(cache, BY_FAKE, loop=SLOW, fake=0)
    assert second.library == f"{PACKAGE} 2.0" and second.artifact != first.artifact
    _, choice = served(cache, BY_FAKE)
    assert choice.level is Level.EXACT and choice.artifact == second.artifact


def test_a_package_that_can_not_be_imported_is_a_failure_with_its_words(cache: Cache, install: Install) -> None:
    install("1.0", module="raise OSError('libfake.so.1: cannot open')\n")
    report = cache.run(BY_FAKE, variants=ids(BY_FAKE, loop=0, fake=0))
    assert statuses(report) == {"loop pause_us=0": "ok", "fake pause_us=0": "launch_error"}
    (row,) = [row for row in report.problems[0].rows if row.status == "launch_error"]
    assert f"fake can't be made of {PACKAGE} 1.0: OSError: libfake.so.1: cannot open" in row.reason


@pytest.mark.slow
def test_a_package_that_breaks_after_it_won_is_passed_over(cache: Cache, install: Install) -> None:
    install("1.0")
    winner_of(cache, BY_FAKE, loop=SLOW, fake=0)
    install("1.0", module="raise OSError('libfake.so.1: cannot open')\n")
    _, choice = served(cache, BY_FAKE)
    assert choice.variant.implementation == "loop"
    assert any("cannot open" in missed for missed in choice.fell_back_from)


def test_a_library_may_compile_at_its_first_call(cache: Cache, install: Install) -> None:
    """The limit of a run is not that of a first call: flash-attn-4 compiles for seconds in there."""
    install("1.0", first_s=1.5)
    cache.limits["run_limit_s"] = 0.5
    winner = winner_of(cache, BY_FAKE, fake=0)
    assert winner.median_us < SLOW


def test_libraries_serve_what_nobody_tuned_or_compiled(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """The spec's default comes first; where it is not compiled, a library's does."""
    with caplog.at_level(logging.WARNING, "tunekit"):
        _, choice = served(cache, BY_TORCH)
    assert choice.level is Level.DEFAULT and choice.variant.implementation == "by_torch"
    assert [missed for missed in choice.fell_back_from if missed.startswith("default: loop")]
    assert len(caplog.records) == 1
    _, choice = served(cache, BY_TORCH, compile="allow")
    assert choice.variant.implementation == "loop"


def test_a_library_is_not_simulated(cache: Cache) -> None:
    """Where no GPU is, nothing can be said of it but that its package is there."""
    report = cache.run(ON_GPU, arch="sm_90a", verify="simulate", variants=ids(ON_GPU, arch="sm_90a", by_torch=0))
    ((row,),) = [problem.rows for problem in report.problems]
    assert row.outcomes[Stage.COMPILE].ok and row.status == "not_modelled"
    library = f"torch {distribution_version('torch')}"
    assert row.reason == f"it is a library's function ({library}): there is no PTX to simulate"


@pytest.mark.slow
def test_a_winner_travels_with_its_library(cache: Cache, tmp_path: Path) -> None:
    winner = winner_of(cache, BY_TORCH, by_torch=0)
    lines = list(export_lines(cache.places["database"], kinds=("winner",)))
    assert json.loads(lines[0])["library"] == winner.library
    other = Cache(tmp_path / "other")
    with other.store() as store:
        import_lines(store, ((number, line.encode()) for number, line in enumerate(lines, 1)))
        (found,) = store.winners("library_scale", "host")
    assert found == winner
    _, choice = served(other, BY_TORCH)
    assert choice.level is Level.EXACT, "a library's function needs no artifact"
