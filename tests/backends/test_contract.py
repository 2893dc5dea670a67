"""The values that cross process borders, and the entry that answers them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.arch import parse_arch
from tunekit.backends import backend, entry, refusal, symbol_of
from tunekit.backends.contract import CompileRequest
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.spec import load_spec

SPECS = Path(__file__).resolve().parents[1] / "specs"


@pytest.fixture
def request_for(tmp_path):
    def make(**changes):
        fields = {
            "spec": f"{SPECS / 'host_scale.py'}:host_build",
            "implementation": "unruly",
            "arch": "host",
            "static": Values(cols=64, dtype="float32"),
            "tunables": Values(build="good"),
            "symbol": "tunekit_test",
            "out_dir": str(tmp_path / "out"),
        }
        return CompileRequest(**{**fields, **changes})

    return make


def test_a_request_survives_json(request_for):
    request = request_for(tunables=Values(a=1, b=True, c=2.5, d="x"), trace_only=True)
    assert CompileRequest.from_payload(json.loads(json.dumps(request.to_payload()))) == request


def test_a_request_names_its_variant(request_for):
    assert str(request_for()) == "unruly build=good on host"


def test_symbols_are_unique_per_key():
    assert symbol_of("ab" * 32) == "tunekit_" + "ab" * 12
    assert symbol_of("ab" * 32).isidentifier()


def test_an_unknown_backend():
    with pytest.raises(UserError, match=r"unknown backend 'triton' \(known: cutedsl, host, library\)"):
        backend("triton")


def test_a_report_is_json_with_seconds(request_for):
    phases = []
    report = entry.run(request_for().to_payload(), phases.append)
    json.dumps(report, allow_nan=False)
    assert report["status"] == "ok"
    assert phases == ["trace", "compile"]
    assert list(report["seconds"]) == phases
    assert all(seconds > 0 for seconds in report["seconds"].values())


def test_a_trace_alone_compiles_nothing(request_for, tmp_path):
    phases = []
    report = entry.run(request_for(trace_only=True).to_payload(), phases.append)
    assert report["status"] == "ok"
    assert report["files"] == {}
    assert phases == ["trace"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "sm_90a"}, "unruly is for the host backend, which can't build for sm_90a"),
        ({"arch": "sm_91"}, "unknown architecture 'sm_91'; did you mean sm_90a?"),
        ({"spec": "/nowhere/x.py"}, "no spec file /nowhere/x.py"),
        ({"implementation": "unruly2"}, "unknown implementation 'unruly2'; did you mean unruly?"),
    ],
)
def test_what_can_t_be_compiled_is_said(request_for, changes, words):
    report = entry.run(request_for(**changes).to_payload())
    assert report["status"] == "trace_error"
    assert words in report["reason"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", "sm_121a"])
def test_tcgen05_is_refused_where_there_is_none(arch):
    """Case 14: in a sentence, without importing a compiler."""
    implementation = load_spec(f"{SPECS / 'cute_small.py'}:cute_scale").implementation("with_tmem")
    assert refusal(implementation, parse_arch(arch)).startswith(f"with_tmem needs tcgen05, which {arch} has not")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_110a"])
def test_tcgen05_is_accepted_where_there_is(arch):
    """Case 14: sm_103a works."""
    implementation = load_spec(f"{SPECS / 'cute_small.py'}:cute_scale").implementation("with_tmem")
    assert refusal(implementation, parse_arch(arch)) is None


def test_the_contract_imports_nothing_heavy():
    source = (
        "import sys, tunekit.backends, tunekit.backends.entry, tunekit.backends.load, tunekit.probe, tunekit.jobs\n"
        "print([name for name in ('torch', 'cutlass', 'tvm_ffi', 'cuda', 'numpy') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", source], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
