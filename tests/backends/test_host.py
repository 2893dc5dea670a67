"""The host backend: kernels in C through the same door as a GPU's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.backends import CompileRequest, entry
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
