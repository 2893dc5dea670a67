"""The host backend: kernels in C through the same door as a GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from tunekit.backends import entry
from tunekit.backends.contract import CompileRequest
from tunekit.backends.host import compile_c
from tunekit.backends.load import load_artifact
from tunekit.errors import TunekitError
from tunekit.model import Values
from tunekit.spec import load_spec

torch = pytest.importorskip("torch")

SPECS = Path(__file__).resolve().parents[1] / "specs"
COLS = 32


@pytest.fixture
def kernel(tmp_path):
    """Builds a kernel of host_scale.py, loads it, and returns it."""

    def make(spec, implementation, **tunables):
        symbol = "tunekit_" + "_".join(str(value) for value in tunables.values())
        request = CompileRequest(
            spec=f"{SPECS / 'host_scale.py'}:{spec}",
            implementation=implementation,
            arch="host",
            static=Values(cols=COLS, dtype="float32"),
            tunables=Values(tunables),
            symbol=symbol,
            out_dir=str(tmp_path / symbol),
        )
        report = entry.run(request.to_payload())
        assert report["status"] == "ok", report["reason"]
        return load_artifact(Path(report["files"]["so"]), symbol)

    return make


@pytest.fixture
def errors():
    """Runs a kernel on random rows and returns |y - reference| by element; what isn't written is NaN."""

    def run(function, rows=8):
        spec = load_spec(f"{SPECS / 'host_scale.py'}:host_scale")
        x = torch.randn(rows, COLS)
        y = torch.full_like(x, torch.nan)
        function(x, y, 0.5)
        reference = spec.reference(spec.problem({"rows": rows, "cols": COLS}), {"x": x})["y"]
        return (y - reference).abs()

    return run


@pytest.mark.parametrize("unroll", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_every_variant_of_the_good_spec_is_right(kernel, errors, unroll, rows):
    assert errors(kernel("host_scale", "loop", unroll=unroll, delay_us=0), rows).max() < 1e-6


@pytest.mark.parametrize(
    ("fault", "right", "rows"),
    [
        ("none", True, 8),
        ("ulp", True, 8),
        ("odd_rows", True, 8),
        ("odd_rows", False, 7),
        ("half", False, 8),
        ("nothing", False, 8),
        ("nan", False, 8),
        ("one_element", False, 8),
    ],
)
def test_every_fault_is_one(kernel, errors, fault, right, rows):
    """Case 44's kernels: wrong in their ways, and right to 1 ulp."""
    assert bool(errors(kernel("host_faulty", "faulty", fault=fault), rows).max() < 1e-5) is right


def test_right_once(kernel, errors):
    """Case 44: wrong on the second launch only."""
    function = kernel("host_faulty", "faulty", fault="second_launch")
    assert errors(function).max() < 1e-6
    assert errors(function).max() > 0.5


def test_a_kernel_s_error_is_raised(kernel, errors):
    with pytest.raises(RuntimeError, match="asked to fail"):
        errors(kernel("host_faulty", "faulty", fault="error"))


def test_two_kernels_in_one_process(kernel, errors):
    """Each artifact has the symbol that it was asked for, so A, B, A, B stay apart."""
    good, bad = kernel("host_faulty", "faulty", fault="none"), kernel("host_faulty", "faulty", fault="half")
    for _ in range(2):
        assert errors(good).max() < 1e-6
        assert bool(errors(bad).isnan().any())


def test_a_missing_symbol(tmp_path, kernel):
    kernel("host_faulty", "faulty", fault="none")
    so = next(tmp_path.rglob("kernel.so"))
    with pytest.raises(TunekitError, match="exports no function 'nothing'"):
        load_artifact(so, "nothing")


@pytest.mark.parametrize("length", [0, 1, 100, 1000, -1])
def test_a_truncated_artifact(tmp_path, kernel, length):
    """The dynamic linker would die of SIGBUS: it must never see one."""
    kernel("host_faulty", "faulty", fault="none")
    broken = tmp_path / "broken.so"
    broken.write_bytes(next(tmp_path.rglob("kernel.so")).read_bytes()[:length])
    with pytest.raises(TunekitError, match=r"broken.so can't be loaded: it is"):
        load_artifact(broken, "tunekit_none")


def test_no_artifact(tmp_path):
    with pytest.raises(TunekitError, match="can't be loaded: No such file"):
        load_artifact(tmp_path / "absent.so", "tunekit_none")


def test_loading_imports_no_compiler(tmp_path, kernel):
    kernel("host_faulty", "faulty", fault="none")
    so = next(tmp_path.rglob("kernel.so"))
    source = (
        "import sys, pathlib\n"
        "from tunekit.backends.load import load_artifact\n"
        f"load_artifact(pathlib.Path({str(so)!r}), 'tunekit_none')\n"
        "print('cutlass' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", source], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def as_compiler(monkeypatch, directory: Path, script: str) -> None:
    """Have `script` found as the machine's C compiler."""
    directory.mkdir()
    (directory / "cc").write_text(script)
    (directory / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "out" / "source.c"
    path.parent.mkdir()
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.mark.parametrize("script", ["garbage", "#!/nowhere/sh\n"])
def test_a_compiler_that_the_system_cannot_run_is_a_reason(monkeypatch, tmp_path, source, script):
    as_compiler(monkeypatch, tmp_path / "bin", script)
    assert "cc can't be run: [Errno" in str(compile_c(source, source.with_suffix(".so")))


def test_a_compile_needs_no_other_directory_than_its_own(monkeypatch, tmp_path, source):
    """As where /tmp can't be written."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert compile_c(source, source.with_suffix(".so")) is None
    assert sorted(path.name for path in source.parent.iterdir()) == ["source.c", "source.so"]


def test_what_a_killed_compiler_leaves_lies_beside_its_output(monkeypatch, tmp_path, source):
    as_compiler(monkeypatch, tmp_path / "bin", '#!/bin/sh\necho > "$TMPDIR/left"\nsleep 600\n')
    assert compile_c(source, source.with_suffix(".so"), limit_s=0.5) == "cc took over 0.5 s; killed"
    assert (source.parent / "left").exists()


def test_only_the_end_of_what_a_compiler_says_is_read(monkeypatch, tmp_path, source):
    as_compiler(monkeypatch, tmp_path / "bin", "#!/bin/sh\nyes | head -c 50000000\necho the reason >&2\nexit 1\n")
    tracemalloc.start()
    try:
        failed = str(compile_c(source, source.with_suffix(".so")))
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert failed.startswith("cc exited with 1: ") and failed.endswith("the reason") and len(failed) < 2100
    assert most_bytes < 5_000_000
