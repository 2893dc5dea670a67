"""The probe's comparison of three readings."""

from __future__ import annotations

from tunekit.model import Footprint
from tunekit.probe import Probe


def test_agreement_is_over_what_is_known():
    probe = Probe(
        declared=Footprint(smem_bytes=4000, threads=128),
        traced=Footprint(smem_bytes=4000, tmem_columns=64, threads=128, cluster=1),
        compiled=Footprint(smem_bytes=4000, tmem_columns=64, threads=128, cluster=1, registers=40),
    )
    assert probe.agrees and probe.disagreements() == []


def test_a_disagreement_names_every_reading():
    probe = Probe(Footprint(smem_bytes=4000), Footprint(smem_bytes=4096), Footprint(smem_bytes=4096))
    assert not probe.agrees
    assert probe.disagreements() == ["smem: declared 4000, traced 4096, compiled 4096"]


def test_the_best_known_counts():
    probe = Probe(Footprint(smem_bytes=1, threads=128), Footprint(smem_bytes=2), Footprint(smem_bytes=3))
    assert probe.footprint() == Footprint(smem_bytes=3, threads=128)


def test_nothing_known():
    assert Probe().agrees and Probe().footprint() == Footprint()


def test_from_a_report():
    report = {"traced": {"smem_bytes": 7, "threads": None}, "compiled": {"smem_bytes": 8}}
    probe = Probe.of_report(report, Footprint(smem_bytes=7))
    assert probe.disagreements() == ["smem: declared 7, traced 7, compiled 8"]
