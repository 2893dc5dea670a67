"""A bundle's attention on the GPU: from Python with nothing else there, and from C (docs/examples/attention.c)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.backends.load import runtime_library
from tunekit.dispatch.bundling import bundle
from tunekit.environment import environment
from tunekit.settings import Settings
from tunekit.spec import load_spec

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_spec("fmha")
ARCH = environment(0).arch or "sm_90a"
DECODE = {"batch": 4, "t": 1, "heads": 64, "kv_heads": 1, "s_k": 700, "head_dim": 128}

SERVE = """
import pathlib, sys
import torch, tunekit
where, given, batch = sys.argv[1], torch.load(sys.argv[2]), int(sys.argv[3])
kernel = tunekit.load("fmha", bundle=where)
q, k, v = (given[name].cuda()[:batch] for name in ("q", "k", "v"))
o = kernel(q, k, v)
assert torch.equal(kernel(q, k, v), o)
assert not {"cutlass", "optuna", "rich", "sqlite_utils"} & set(sys.modules), "a compiler was imported"
torch.save(o.cpu(), sys.argv[2] + ".o")
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A bundle of the decode problem's kernel, moved after it was made; its database and artifacts are gone."""
    root = tmp_path_factory.mktemp("bundle")
    settings = Settings(database=root / "made" / "tunekit.db", artifacts=root / "made" / "artifacts")
    bundle(SPEC, "fmha", ARCH, root / "first", settings, [SPEC.problem(DECODE)], compile=True)
    shutil.rmtree(root / "made", ignore_errors=True)
    (root / "first").rename(root / "bundle")
    return root / "bundle"


@pytest.fixture(scope="module")
def given() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    p = DECODE
    shapes = dict.fromkeys(("k", "v"), (p["batch"], p["s_k"], p["kv_heads"], p["head_dim"]))
    shapes["q"] = (p["batch"], p["t"], p["heads"], p["head_dim"])
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def assert_right(o: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    """Within the spec's relative norm of the oracle."""
    batch = o.shape[0]
    inputs = {name: tensor[:batch] for name, tensor in given.items()}
    problem = SPEC.problem({**DECODE, "batch": batch})
    wanted = SPEC.reference(problem, {**inputs, "scale": DECODE["head_dim"] ** -0.5})["o"].double()
    assert float((o.double() - wanted).norm() / wanted.norm()) <= SPEC.tolerance_of("o").relative_norm


@pytest.mark.parametrize("batch", [4, 1])
def test_a_fresh_process_serves_from_a_bundle_alone(directory, given, batch, tmp_path):
    """Case 22 on the GPU: no database, no compiler on the path; the bundle's own problem and a smaller batch."""
    torch.save(given, tmp_path / "given")
    nowhere = str(tmp_path / "nowhere")
    environ = {**os.environ, "PATH": "", "TUNEKIT_DB": f"{nowhere}.db", "TUNEKIT_CACHE": nowhere}
    command = [sys.executable, "-c", SERVE, str(directory), str(tmp_path / "given"), str(batch)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not Path(nowhere).exists()
    assert_right(torch.load(tmp_path / "given.o"), given)


def test_c_runs_a_bundles_attention(directory, given, tmp_path):
    """Compiled as its head says, on a stream of its own; a head_dim that the kernel is not for is refused in words."""
    from tvm_ffi import libinfo

    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    cuda = Path(nvcc).resolve().parents[1]
    if not (cuda / "include" / "cuda_runtime.h").is_file():
        pytest.skip("needs the CUDA toolkit's headers")
    library, runtime, program = Path(libinfo.find_libtvm_ffi()).parent, runtime_library(), tmp_path / "attention"
    assert runtime is not None
    includes = [libinfo.find_include_path(), libinfo.find_dlpack_include_path(), cuda / "include"]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", *(f"-isystem{path}" for path in includes)]
    links = [f"-L{library}", "-ltvm_ffi", f"-L{cuda / 'lib64'}", "-lcudart", "-ldl", "-lm"]
    source = ROOT / "docs" / "examples" / "attention.c"
    rpath = [f"-Wl,-rpath,{library}", f"-Wl,-rpath,{cuda / 'lib64'}"]
    built = subprocess.run(
        ["cc", *flags, str(source), *links, *rpath, "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr

    (entry,) = json.loads((directory / "bundle.json").read_text())["entries"]
    assert [argument["name"] for argument in entry["arguments"]] == ["q", "k", "v", "o", "scale"]
    assert entry["workspace"] == 0
    sizes = [str(DECODE[axis]) for axis in ("batch", "t", "heads", "kv_heads", "s_k", "head_dim")]
    command = [str(program), str(directory / entry["file"]), entry["symbol"], *sizes]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(runtime.parent)}
    qkv = b"".join(given[name].view(torch.int16).numpy().tobytes() for name in ("q", "k", "v"))
    done = subprocess.run(command, input=qkv, env=environ, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    o = torch.frombuffer(bytearray(done.stdout), dtype=torch.int16).view(torch.bfloat16).view(given["q"].shape)
    assert_right(o, given)

    refused = subprocess.run(
        [*command[:-1], "64"], input=qkv, env=environ, capture_output=True, check=False, timeout=120
    )
    assert refused.returncode == 1 and b"Error" in refused.stderr
