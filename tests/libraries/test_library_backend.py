"""A library's declaration, its entry and its keys; and what the commands say where a library has no meaning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.libraries.conftest import ABSENT, BY_FAKE, BY_TORCH, ON_GPU, PACKAGE, Install
from tunekit import identity, space
from tunekit.arch import parse_arch
from tunekit.backends import refusal
from tunekit.backends.contract import CompileRequest
from tunekit.backends.entry import run
from tunekit.backends.load import load_artifact
from tunekit.check.targets import select
from tunekit.cli import main
from tunekit.errors import SpecError, TunekitError
from tunekit.identity import distribution_version
from tunekit.model import Footprint, Values
from tunekit.spec import Implementation, Tunable, load_spec
from tunekit.spec.packages import absence, installed

ROOT = Path(__file__).resolve().parents[2]


def declare(**changes: Any) -> Implementation:
    fields: dict[str, Any] = {
        "name": "mine",
        "requires": {"host"},
        "backend": "library",
        "package": "torch",
        "tunables": (Tunable("block", (1,)),),
        "build": lambda b: print,
        "defaults": ({"block": 1},),
    }
    return Implementation(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"package": ""}, "package is ''; a library names its distribution"),
        ({"package": "torch>=2"}, "package is 'torch>=2'"),
        ({"backend": "host"}, "only an implementation of backend 'library' names a package"),
        ({"footprint": lambda v, arch: Footprint()}, "footprint.*means nothing for a library"),
        ({"compile_options": "-O3"}, "compile_options.*means nothing for a library"),
    ],
)
def test_a_declaration_that_makes_no_sense(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        declare(**changes)


@pytest.mark.parametrize(
    ("requires", "host", "gpu"),
    [({"host"}, True, False), (set(), False, True), ({"tma"}, False, True), ({"tcgen05"}, False, False)],
)
def test_where_a_library_runs(requires: set[str], host: bool, gpu: bool) -> None:
    """As the other implementations: without a feature on every GPU, and on the host only if it says so."""
    implementation = declare(requires=requires)
    for name, runs in (("host", host), ("sm_90a", gpu)):
        said = refusal(implementation, parse_arch(name))
        assert (said is None) == runs, said
        assert said == implementation.unsupported(parse_arch(name))


def test_what_is_said_of_a_package(install: Install) -> None:
    fake = load_spec(BY_FAKE).implementation("fake")
    assert absence(fake) == ABSENT.partition(": ")[2] and installed(fake) == ""
    assert absence(declare(package="tunekit-none")) == "tunekit-none is not installed (pip install tunekit-none)"
    install("1.5")
    assert absence(fake) is None and installed(fake) == f"{PACKAGE} 1.5"
    loop = load_spec(BY_FAKE).implementation("loop")
    assert absence(loop) is None and installed(loop) == ""


def test_the_key_covers_the_librarys_version_and_not_the_compilers(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> dict[str, str]:
        spec = load_spec(BY_FAKE)
        problem, arch = spec.problem({"rows": 8}), parse_arch("host")
        defaults = space.default_variants(spec, arch, problem)
        return {v.implementation: space.compile_key(spec, v, problem) for v in defaults}

    install("1.0")
    before = keys()
    install("1.1")
    after = keys()
    assert before["fake"] != after["fake"] and before["loop"] == after["loop"]
    monkeypatch.setattr(identity, "toolchain", lambda: {"nvidia-cutlass-dsl": "9.9"})
    assert keys()["fake"] == after["fake"] and keys()["loop"] != after["loop"]


@pytest.fixture
def request_for(tmp_path: Path) -> Any:
    def make(**changes: Any) -> CompileRequest:
        fields: dict[str, Any] = {
            "spec": BY_TORCH,
            "implementation": "by_torch",
            "arch": "host",
            "static": Values(cols=64),
            "tunables": Values(pause_us=0),
            "symbol": "tunekit_test",
            "out_dir": str(tmp_path / "out"),
        }
        return CompileRequest(**{**fields, **changes})

    return make


def test_a_compile_makes_an_entry_from_which_the_function_is_made(request_for: Any) -> None:
    import torch

    phases: list[str] = []
    report = run(request_for().to_payload(), phases.append)
    assert report["status"] == "ok" and phases == ["trace", "record"]
    assert report["facts"] == {"library": f"torch {distribution_version('torch')}"}
    assert report["traced"] == report["compiled"] == run(request_for(trace_only=True).to_payload())["traced"]
    function = load_artifact(Path(report["files"]["library"]), "unused")
    x, y = torch.ones(2, 64), torch.empty(2, 64)
    function(x, y, 2.0)
    assert torch.equal(y, 2 * x)


def test_an_entry_that_can_not_be_used(request_for: Any, install: Install, tmp_path: Path) -> None:
    install("1.0")
    report = run(request_for(spec=BY_FAKE, implementation="fake").to_payload())
    entry = Path(report["files"]["library"])
    install(None)
    report = run(request_for(spec=BY_FAKE, implementation="fake").to_payload())
    assert report["status"] == "trace_error" and report["reason"] == ABSENT
    install("1.1")
    with pytest.raises(TunekitError, match=f"was made with {PACKAGE} 1.0, and {PACKAGE} 1.1 is installed"):
        load_artifact(entry, "unused")
    install(None)
    with pytest.raises(TunekitError, match=r"is not installed \(pip install 'tunekit\[fake\]'\)"):
        load_artifact(entry, "unused")
    install("1.0", module="def function(pause_us): return 7\n")
    with pytest.raises(TunekitError, match="fake: build must return a function, not int"):
        load_artifact(entry, "unused")
    good = json.loads(entry.read_bytes())
    for bad, words in [
        (b"", "no entry of a library"),
        (b"[]", "no entry of a library"),
        (json.dumps({**good, "format": 2}).encode(), "another format"),
        (json.dumps({**good, "more": 1}).encode(), "no entry of a library"),
        (json.dumps({**good, "version": 2}).encode(), "for library_fake 2, not for library_fake 1"),
    ]:
        file = tmp_path / "bad.library"
        file.write_bytes(bad)
        with pytest.raises(TunekitError, match=f"{file} can't be loaded: .*{words}"):
            load_artifact(file, "unused", load_spec(BY_FAKE))


def test_a_lookup_imports_no_library(tmp_path: Path) -> None:
    source = (
        "import sys, tunekit\n"
        f"choice = tunekit.best({BY_TORCH!r}, rows=8)\n"
        "heavy = [name for name in ('torch', 'cutlass', 'tvm_ffi', 'numpy') if name in sys.modules]\n"
        "print(choice.variant.implementation, choice.level, choice.artifact is not None, heavy)"
    )
    environment = {"PYTHONPATH": str(ROOT), "TUNEKIT_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "by_torch default True []"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    out, err = capsys.readouterr()
    return out + err


def test_what_list_and_explain_say_of_a_missing_library(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"dropped: 2 by {PACKAGE}_installed\n  {ABSENT}\n" in said(capsys, "list", BY_FAKE)
    (listed,) = json.loads(said(capsys, "list", BY_FAKE, "--json"))
    assert listed["absent"] == [ABSENT] and listed["dropped"] == {f"{PACKAGE}_installed": 2}
    told = said(capsys, "explain", BY_FAKE)
    assert "2 of 4 variants remain" in told and ABSENT in " ".join(told.split())
    (told,) = [fate for entry in json.loads(said(capsys, "explain", BY_FAKE, "--json")) for fate in entry["dropped"]]
    assert told["why"] == ABSENT and told["count"] == 2
    install("1.0")
    assert PACKAGE not in said(capsys, "list", BY_FAKE)


def test_what_has_no_meaning_for_a_library_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    probed = said(capsys, "probe", BY_TORCH, "--implementation", "by_torch")
    assert probed.count("a library's function: nothing to trace") == 2
    simulated = said(capsys, "simulate", ON_GPU, "--arch", "sm_90a", status=2)
    library = f"torch {distribution_version('torch')}"
    assert f"by_torch pause_us=0 is a function of {library}: there is no compiled kernel to simulate" in simulated


def test_the_check_of_compile_times_leaves_libraries_out() -> None:
    spec = load_spec(BY_TORCH)
    for which in ("default", "all"):
        selection = select(spec, BY_TORCH, None, None, which, None)  # type: ignore[arg-type]
        assert {target.variant.implementation for target in selection.targets} == {"loop"}
        assert selection.notes == ("library_scale: by_torch is a library's function: nothing is compiled",)
