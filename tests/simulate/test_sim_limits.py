"""The simulator keeps its limits: one CTA of the attention kernel in 10 s on one core, 2 GB a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "simulate.py"


@pytest.mark.slow
def test_one_cta_of_attention_is_simulated_within_its_limits() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--runs", "1"], capture_output=True, text=True, timeout=170, check=True
    )
    seconds = [float(found) for found in re.findall(r"([\d.]+) s a CTA", done.stdout)]
    (gigabytes,) = (float(found) for found in re.findall(r"peak memory of a process: ([\d.]+) GB", done.stdout))
    assert len(seconds) == 2 and max(seconds) <= 10, done.stdout
    assert gigabytes < 2, done.stdout
