"""``tunekit.load`` on the CPU: real artifacts, real calls, against the spec's oracle."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import torch

import tunekit
from tunekit.dispatch import library, resolver
from tunekit.dispatch.devices import DeviceFacts
from tunekit.environment import environment
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Level
from tunekit.store.artifacts import ArtifactStore


def check(tuned, problem, inputs, outputs):
    """Compare a call's outputs with the oracle."""
    wanted = tuned.spec.reference(tuned.spec.problem(problem), inputs)
    for name, output in outputs.items():
        torch.testing.assert_close(output.double(), wanted[name], rtol=1e-5, atol=1e-5)


def test_the_recorded_winner_serves(tuned, caplog):
    winner = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(64, 64)
    with caplog.at_level(logging.WARNING, "tunekit"):
        y = kernel(x)
    check(tuned, {"rows": 64}, {"x": x}, {"y": y})
    choice = kernel.choice(x)
    assert (choice.level, choice.variant.id, choice.artifact) == (Level.EXACT, winner.variant.id, winner.artifact)
    assert kernel.stats()["exact"] == 1 and not caplog.records


def test_a_bucket_hit_is_the_winner_and_right(tuned, caplog):
    """Case 52: tuned in bucket 64, dispatched at 48: the winner, a right result; no bucket: counted, one warning."""
    winner = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(48, 64)
    with caplog.at_level(logging.WARNING, "tunekit"):
        check(tuned, {"rows": 48}, {"x": x}, {"y": kernel(x)})
        assert kernel.choice(x).variant.id == winner.variant.id and kernel.choice(x).level is Level.BUCKET
        assert not caplog.records
        for rows in (300, 301, 302):
            kernel(torch.randn(rows, 64))
    assert kernel.stats()["bucket"] == 1 and kernel.stats()["nearest"] == 3
    (record,) = caplog.records
    assert "rows=300" in record.getMessage() and "nearest" in record.getMessage()


def test_calls_written_differently_are_one_problem(tuned):
    """Case 21: position, keyword and shuffled keywords resolve once and return the same."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x, y = torch.randn(8, 64), torch.empty(8, 64)
    results = [kernel(x, y, 2.0), kernel(x, scale=2.0, y=y), kernel(scale=2, y=y, x=x)]
    assert all(result is y for result in results)
    check(tuned, {"rows": 8}, {"x": x, "scale": 2.0}, {"y": y})
    assert kernel.stats()["problems"] == 1


def test_flags_scalars_and_outputs(tuned):
    tuned.reference = str(tuned.specs / "host_moments.py")
    for centred in (False, True):
        tuned.tune({"rows": 4, "cols": 32, "centred": centred}, block=16)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(4, 32)
    check(tuned, {"rows": 4, "cols": 32}, {"x": x}, {"y": kernel(x)})
    y, mean = kernel(x, centred=True, scale=3)
    check(tuned, {"rows": 4, "cols": 32, "centred": True}, {"x": x, "scale": 3.0}, {"y": y, "mean": mean})
    mine = torch.empty(4)
    given = kernel(x, None, mine, 1.0, centred=True)
    assert given[1] is mine and given[0].shape == (4, 32)
    assert kernel.stats()["exact"] == 2


def test_two_specs_from_one_factory(tuned):
    """Case 18: two specs whose builds close over another number are two entries, each with its own result."""
    x = torch.zeros(16)
    results = {}
    for addend in (3, 40):
        tuned.reference = f"{tuned.specs / 'factory.py'}:add_{addend}"
        tuned.tune({"n": 16})
        results[addend] = tunekit.load(tuned.reference, **tuned.places)(x)
    assert {addend: float(y[0]) for addend, y in results.items()} == {3: 3.0, 40: 40.0}
    assert len(ArtifactStore(tuned.artifacts).keys()) == 2


def test_no_valid_variant_is_an_error_and_launches_nothing(tuned):
    """Case 57: an error with shape and constraints."""
    tuned.reference = str(tuned.specs / "host_moments.py")
    tuned.tune({"rows": 4, "cols": 32}, block=16)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    y = torch.full((4, 25), 7.0)
    with pytest.raises(NoKernelError) as caught:
        kernel(torch.randn(4, 25), y)
    assert "rows=4 cols=25" in str(caught.value) and "the block must divide cols" in str(caught.value)
    assert (y == 7.0).all() and kernel.stats()["error"] == 1 and kernel.stats()["loaded"] == 0


def test_nothing_compiled_says_how_to_get_it(tuned):
    kernel = tunekit.load(tuned.reference, **tuned.places)
    with pytest.raises(NoKernelError, match=r"none that may be picked is compiled.*tunekit sweep .*host_scale"):
        kernel(torch.randn(4, 64))
    assert kernel.stats()["would_compile"] == 1


def test_a_call_that_nothing_serves_is_told_without_reading_all_again(tuned, monkeypatch):
    """A server catches the error and serves otherwise, at every call; what another process records is seen."""
    kernel = tunekit.load(tuned.reference, **tuned.places)
    reads = []
    read = resolver.read_table
    monkeypatch.setattr(resolver, "read_table", lambda *given: reads.append(given) or read(*given))
    explained = []
    explain = resolver.explain_no_kernel
    monkeypatch.setattr(resolver, "explain_no_kernel", lambda *given: explained.append(given) or explain(*given))
    for _ in range(3):
        with pytest.raises(NoKernelError, match="no kernel serves"):
            kernel(torch.randn(8, 64))
    assert len(reads) == len(explained) == 1
    tuned.tune({"rows": 8}, unroll=4, delay_us=0)
    assert kernel(torch.randn(8, 64)).shape == (8, 64) and len(reads) == 2


def test_the_default_serves_where_nothing_was_measured(tuned, caplog):
    tuned.compile(tuned.variant(), rows=8)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(8, 64)
    with caplog.at_level(logging.WARNING, "tunekit"):
        check(tuned, {"rows": 8}, {"x": x}, {"y": kernel(x)})
    assert kernel.stats()["default"] == 1 and "served by default" in caplog.text


def test_a_winner_without_its_artifact_falls_to_the_next_level(tuned):
    """The default policy never compiles: the next level that has an artifact serves."""
    tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    choice = kernel.choice(torch.randn(64, 64))
    assert choice.level is Level.NEAREST and choice.variant.tunables.unroll == 4
    assert any(line.startswith("exact: loop unroll=8") and "not in the store" in line for line in choice.fell_back_from)
    assert kernel.stats()["would_compile"] == 1 and kernel.stats()["compiled"] == 0


def test_strict_raises_instead_of_falling_back(tuned):
    tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, strict=True, **tuned.places)
    with pytest.raises(NoKernelError, match=r"strict mode: .* served by exact .*not in the store"):
        kernel(torch.randn(64, 64))
    assert kernel.stats()["would_compile"] == 1
    assert kernel(torch.randn(1024, 64)).shape == (1024, 64)
    with pytest.raises(UserError, match="strict mode never compiles"):
        tunekit.load(tuned.reference, strict=True, compile="allow")
    with pytest.raises(UserError, match="'never', 'allow' or 'background'"):
        tunekit.load(tuned.reference, compile="always")


@pytest.mark.parametrize("damage", ["flip", "empty", "gone"])
def test_a_damaged_artifact_is_recovered_from_once_and_said(tuned, caplog, damage):
    winner = tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    store = ArtifactStore(tuned.artifacts)
    so = store.path(store.get(winner.artifact))
    content = so.read_bytes()
    so.unlink()
    if damage != "gone":
        so.write_bytes(b"" if damage == "empty" else content[:-1] + bytes([content[-1] ^ 1]))
    library._loaded.pop(winner.artifact, None)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(64, 64)
    with caplog.at_level(logging.WARNING, "tunekit"):
        check(tuned, {"rows": 64}, {"x": x}, {"y": kernel(x)})
        kernel(torch.randn(50, 64))
    assert kernel.choice(x).level is Level.NEAREST
    assert (
        sum("artifact" in record.getMessage() and winner.artifact in record.getMessage() for record in caplog.records)
        == 1
    )


def test_an_artifact_that_does_not_load_is_recovered_from_once_and_said(tuned, caplog):
    """Case 24 without a compiler: sound bytes that are no library (another machine's, say)."""
    variant = tuned.variant(unroll=8, delay_us=0)
    winner = tuned.put(tuned.winner(variant, {"rows": 64}))
    text = tuned.root / "text.so"
    text.write_text("no library")
    ArtifactStore(tuned.artifacts).put(winner.artifact, winner.symbol, {"so": text})
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    with caplog.at_level(logging.WARNING, "tunekit"):
        for rows in (64, 60, 40):
            assert kernel(torch.randn(rows, 64)).shape == (rows, 64)
    assert kernel.stats()["recovered"] == 1
    assert sum("can't serve" in record.getMessage() for record in caplog.records) == 1


def test_edited_sources_are_not_served_by_the_old_artifact(tuned, tmp_path):
    spec_file = tmp_path / "edited.py"
    spec_file.write_text((tuned.specs / "factory.py").read_text())
    tuned.reference = f"{spec_file}:add_3"
    tuned.tune({"n": 16})
    assert tunekit.load(tuned.reference, **tuned.places)(torch.zeros(16))[0] == 3.0
    spec_file.write_text(spec_file.read_text().replace("x[i] + ADDEND", "x[i] - ADDEND"))
    kernel = tunekit.load(tuned.reference, **tuned.places)
    with pytest.raises(NoKernelError, match="sources changed since it was measured"):
        kernel(torch.zeros(16))


class TwoDevices:
    """A machine of two GPUs of different architectures, on which CPU tensors play the second one's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.asked: list[int] = []

    def facts(self, index: int) -> DeviceFacts:
        self.asked.append(index)
        arch, count = {0: ("sm_90a", 132), 1: ("host", 148)}[self.index if index == -1 else index]
        return DeviceFacts(index, arch, count, environment(0))


def test_a_device_takes_its_own_architecture(tuned):
    """Case 22: device 1 gets device 1's architecture and SM count, not device 0's."""
    tuned.tune({"rows": 8}, unroll=4, delay_us=0)
    x = torch.randn(8, 64)
    second = tunekit.load(tuned.reference, devices=TwoDevices(1), **tuned.places)
    assert second(x).shape == (8, 64)
    assert (second._resolver.devices.facts(1).arch, second._resolver.devices.facts(1).sm_count) == ("host", 148)
    first = tunekit.load(tuned.reference, devices=TwoDevices(0), **tuned.places)
    assert first._resolver.devices.facts(0).sm_count == 132
    with pytest.raises(NoKernelError, match="on sm_90a: it has implementations for the CPU"):
        first(x)


def test_another_environment_is_a_fallback_with_one_warning(tuned, caplog):
    """Case 17: served, but labelled, counted as a fallback and said."""
    tuned.tune({"rows": 64}, environment=replace(environment(0), driver="1.2"), unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    with caplog.at_level(logging.WARNING, "tunekit"):
        kernel(torch.randn(64, 64))
    assert kernel.stats()["exact"] == 0 and kernel.stats()["nearest"] == 1
    assert "measured elsewhere (driver 1.2, here unknown)" in caplog.text


def test_threads_on_a_cold_key_load_once(tuned):
    """Case 54 on the CPU: eight threads, one barrier, a cold key, 100 rounds: one load a round, no error."""
    winner = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    for rows in range(1, 101):
        library._loaded.pop(winner.artifact, None)
        kernel = tunekit.load(tuned.reference, **tuned.places)
        barrier, errors = threading.Barrier(8), []
        x = torch.randn(rows, 64)

        def call(kernel=kernel, barrier=barrier, errors=errors, x=x):
            barrier.wait()
            try:
                check(tuned, {"rows": len(x)}, {"x": x}, {"y": kernel(x)})
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [] and kernel.stats()["problems"] == kernel.stats()["loaded"] == 1


def test_the_hot_path_touches_no_database_lock_or_environment(tuned, monkeypatch):
    """After the first call of a key: a dict hit and the call."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(8, 64)
    kernel(x)

    def forbidden(*args, **keywords):
        raise AssertionError("the hot path must not come here")

    class NoLock:
        __enter__ = __exit__ = forbidden

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_lock", NoLock())
        patch.setattr(kernel, "_learn", forbidden)
        patch.setattr("os.environ", None)
        patch.setattr("sqlite3.connect", forbidden)
        y = kernel(x)
    assert y.shape == (8, 64)


def test_a_bad_call_after_a_good_one_is_refused_too(tuned):
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(64, 64)
    kernel(x)
    with pytest.raises(UserError, match="not contiguous"):
        kernel(x.t())
    with pytest.raises(UserError, match="'x' is list"):
        kernel([1.0])
    with pytest.raises(UserError, match="tensor on meta"):
        kernel(x.to("meta"))
    with pytest.raises(UserError, match="sparse_coo tensor on cpu"):
        kernel(x.to_sparse())
    with pytest.raises(UserError, match="'x' is ndarray"):
        kernel(x.numpy())
    with pytest.raises(UserError, match="takes 3 arguments"):
        kernel(x, None, 1.0, 2.0)
    with pytest.raises(UserError, match=r"field 'rows': \[64\] is list, not int"):
        kernel(x, rows=[64])
    assert kernel(x).shape == (64, 64)


def test_places_may_be_given_as_strings(tuned):
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    kernel = tunekit.load(tuned.reference, database=str(tuned.database), artifacts=str(tuned.artifacts))
    assert kernel(torch.ones(64, 64)).shape == (64, 64)
    assert kernel.stats()["exact"] == 1


def test_what_names_no_spec_is_refused_in_a_line(tuned):
    for wrong in (tuned.spec, None):
        with pytest.raises(UserError, match="by its name or its file's path, not as ") as caught:
            tunekit.load(wrong)
        assert len(str(caught.value)) < 100


def test_a_problem_that_is_none_is_refused_by_the_specs_name(tuned):
    kernel = tunekit.load(tuned.reference, **tuned.places)
    with pytest.raises(UserError, match=r"^host_scale: a problem is a dict of axis values, not str"):
        kernel.bind("rows=64")
    with pytest.raises(UserError, match=r"^host_scale: unknown axis 'row'; did you mean rows"):
        kernel.bind({"row": 64})
    with pytest.raises(UserError, match=r"^host_scale: field 'rows': '64' is str, not int"):
        kernel.bind({"rows": "64"})
    with pytest.raises(UserError, match="device is 'cpu'; it must be torch's index"):
        kernel.bind({"rows": 64}, "cpu")


def test_tensors_where_the_spec_has_no_kernel_are_refused_in_a_line(tuned):
    q, kv = torch.ones(2, 1, 8, 64, dtype=torch.bfloat16), torch.ones(2, 32, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(NoKernelError, match=r"on the CPU: it has implementations for sm_90a.*; use") as caught:
        tunekit.load("fmha", **tuned.places)(q, kv, kv)
    assert "tunekit sweep" not in str(caught.value) and len(str(caught.value)) < 250


def test_what_failed_is_tried_again_after_a_refresh(tuned, tmp_path):
    """An artifact that can't be loaded is ruled out; once it is mended, a refresh takes it up."""
    best = tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    store = ArtifactStore(tuned.artifacts)
    sound = store.get(best.artifact)
    content, text = tmp_path / "sound.so", tmp_path / "text.so"
    content.write_bytes(store.path(sound).read_bytes())
    text.write_text("no library")
    store.put(best.artifact, sound.symbol, {"so": text})
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(64, 64)
    kernel(x)
    assert kernel.choice(x).variant.tunables.unroll == 4
    store.put(best.artifact, sound.symbol, {"so": content})
    kernel.refresh()
    assert kernel.choice(x).variant.tunables.unroll == 8
    check(tuned, {"rows": 64}, {"x": x}, {"y": kernel(x)})
