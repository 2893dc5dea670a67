"""Memory is bounded by what is kept, not by what is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tunekit
from tests.dispatch.test_dispatch_processes import ROOT
from tunekit.dispatch.kept import Kept


def test_what_was_used_longest_ago_goes_first():
    kept: Kept[str, int] = Kept(2)
    for key, value in (("a", 1), ("b", 2)):
        kept.put(key, value)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert ("a" in kept, "b" in kept, "c" in kept, len(kept)) == (True, False, True, 2)
    kept.drop(lambda key, value: value == 3)
    assert kept.get("c") is None and kept.pop("a") == 1 and len(kept) == 0


def test_what_is_kept_of_problems_has_a_bound_and_forgotten_ones_serve_again(tuned, monkeypatch):
    monkeypatch.setattr("tunekit.dispatch.kernel.MAX_KEYS", 128)
    monkeypatch.setattr("tunekit.dispatch.resolver.MOST_SERVED", 50)
    monkeypatch.setattr("tunekit.dispatch.library.MOST_KEYS", 4)
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    for cols in (16, 32, 128):
        tuned.tune({"rows": 64, "cols": cols}, unroll=4, delay_us=0)
    for native in (True, False):
        kernel = tunekit.load(tuned.reference, native=native, **tuned.places)
        for round in range(2):
            for rows in range(1, 400):
                x = torch.ones(rows, (16, 32, 64, 128)[rows % 4])
                assert kernel(x)[0, 0] == 0.5, round
        assert kernel.entries <= 128
        assert len(kernel._resolver._served) <= 50
        library = kernel._resolver._library
        assert max(len(library._keys), len(library._found), len(library._ruled_out)) <= 4
        assert kernel.stats()["error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--python"]], ids=["native", "python"])
def test_resident_memory_is_flat_over_dispatches_and_problems(how):
    """The benchmark's bound, over fewer: the second half of each grows by no more than 10 MiB."""
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks" / "dispatch_memory.py",
            "--problems",
            "40000",
            "--dispatches",
            "200000",
            *how,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
