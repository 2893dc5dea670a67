"""Every variant of the fmha space is traced, and what it takes equals what the spec declares. Slow: minutes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.kernels.test_fmha import HEAD_DIMS, SPEC, declared, fitting, problem, run
from tunekit.compiling import units
from tunekit.probe import Probe


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "head_dim"), list(itertools.product(("sm_90a", "sm_100a"), HEAD_DIMS)))
def test_every_traced_footprint_equals_the_declared_one(arch: str, head_dim: int, tmp_path: Path) -> None:
    p = problem(head_dim)
    wanted = units(SPEC, "fmha", p, fitting(arch, p))
    results = run(wanted, tmp_path, trace_only=True)
    wrong = {}
    for unit in wanted:
        differing = Probe.of_report(results[unit.key].value or {}, declared(unit.variant, p)).disagreements()
        if not results[unit.key].ok or differing:
            wrong[str(unit.variant)] = differing or results[unit.key].reason
    assert len(wanted) >= 5 and not wrong
