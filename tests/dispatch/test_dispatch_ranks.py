"""Several ranks that start cold at once: one compile, the same choice everywhere, bounded waits."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tunekit
from tests.dispatch.test_dispatch_processes import ROOT, obey_file_modes
from tunekit.errors import NoKernelError, UserError
from tunekit.store.artifacts import ArtifactStore

RANK = """
import datetime, json, os, sys
import torch
import tunekit
from tunekit.dispatch import ranks
ranks.WAIT_S = float(os.environ.get("TEST_WAIT_S", "60"))
ranks.SAY_S = 0.2
if os.environ.get("TEST_GLOO"):
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
kernel = tunekit.load(sys.argv[1], **json.loads(sys.argv[2]))
asked = json.loads(sys.argv[3])
found = {}
for rows in asked:
    try:
        y = kernel(torch.ones(rows, 64))
        assert y[0, 0] == 0.5
        choice = kernel.choice(torch.ones(rows, 64))
        found[rows] = [choice.level.value, choice.variant.tunables.unroll]
    except tunekit.errors.NoKernelError as error:
        found[rows] = str(error)
print(json.dumps({"found": found, "stats": kernel.stats()}))
if os.environ.get("TEST_GLOO"):
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(tuned, caches: list[Path], asked: list[list[int]], *, gloo: bool = False, bound: bool = False, **more):
    """A process for each of `caches`, which calls with the rows that it is given; what each found, and its stderr."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(caches))}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_GLOO": "1" if gloo else "", **address}
    wait_s = more.pop("wait_s", 60)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, tuned.reference, json.dumps(more), json.dumps(rows)],
            env={**environ, "RANK": str(rank), "TUNEKIT_CACHE": str(cache), "TEST_WAIT_S": str(wait_s)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=obey_file_modes if bound and os.geteuid() == 0 else None,
        )
        for rank, (cache, rows) in enumerate(zip(caches, asked, strict=True))
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs], [err for _, err in outputs]


def test_ranks_that_start_cold_at_once_compile_once(tuned):
    """Case 34 on the request path; a rank that waits says who it is and for what."""
    tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    done, errors = start(tuned, [tuned.root] * 3, [[64]] * 3, compile="allow")
    assert [rank["found"]["64"] for rank in done] == [["exact", 8]] * 3
    assert sum(rank["stats"]["compiled"] for rank in done) == 1
    assert [rank["stats"]["loaded"] for rank in done] == [1, 1, 1]
    waiting = [line for err in errors for line in err.splitlines() if "waits for another compile of loop" in line]
    assert all(line.startswith("rank ") for line in waiting)


MANY = """
import json, os, sys
import torch
import tunekit
import tunekit.dispatch.loading, tunekit.measure.protocol
torch.set_num_threads(1)
for turn in range(int(sys.argv[2])):
    begin_read, begin_write = os.pipe()
    children = []
    for n in range(16):
        result_read, result_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(begin_write)
            os.read(begin_read, 1)
            kernel = tunekit.load(sys.argv[1], compile="allow", artifacts=f"{sys.argv[3]}/{turn}")
            right = bool(kernel(torch.ones(64, 64))[0, 0] == 0.5)
            os.write(result_write, json.dumps({"right": right, **kernel.stats()}).encode())
            os._exit(0)
        os.close(result_write)
        children.append((pid, result_read))
    os.close(begin_read)
    os.close(begin_write)
    found = []
    for pid, result in children:
        found.append(json.loads(os.read(result, 10_000) or b"null"))
        os.close(result)
        os.waitpid(pid, 0)
    print(json.dumps(found), flush=True)
"""
TURNS = int(os.environ.get("TUNEKIT_TEST_TURNS", "5"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * TURNS)
def test_sixteen_processes_on_a_cold_key_compile_it_once(tuned):
    """Case 54 by processes, each turn with an empty store: one compile, one load each, no error."""
    tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    done = subprocess.run(
        [sys.executable, "-c", MANY, tuned.reference, str(TURNS), str(tuned.root / "turns")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TUNEKIT_CACHE": str(tuned.root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(turns) == TURNS
    for found in turns:
        assert [child and (child["right"], child["exact"], child["loaded"]) for child in found] == [(True, 1, 1)] * 16
        assert sum(child["compiled"] for child in found) == 1


@pytest.mark.parametrize(
    "gloo", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["torch.distributed", "files"]
)
def test_all_ranks_take_what_all_can_load(tuned, tmp_path, gloo):
    """Rank 1's own cache lacks the best artifact, and its second best is damaged: every rank takes the third."""
    best = tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    second = tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    tuned.tune({"rows": 4096}, unroll=2, delay_us=0)
    other = tmp_path / "other"
    shutil.copytree(tuned.root, other)
    store = ArtifactStore(other / "artifacts")
    store.manifest(best.artifact).unlink()
    artifact = store.get(second.artifact)
    text = tmp_path / "text.so"
    text.write_text("no library")
    store.put(second.artifact, artifact.symbol, {"so": text})
    caches = [tuned.root, other if gloo else tuned.root]
    done, errors = start(tuned, caches, [[64, 1024, 300]] * 2, gloo=gloo, all_or_nothing=True)
    assert done[0]["found"] == done[1]["found"]
    if gloo:
        assert done[0]["found"]["64"] == ["nearest", 2]
        assert "no rank takes" in errors[0] and "because rank 1 can't" in errors[0]
    else:
        assert done[0]["found"]["64"] == ["exact", 8]
    alone, _ = start(tuned, [tuned.root], [[64]])
    assert alone[0]["found"]["64"] == ["exact", 8]


@pytest.mark.slow
@pytest.mark.parametrize("gloo", [True, False], ids=["torch.distributed", "files"])
def test_a_rank_that_never_asks_is_named_after_the_limit(tuned, gloo):
    tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    done, errors = start(tuned, [tuned.root] * 3, [[64], [64], [1024]], gloo=gloo, all_or_nothing=True, wait_s=1.5)
    assert "rank 0 waited 1.5 s for rank(s) 2 to choose for host_scale version 1 rows=64" in done[0]["found"]["64"]
    assert "rank 2 waited 1.5 s for rank(s) 0, 1 to choose" in done[2]["found"]["1024"]
    assert re.search(r"rank 0 waits for rank\(s\) (1, )?2 to choose", errors[0])


def test_ranks_that_are_not_known_or_have_no_board_are_refused(tuned, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"initialise torch\.distributed before load"):
        tunekit.load(tuned.reference, all_or_nothing=True, **tuned.places)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="leave out compile='background'"):
        tunekit.load(tuned.reference, all_or_nothing=True, compile="background", **tuned.places)
    monkeypatch.setattr("tunekit.store.files.unwritable", lambda directory: "no permission to write there")
    with pytest.raises(UserError, match=r"keeps what the ranks choose in .*no permission"):
        tunekit.load(tuned.reference, all_or_nothing=True, **tuned.places)


def test_one_rank_alone_agrees_with_itself_and_again_after_a_refresh(tuned, monkeypatch):
    import torch

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    kernel = tunekit.load(tuned.reference, all_or_nothing=True, **tuned.places)
    with pytest.raises(NoKernelError):
        kernel(torch.ones(64, 64))
    tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    kernel.refresh()
    assert kernel(torch.ones(64, 64))[0, 0] == 0.5
    assert kernel.choice(torch.ones(64, 64)).variant.tunables.unroll == 8
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel.refresh()
    assert kernel.choice(torch.ones(64, 64)).variant.tunables.unroll == 4
