"""Compiling on the request path: only when asked for, in isolation, once."""

from __future__ import annotations

import logging

import pytest
import torch

import tunekit
from tunekit.errors import NoKernelError
from tunekit.model import Level
from tunekit.store.artifacts import ArtifactStore


def test_a_missing_artifact_is_compiled_when_allowed(tuned):
    winner = tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    kernel = tunekit.load(tuned.reference, compile="allow", **tuned.places)
    x = torch.ones(64, 64)
    y = kernel(x)
    assert y[0, 0] == 0.5
    choice = kernel.choice(x)
    assert (choice.level, choice.artifact) == (Level.EXACT, winner.artifact)
    assert kernel.stats()["compiled"] == 1 and kernel.stats()["would_compile"] == 0
    artifact = ArtifactStore(tuned.artifacts).get(winner.artifact)
    assert artifact is not None and artifact.symbol == winner.symbol and artifact.seconds


def test_a_winner_that_no_longer_compiles_is_recovered_from_once_and_said(tuned, caplog):
    """Case 24: the stored winner's build raises now: the next choice serves, one warning, no second try."""
    tuned.reference = f"{tuned.specs / 'host_scale.py'}:host_build"
    tuned.tune({"rows": 64}, compiled=False, build="raises")
    tuned.tune({"rows": 256}, build="also_good")
    kernel = tunekit.load(tuned.reference, compile="allow", **tuned.places)
    with caplog.at_level(logging.WARNING, "tunekit"):
        for rows in (64, 64, 50, 40):
            assert kernel(torch.ones(rows, 64))[0, 0] == 0.5
    assert kernel.choice(torch.ones(64, 64)).level is Level.NEAREST
    assert kernel.stats()["recovered"] == 1 and kernel.stats()["compiled"] == 0
    lines = [record.getMessage() for record in caplog.records if "can't serve" in record.getMessage()]
    assert len(lines) == 1 and "trace_error" in lines[0] and "tile 48 does not divide 64" in lines[0]


def test_a_compile_on_request_that_hangs_is_killed_at_the_limit(tuned, monkeypatch):
    """Case 63, on the request path: the environment's limit, and an error instead of a wait."""
    monkeypatch.setenv("TUNEKIT_COMPILE_TIMEOUT", "1")
    tuned.reference = f"{tuned.specs / 'host_limited.py'}:unlimited"
    kernel = tunekit.load(tuned.reference, compile="allow", **tuned.places)
    with pytest.raises(NoKernelError, match=r"compile_timeout.* limit of 1 s"):
        kernel(torch.ones(8))
