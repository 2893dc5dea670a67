"""A bundle's kernels called from C: the example of docs/serving.md, compiled and run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tunekit.backends.host import compiler
from tunekit.backends.load import runtime_library
from tunekit.dispatch.bundling import bundle
from tunekit.settings import Settings
from tunekit.spec import load_spec

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "serve.c"
CUTE = f"{Path(__file__).parents[1] / 'specs' / 'cute_small.py'}:cute_scale"


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """The example, built as its head says; run with a file, a symbol, rows and columns."""
    from tvm_ffi import libinfo

    library = Path(libinfo.find_libtvm_ffi()).parent
    program = tmp_path_factory.mktemp("c") / "serve"
    includes = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    links = [f"-L{library}", "-ltvm_ffi", "-ldl", f"-Wl,-rpath,{library}"]
    strict = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run(
        [compiler(), *strict, str(EXAMPLE), *includes, *links, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    def run(directory: Path, entry: dict, *sizes: int, **environ: str) -> subprocess.CompletedProcess:
        words = [str(program), str(directory / entry["file"]), entry["symbol"], *map(str, sizes)]
        return subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)

    return run


def entry_of(directory: Path, **problem: object) -> dict:
    """A problem's entry, as a program in any language finds it."""
    entries = json.loads((directory / "bundle.json").read_text())["entries"]
    (found,) = [entry for entry in entries if problem.items() <= entry["problem"].items()]
    return found


@pytest.fixture
def directory(tuned, tmp_path) -> Path:
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    tuned.tune({"rows": 8, "cols": 16}, unroll=2, delay_us=0)
    bundle(tuned.spec, tuned.reference, "host", tmp_path / "bundle", Settings(**tuned.places))
    return tmp_path / "bundle"


def test_c_calls_a_kernel_of_a_bundle(serve, directory):
    """Right numbers: y = scale * x + column / columns, for both kernels, also at another number of rows."""
    for rows, cols, asked in ((64, 64, 64), (8, 16, 5)):
        done = serve(directory, entry_of(directory, rows=rows, cols=cols), asked, cols)
        assert done.returncode == 0, done.stderr
        wanted = [0.5 * i + (i % cols) / cols for i in range(asked * cols)]
        assert [float(line) for line in done.stdout.split()] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("sizes", [(0, 64), (-1, 64), (2**31, 64), (2**62, 64), (8, -(2**63))])
def test_c_is_told_of_sizes_that_there_are_not(serve, directory, sizes):
    done = serve(directory, entry_of(directory, cols=64), *sizes)
    assert done.returncode == 2 and "ROWS and COLS are numbers from 1" in done.stderr


def test_the_index_says_what_the_c_program_must_pass(directory):
    entry = entry_of(directory, cols=16)
    assert entry["arguments"] == [
        {"name": "x", "role": "input", "dtype": "float32", "shape": ["rows", "cols"]},
        {"name": "y", "role": "output", "dtype": "float32", "shape": ["rows", "cols"]},
        {"name": "scale", "role": "number", "dtype": "float32", "value": 0.5},
    ]
    assert entry["workspace"] == 0


def test_c_reads_the_error_that_a_kernel_raised(serve, directory):
    done = serve(directory, entry_of(directory, cols=16), 8, 64)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "RuntimeError: compiled for another number of columns\n"


def test_c_is_told_of_a_file_or_symbol_that_is_not_there(serve, directory):
    entry = entry_of(directory, cols=16)
    assert "no_such" in serve(directory, {**entry, "symbol": "no_such"}, 1, 16).stderr
    assert serve(directory, {**entry, "file": "no_such.so"}, 1, 16).returncode == 2


def test_c_loads_a_gpu_kernel_and_reads_its_refusal(serve, tmp_path):
    """A real sm_90a kernel checks its arguments before it touches a GPU: a matrix is not the vector that it takes."""
    pytest.importorskip("cutlass", reason="compiles a CuTeDSL kernel")
    spec, out = load_spec(CUTE), tmp_path / "bundle"
    places = Settings(tmp_path / "tunekit.db", tmp_path / "artifacts", jobs=1)
    bundle(spec, CUTE, "sm_90a", out, places, [spec.problem({})], compile=True)
    library = runtime_library()
    assert library is not None
    done = serve(out, entry_of(out, n=1024), 2, 512, LD_LIBRARY_PATH=str(library.parent))
    assert done.returncode == 1
    assert done.stderr.startswith(("TypeError: ", "ValueError: ")) and "ndim" in done.stderr
