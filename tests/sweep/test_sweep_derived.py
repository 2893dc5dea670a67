"""A spec of derived axes, tensors of several forms and a workspace, from the sweep to the call."""

from __future__ import annotations

import torch

import tunekit
from tests.sweep.conftest import Cache, reference
from tunekit.dispatch.lookup import look_up
from tunekit.model import Level

FAULTY = reference("host_pages", "host_pages_faulty")
PAGED = {"cols": 8, "batch": 2, "page": 8, "s": 40, "reduce": "window", "left": 30}


def test_only_the_right_ones_may_win_and_the_winner_serves(cache: Cache) -> None:
    report = cache.run(FAULTY, PAGED)
    (problem,) = report.problems
    found = {(row.variant.tunables.split, row.variant.tunables.fault): row.status for row in problem.rows}
    assert found == {
        (1, "none"): "ok",
        (2, "none"): "ok",
        (2, "adds_to_it"): "wrong_result",
        (2, "past_its_end"): "wrong_result",
        (2, "leaves_a_part"): "wrong_result",
    }
    winner = problem.winner
    assert winner is not None and winner.bucket["table_pages"] == 8
    places = {"database": cache.settings.database, "artifacts": cache.settings.artifacts}
    kernel = tunekit.load(FAULTY, **places)
    flags = {"page": 8, "reduce": "window", "left": 30}
    for columns, level in ((5, Level.EXACT), (6, Level.BUCKET)):
        x = torch.randn(2 * columns, 8, 8)
        table = torch.randperm(2 * columns).int().reshape(2, columns)
        rows = [x[table[b].long()].reshape(-1, 8).double()[-31:].sum(0) for b in range(2)]
        torch.testing.assert_close(kernel(x, table, **flags).double(), 0.5 * torch.stack(rows), rtol=1e-5, atol=1e-4)
        assert kernel.choice(x, table, **flags).level is level

    by_table = {**PAGED, "table_pages": 5}
    del by_table["s"]
    assert look_up(FAULTY, by_table, arch="host", settings=cache.settings).level is Level.EXACT
