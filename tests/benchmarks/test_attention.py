"""What benchmarks/attention.py does without a GPU: choose problems, rank trials, survive its children, tell results."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import attention  # noqa: E402
import attention_peers  # noqa: E402
import attention_splits  # noqa: E402
import contest  # noqa: E402
from tunekit.arch import parse_arch  # noqa: E402
from tunekit.measure.gpu_state import GpuState  # noqa: E402
from tunekit.measure.inputs import Arguments  # noqa: E402
from tunekit.spec.inputs import draw, scalars  # noqa: E402

SPEC = attention.SPEC
HOPPER = parse_arch("sm_90a")
CPU = torch.device("cpu")


# --- problems ---------------------------------------------------------------------------


def test_tables_are_problems_of_the_spec():
    problems = {table: [SPEC.problem(given) for given in attention.TABLES[table]()] for table in attention.TABLES}
    assert {table: len(found) for table, found in problems.items()} == {
        "prefill": 6,
        "decode": 36,
        "wide": 48,
        "splits": 12,
    }
    assert all(len(set(found)) == len(found) for found in problems.values())
    assert {p.s_k + p.top_k for p in problems["wide"] if p.gather} == {640, 1152, 8192}, "as many keys as without lists"


def test_only_takes_values_of_axes_defaults_too():
    found = attention.chosen(["wide"], ["kv_shared=false", "batch=1,8"])
    assert [(todo.given["batch"], todo.given["s_k"]) for todo in found] == [
        (batch, s_k) for batch in (1, 8) for s_k in (640, 1152, 8192)
    ]
    assert len(attention.chosen(["decode", "prefill"], [])) == 42
    with pytest.raises(SystemExit, match="an axis of fmha; not 'size=3'"):
        attention.chosen(["wide"], ["size=3"])


def test_listed_problems_are_a_workload():
    script = Path(attention.__file__)
    command = [sys.executable, str(script), "decode", "--only", "head_dim=64", "s_k=640", "--list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [SPEC.problem(json.loads(line)).batch for line in lines] == [1, 8, 32, 128]


# --- contestants ------------------------------------------------------------------------

SMALL = {"batch": 3, "heads": 8, "kv_heads": 1, "t": 1, "s_k": 64, "head_dim": 512}
TWO = {"kv_shared": True, "has_sink": True, "has_lengths": True, "sources": 2, "s_k2": 96}


@pytest.mark.parametrize(
    "more",
    [{}, {"kv_shared": True}, TWO, {**TWO, "gather": True, "top_k": 32}],
    ids=["separate", "shared", "two sources", "gather"],
)
def test_the_peers_of_wide_problems_compute_attention(more):
    problem = SPEC.problem({**SMALL, **more})
    inputs = attention.filled(problem, draw(SPEC, problem, 0, CPU))
    want = SPEC.reference(problem, {**inputs, **scalars(SPEC, problem)})["o"]
    arguments = Arguments(SPEC, problem, inputs, CPU)
    given = {name: one.tensor for name, one in arguments.guarded.items() if one.argument.role == "input"}
    peers = dict(attention_peers.peers(problem, given))
    assert set(peers) == {"bmm, softmax, bmm"} | ({"torch SDPA, heads packed"} if len(more) < 2 else set())
    for name, call in peers.items():
        out = call().double()
        # bf16 scores cost more than the tolerance of a kernel
        assert out.shape == want.shape and float((out - want).norm() / want.norm()) < 1e-2, name


def test_every_split_is_a_variant_and_launches_of_tiles_merge_to_attention():
    for given in attention_splits.problems():
        problem = SPEC.problem(given)
        names = list(attention_splits.splits(problem, HOPPER))
        assert names[0] == attention_splits.BASE and {"cluster 2", "cluster 16", "kernel 16"} < set(names)
    problem = SPEC.problem({**given, "batch": 1, "heads": 64, "s_k": 160, "head_dim": 128})
    inputs = draw(SPEC, problem, 0, CPU)
    tile = attention_splits.wanted_units(problem, HOPPER)["tile"]
    launches = attention_splits.TileLaunches(tile, problem, inputs, 64)
    assert launches.count == 3, "the last one has 32 keys"
    for place, keys in enumerate((slice(0, 64), slice(64, 128), slice(128, 160))):
        part = attention_splits.tile_problem(problem, keys.stop - keys.start)
        own = {"q": inputs["q"], "k": inputs["k"][:, keys], "v": inputs["v"][:, keys], **scalars(SPEC, part)}
        found = SPEC.reference(part, own)
        launches._o[place], launches._lse[place] = found["o"], found["lse"]
    launches._calls = [lambda: None]
    want = SPEC.reference(problem, {**inputs, **scalars(SPEC, problem)})["o"]
    assert float((launches.torch_merged().double() - want).norm() / want.norm()) < 5e-3


def trial(implementation: str, key: str, protocol: str, us: float, environment=None):
    return SimpleNamespace(
        environment=environment,
        variant=SimpleNamespace(implementation=implementation),
        compile_key=key,
        protocol=f"{protocol}/1 cuda_graph cold_l2 spec_inputs default_clocks",
        outcome=SimpleNamespace(ok=True, samples_us=(us, us, us)),
    )


def test_the_own_kernel_is_the_fastest_of_the_final_whatever_the_default_does_there():
    trials = [
        trial("sm90", "default", "search", 20.0),
        trial("sm90", "default", "final", 17.0),
        trial("sm90_split", "second", "search", 11.0),
        trial("torch_sdpa", "library", "search", 5.0),
        trial("torch_sdpa", "library", "final", 5.0),
        trial("sm90", "first", "search", 12.0),
    ]
    order = [one.compile_key for one in attention_peers.ranked(trials)]
    assert order == ["second", "first", "default"], "of the own kernels only the default was in the final"
    finals = [trial("sm90", "first", "final", 8.0), trial("sm90_split", "second", "final", 9.0)]
    assert [one.compile_key for one in attention_peers.ranked([*trials, *finals])] == ["first", "second", "default"]
    assert attention_peers.ranked([trials[3]]) == []


def test_the_own_kernel_was_measured_here_and_costs_nobody_a_row_if_it_is_gone(monkeypatch):
    here = attention_peers.environment()
    elsewhere = replace(here, gpu="another GPU")
    trials = [trial("sm90", "slow", "final", 9.0, here), trial("sm90", "fast", "final", 5.0, elsewhere)]
    store = SimpleNamespace(trials=lambda **wanted: trials)
    monkeypatch.setattr(attention_peers, "Store", SimpleNamespace(open=lambda path: contextlib.nullcontext(store)))
    kept = SimpleNamespace(get=lambda key: None if key == "gone" else key, root="artifacts")
    monkeypatch.setattr(attention_peers, "ArtifactStore", lambda root: kept)
    problem = SPEC.problem(SMALL)
    variant, call = attention_peers.own_kernel(problem, {})
    assert variant is trials[0].variant
    kept.get = lambda key: None
    with pytest.raises(RuntimeError, match="is not in artifacts"):
        call()
    assert attention_peers.own_kernel(problem, {}) is None


def test_a_problem_that_nothing_serves_is_told(monkeypatch):
    assert attention.chosen_kernel({**SMALL, "heads": 7, "head_dim": 3}).startswith("nothing: ")


# --- a contest --------------------------------------------------------------------------


class FakeTimer:
    """Its windows take what the call returns: a time, or what goes wrong."""

    def estimate_us(self, call):
        return 5.0

    def window(self, calls, count, flush, method):
        us = calls[0]()
        if us == "no graph":
            if method == "cuda_graph":
                raise RuntimeError("operation not permitted when stream is capturing")
            us = 7.0
        if us == "faults later":
            return SimpleNamespace(take=faults_at_the_third())
        return SimpleNamespace(take=lambda read: (us, GpuState()))


def faults_at_the_third():
    turns = iter(range(2))

    def take(read):
        if next(turns, None) is None:
            raise RuntimeError("an illegal memory access")
        return 3.0, GpuState()

    return take


@pytest.fixture
def held(monkeypatch):
    """Hold a contest without a GPU: rows of calls, and the names said."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(contest, "warm_capture_stream", lambda call: None)
    monkeypatch.setattr(contest, "host_us", lambda call, estimate_us: 9.0)
    monkeypatch.setattr(contest, "is_broken", lambda: False)
    said = []

    def hold(calls, without=()):
        one = contest.Contest(said.append, FakeTimer(), SimpleNamespace(read=GpuState))
        return one.rows(calls, lambda name, out: {"checked": name}, 4, dict(without))

    return SimpleNamespace(hold=hold, said=said)


def refuse():
    raise NotImplementedError("head_dim 512 is not supported")


def test_who_refuses_or_cannot_be_captured_leaves_the_others_their_times(held):
    calls = {"plain": lambda: 5.0, "refuses": refuse, "eager": lambda: "no graph", "left out": refuse}
    rows = held.hold(calls, {"left out": "faulted: before"})
    assert rows["refuses"] == {"refused": "head_dim 512 is not supported"}
    assert rows["left out"] == {"refused": "faulted: before"}
    assert (rows["plain"]["median_us"], rows["plain"]["method"]) == (5.0, "cuda_graph")
    assert (rows["eager"]["median_us"], rows["eager"]["method"]) == (7.0, "events")
    assert len(rows["plain"]["samples_us"]) == 4 and rows["plain"]["checked"] == "plain"
    assert held.said == ["plain", "refuses", "eager", ""]


def test_a_fault_names_who_had_it(held, monkeypatch):
    with pytest.raises(contest.Fault, match="an illegal memory access") as fault:
        held.hold({"plain": lambda: 5.0, "late": lambda: "faults later"})
    assert fault.value.name == "late"
    monkeypatch.setattr(contest, "is_broken", lambda: True)
    with pytest.raises(contest.Fault, match="head_dim") as fault:
        held.hold({"plain": lambda: 5.0, "refuses": refuse})
    assert fault.value.name == "refuses"


# --- measuring processes ----------------------------------------------------------------

CHILD = """
import json, os, sys, time
def tell(**message): print(json.dumps(message), flush=True)
for one in json.loads(sys.argv[-1]):
    batch = one["given"]["batch"]
    print("something that a library prints", flush=True)
    for name in ("good", "bad"):
        if name in one["without"]: continue
        tell(begin=name)
        if name == "bad" and batch == 2:
            tell(fault="bad", reason="an illegal memory access"); os._exit(1)
        if name == "bad" and batch == 3: os.abort()
        if name == "bad" and batch == 4: time.sleep(60)
    tell(begin="")
    if batch == 5: sys.exit("no memory")
    tell(result={"batch": batch, "without": one["without"]})
"""


def test_a_contestant_that_faults_or_hangs_costs_nobody_else_a_row(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    todo = [contest.Todo("decode", {"batch": batch}) for batch in range(1, 7)]
    found = [result for _, result in contest.rounds_of([sys.executable, str(script)], todo, silence_s=3.0)]
    assert [result.get("batch") for result in found] == [1, 2, 3, 4, None, 6]
    assert found[0]["without"] == found[5]["without"] == {}
    assert found[1]["without"] == {"bad": "faulted: an illegal memory access"}
    assert found[2]["without"]["bad"].startswith("faulted: exit status -6")
    assert found[3]["without"] == {"bad": "faulted: nothing for 3 s"}
    assert found[4] == {"failed": "no memory"}


def test_a_problem_that_failed_is_in_the_file_too(tmp_path, monkeypatch):
    todo = attention.chosen(["decode"], ["head_dim=64", "s_k=640", "batch=1,8"])
    came = [(todo[0], {"failed": "no memory"}), (todo[1], {"problem": todo[1].given, "floor_us": 1.0, "rows": {}})]
    monkeypatch.setattr(attention, "rounds_of", lambda command, todo: iter(came))
    attention.run(todo, 2, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["failed"] == {"decode": [{"problem": todo[0].given, "reason": "no memory"}]}
    assert [result["problem"] for result in written["results"]["decode"]] == [todo[1].given]


def test_rounds_are_even(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention.py", "decode", "--rounds", "5", "--list"])
    with pytest.raises(SystemExit):
        attention.main()
    assert "rounds is 5; it must be even" in capsys.readouterr().err


# --- words ------------------------------------------------------------------------------


def row(us: float, **more):
    return {"median_us": us, "spread_us": 0.1, "host_us": 9.0, "method": "cuda_graph", "tflops": 1.0} | {
        "of_roofline": 0.5,
        "error": 2e-3,
        **more,
    }


def test_summaries():
    results = [
        {"rows": {"tunekit": row(10.0), "own kernel": row(8.0), "cuDNN": row(20.0), "FA2": {"refused": "no"}}},
        {"rows": {"tunekit": row(10.0), "flash-attn-4": row(5.0)}},
        {"rows": {"tunekit": row(10.0)}},
        {"rows": {"tunekit": row(1.0, wrong="o: NaN"), "FA2": row(5.0)}},
    ]
    assert list(attention.summary(results)) == [
        "tunekit beside the best peer: 1.00x (geometric mean of 2), worst 0.50x",
        "own kernel beside the best peer: 2.50x (geometric mean of 1), worst 2.50x",
    ]


def test_splits_are_told_as_parts_of_one_launch():
    rows = {
        "one launch": row(10.0),
        "cluster 2": row(5.0),
        "kernel 4": row(6.0),
        "18 launches of 64 keys, torch merge": row(60.0),
        "kernel 8": {"refused": "no"},
        "18 launches of 64 keys, no merge": row(40.0),
    }
    for name, ratio in attention_splits.ratios(rows).items():
        rows[name]["ratio"] = ratio
    (line,) = attention.split_summary([{"problem": {"batch": 8}, "rows": rows}])
    assert line == "batch=8: of one launch's time: cluster 2 0.50, 18 launches of 64 keys, torch merge 6.00"
    assert attention_splits.ratios({"cluster 2": row(5.0)}) == {}


def test_a_row_says_what_came_of_a_contestant():
    assert attention.words_of({"refused": "head_dim"}) == "head_dim"
    assert attention.words_of({"rejected_windows": 12}) == "no time: all 12 windows were rejected"
    words = attention.words_of(row(10.0, wrong="o: NaN", ratio=2.0, method="events"))
    assert "2.00 of one launch" in words and words.endswith("error 2.0e-03 (o: NaN) (events)")
