"""A bundle in which a package's function won: a record, which serves where the package is installed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import tunekit
from tests.libraries.conftest import BY_FAKE, ONLY_FAKE, PACKAGE, SLOW, Cache, Install, ids
from tunekit.dispatch.bundling import Bundled, bundle
from tunekit.errors import NoKernelError
from tunekit.model import Level
from tunekit.settings import Settings
from tunekit.spec import load_spec

X = torch.randn(8, 64)


def made(cache: Cache, reference: str, out: Path, **options: bool) -> Bundled:
    return bundle(load_spec(reference), reference, "host", out, Settings(**cache.places, **cache.limits), **options)


@pytest.mark.slow
def test_a_library_serves_from_a_bundle_where_it_is_installed(
    cache: Cache, install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is not, the spec's default does, which is in the bundle for that; the log says why."""
    install("1.0")
    cache.run(BY_FAKE, variants=ids(BY_FAKE, loop=SLOW, fake=0))
    out = tmp_path / "bundle"
    done = made(cache, BY_FAKE, out)
    assert (done.libraries, done.kernels, done.problems, done.left_out) == ((f"{PACKAGE} 1.0",), 1, 1, ())
    kernel = tunekit.load(BY_FAKE, bundle=out)
    assert torch.equal(kernel(X), X * 0.5)
    choice = kernel.choice(X)
    assert (choice.level, choice.variant.implementation) == (Level.EXACT, "fake")
    install(None)
    kernel = tunekit.load(BY_FAKE, bundle=out)
    with caplog.at_level(logging.WARNING, "tunekit"):
        assert torch.equal(kernel(X), X * 0.5)
    choice = kernel.choice(X)
    assert (choice.level, choice.variant.implementation) == (Level.DEFAULT, "loop")
    assert f"{PACKAGE} is not installed" in caplog.text


@pytest.mark.slow
def test_another_version_of_a_library_is_labelled_in_a_bundle(cache: Cache, install: Install, tmp_path: Path) -> None:
    install("1.0")
    cache.run(BY_FAKE, variants=ids(BY_FAKE, loop=SLOW, fake=0))
    made(cache, BY_FAKE, tmp_path / "bundle")
    install("2.0")
    choice = tunekit.load(BY_FAKE, bundle=tmp_path / "bundle").choice(X)
    assert choice.level is Level.NEAREST and f"{PACKAGE} 1.0, here 2.0" in choice.why


@pytest.mark.slow
def test_a_bundle_may_hold_a_librarys_record_alone(cache: Cache, install: Install, tmp_path: Path) -> None:
    install("1.0")
    cache.run(ONLY_FAKE, variants=ids(ONLY_FAKE, fake=0))
    out = tmp_path / "bundle"
    assert made(cache, ONLY_FAKE, out).kernels == 0
    assert torch.equal(tunekit.load(ONLY_FAKE, bundle=out)(X), X * 0.5)
    install(None)
    with pytest.raises(NoKernelError, match="is not installed"):
        tunekit.load(ONLY_FAKE, bundle=out)(X)
