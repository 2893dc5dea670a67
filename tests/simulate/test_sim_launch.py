"""Launch capture: what real host code, cross-compiled without a GPU, launches; and the memory of its arguments."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernel_specs.kernels import fmha_sm90_space, fmha_sm100_space
from tunekit.arch import parse_arch
from tunekit.backends.contract import CompileRequest
from tunekit.backends.cutedsl.link import link
from tunekit.backends.host import compiler
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.simulate.launch.arguments import ALIGNMENT, GUARD_BYTES, Buffers, Wanted
from tunekit.simulate.launch.capture import against_directives
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.ptx.read import read_module
from tunekit.spec import load_spec

HERE = Path(__file__).resolve().parent
SMALL = HERE.parent / "specs" / "cute_small.py"
ARCHES = ("sm_90a", "sm_100a")
SCALE = {"smem_bytes": 4000, "smem_align": 128, "static_bytes": 512, "cluster": 2, "threads": 128, "tmem": 0}
FMHA = {"batch": 2, "heads": 4, "kv_heads": 2, "t": 3, "s_k": 200, "head_dim": 64}
FMHA_SM90, FMHA_SM100 = ({**d, "pv_n_tile": 64} for d in (fmha_sm90_space.DEFAULTS[0], fmha_sm100_space.BASE))
XY = [("x", "float32", (1024,)), ("y", "float32", (1024,))]
HOST_PTX = """.version 8.8
.target sm_90a
.address_size 64
.shared .align 4 .b8 shelf[64];
.visible .entry k(.param .u32 p) { .shared .align 4 .b8 drawer[40]; ret; }
.visible .entry clustered() .reqnctapercluster 1, 1, 1 { ret; }
"""


def python(script, argument):
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / script), json.dumps(argument)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The directories of the compiled kernels, by name and arch."""
    wanted = {}
    spec = load_spec("fmha")
    fmha_static = spec.static(spec.problem(FMHA))
    for arch in ARCHES:
        fmha = ("sm90", FMHA_SM90) if arch == "sm_90a" else ("sm100", FMHA_SM100)
        for name, reference, implementation, static, tunables in (
            ("scale", f"{SMALL}:cute_scale", "plain", {"n": 1024}, SCALE),
            ("two", f"{SMALL}:cute_layout", "layout", {"n": 1024}, {"layout": "two_kernels"}),
            ("fmha", "fmha", fmha[0], fmha_static, fmha[1]),
        ):
            out = tmp_path_factory.mktemp(f"{name}_{arch}")
            wanted[name, arch] = CompileRequest(
                reference, implementation, arch, Values(static), Values(tunables), f"tunekit_{name}", str(out)
            )
    reports = python("launch_compile.py", [request.to_payload() for request in wanted.values()])
    assert [report["reason"] for report in reports] == [""] * len(wanted)
    return {key: Path(request.out_dir) for key, request in wanted.items()}


@pytest.fixture(scope="module")
def host_code(tmp_path_factory):
    """The library of launch_host.c, and one that calls what nobody has."""
    out = tmp_path_factory.mktemp("host_code")
    (out / "stranger.c").write_text("int _cudaNoSuchCall(void); int __tvm_ffi_f(void) { return _cudaNoSuchCall(); }")
    for source in (HERE / "launch_host.c", out / "stranger.c"):
        obj = out / f"{source.stem}.o"
        subprocess.run([compiler(), "-c", "-fPIC", "-O1", "-o", str(obj), str(source)], check=True)
        link(obj, obj.with_suffix(".so"))
    return out


@pytest.fixture(scope="module")
def captured(compiled, host_code):
    """What every job came to, by name; all captured in one process."""
    jobs = {}
    for (name, arch), out in compiled.items():
        job = {"library": str(out / "kernel.so"), "symbol": f"tunekit_{name}", "ptx": str(out / "kernel.ptx")}
        if name == "fmha":
            jobs[f"{name} {arch}"] = {**job, "arch": arch, "spec": "fmha", "problem": FMHA}
            continue
        jobs[f"{name} {arch}"] = {**job, "arch": arch, "tensors": XY, "numbers": [0.5] if name == "scale" else []}
    good = jobs["scale sm_90a"]
    jobs["wrong shape"] = {**good, "tensors": [XY[0], ("y", "float32", (1000,))]}
    jobs["wrong dtype"] = {**good, "tensors": [("x", "float16", (1024,)), XY[1]]}
    jobs["no symbol"] = {**good, "symbol": "tunekit_other"}
    jobs["other ptx"] = {**good, "ptx": str(compiled["two", "sm_90a"] / "kernel.ptx")}
    host = {"ptx": HOST_PTX, "arch": "sm_100a", "tensors": [], "numbers": []}
    for symbol in (
        *("attributes", "device", "unknown_attribute", "allocates", "required_cluster"),
        *("much_shared", "many_threads", "empty_grid", "unknown_kernel"),
    ):
        jobs[symbol] = {**host, "library": str(host_code / "launch_host.so"), "symbol": symbol}
    jobs["stranger"] = {**host, "library": str(host_code / "stranger.so"), "symbol": "f"}
    jobs["stranger object"] = {**host, "library": str(host_code / "stranger.o"), "symbol": "f"}
    beside = {
        "object beside the real runtime": {**good, "library": str(compiled["scale", "sm_90a"] / "kernel.o")},
        "library beside the real runtime": good,
    }
    return {**python("launch_capture.py", jobs), **python("launch_capture.py", beside)}


def pointer(address):
    return struct.pack("<Q", address).hex()


@pytest.mark.parametrize("arch", ARCHES)
def test_a_kernel_with_a_cluster(captured, arch):
    got = captured[f"scale {arch}"]
    (launch,) = got["launches"]
    assert launch["kernel"].startswith("kernel_")
    assert (launch["grid"], launch["block"], launch["cluster"]) == ([2, 1, 1], [128, 1, 1], [2, 1, 1])
    assert launch["shared_bytes"] == 4000
    assert launch["attributes"]["cluster dimension"] == [2, 1, 1]
    assert launch["attributes"]["cooperative"] == 0
    x, y = got["addresses"]["x"], got["addresses"]["y"]
    assert launch["parameters"] == [pointer(x), pointer(y), struct.pack("<f", 0.5).hex()]


@pytest.mark.parametrize("arch", ARCHES)
def test_two_launches_of_one_call_are_in_order(captured, arch):
    first, second = captured[f"two {arch}"]["launches"]
    assert (first["block"], first["shared_bytes"], first["cluster"]) == ([64, 1, 1], 3000, [1, 1, 1])
    assert (second["block"], second["shared_bytes"]) == ([256, 1, 1], 100)
    assert first["kernel"] != second["kernel"]
    assert first["parameters"] == second["parameters"]


@pytest.mark.parametrize("arch", ARCHES)
def test_attention_gets_its_tensor_maps(captured, arch):
    """The host code encodes them itself, the tensor's address first, at the alignment that the ISA demands."""
    got = captured[f"fmha {arch}"]
    (launch,) = got["launches"]
    assert launch["block"] == [384, 1, 1]
    assert np.prod(launch["grid"]) == 4  # 2 batches x 2 KV heads, one M tile
    maps = [(at, p) for at, p in zip(launch["offsets"], launch["parameters"], strict=True) if len(p) == 2 * 128]
    assert len(maps) == 4
    assert all(at % 64 == 0 for at, _ in maps)
    assert sorted(p[:16] for _, p in maps) == sorted(pointer(got["addresses"][name]) for name in ("q", "k", "v", "o"))
    assert got["drawn"] == {"q": True, "k": True, "v": True}
    assert got["poisoned"] == {"o": True}


def test_an_exported_object_needs_no_process_of_its_own(captured):
    """It is linked with its stand-in, so the compiler that made it may be loaded beside."""
    got = captured["object beside the real runtime"]["launches"][0]
    shape = ("kernel", "grid", "block", "cluster", "shared_bytes", "attributes")
    assert {key: got[key] for key in shape} == {key: captured["scale sm_90a"]["launches"][0][key] for key in shape}


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        ("wrong shape", "LaunchError", "y.shape[0]"),
        ("wrong dtype", "LaunchError", "float32"),
        ("no symbol", "TunekitError", "exports no function 'tunekit_other'"),
        ("other ptx", "LaunchError", "is not in the PTX (kernels: kernel_cutlass_kernel"),
        ("stranger", "TunekitError", "undefined symbol: _cudaNoSuchCall"),
        ("stranger object", "TunekitError", "undefined reference to `_cudaNoSuchCall'"),
        ("library beside the real runtime", "TunekitError", "libcute_dsl_runtime.so is loaded in this process"),
        ("allocates", "LaunchError", "the host code calls cudaMalloc, which launch capture does not model"),
        ("unknown_attribute", "LaunchError", "asks for device attribute 9999"),
        ("unknown_kernel", "LaunchError", "kernel nobody is not in the PTX (kernels: k, clustered)"),
        ("much_shared", "LaunchError", "k can't be launched: smem 232452 B > 232448 B (sm_100a)"),
        ("many_threads", "LaunchError", "k can't be launched: 2048 threads a CTA > 1024 (sm_100a)"),
        ("empty_grid", "LaunchError", "grid (1, 0, 1) x block (32, 1, 1) has a side below 1"),
    ],
)
def test_what_goes_wrong_is_said(captured, job, error, words):
    assert captured[job].get("error") == error, captured[job]
    assert words in captured[job]["words"]


@pytest.mark.parametrize(
    ("block", "cluster", "words"),
    [
        ((128, 1, 1), (2, 1, 1), None),
        ((1, 128, 1), (2, 1, 1), "(1, 128, 1) where its .reqntid demands (128, 1, 1)"),
        ((128, 1, 1), (1, 1, 1), "(1, 1, 1) where its .reqnctapercluster demands (2, 1, 1)"),
    ],
)
def test_the_kernels_own_directives_are_kept(block, cluster, words):
    """PTX ISA 11.2 and 11.4: another block or cluster than the kernel requires does not start."""
    kernel = read_module(HOST_PTX.replace(".reqnctapercluster 1, 1, 1", ".reqntid 128 .reqnctapercluster 2")).kernels
    launch = Launch("clustered", (2, 1, 1), block, cluster, 0, {}, ())
    assert against_directives(launch, kernel["clustered"]) == words


def test_more_threads_than_maxntid_do_not_start():
    kernel = read_module(HOST_PTX.replace(".reqnctapercluster 1, 1, 1", ".maxntid 64, 2")).kernels["clustered"]
    launches = [Launch("clustered", (1, 1, 1), (threads, 1, 1), (1, 1, 1), 0, {}, ()) for threads in (128, 160)]
    assert [against_directives(one, kernel) for one in launches] == [None, "160 threads a CTA > 128 (.maxntid)"]


@pytest.mark.parametrize(
    ("block", "cluster", "words"),
    [
        ((1, 1, 65), (1, 1, 1), "block (1, 1, 65) is over the limit (1024, 1024, 64)"),
        ((1, 1, 1), (0, 1, 1), "cluster (0, 1, 1) has a side below 1"),
    ],
)
def test_what_no_device_starts_is_refused(block, cluster, words):
    assert Launch("k", (1, 1, 1), block, cluster, 0, {}, ()).refusal(parse_arch("sm_100a")) == words


def test_every_attribute_is_kept(captured):
    (launch,) = captured["attributes"]["launches"]
    assert (launch["grid"], launch["block"], launch["cluster"]) == ([4, 3, 2], [32, 2, 1], [2, 1, 1])
    assert launch["shared_bytes"] == 100
    assert launch["parameters"] == ["07000000"]
    assert launch["attributes"] == {
        "cluster dimension": [2, 1, 1],
        "preferred cluster dimension": [4, 1, 1],
        "cooperative": 1,
        "priority": -3,
        "attribute 77": (struct.pack("<2I", 5, 6) + bytes(56)).hex(),
    }


def test_the_device_is_the_simulated_one(captured):
    """Multiprocessors, compute capability, shared memory a CTA may ask for."""
    parameters = [launch["parameters"][0] for launch in captured["device"]["launches"]]
    values = [int.from_bytes(bytes.fromhex(parameter), "little") for parameter in parameters]
    assert values == [148, 10, 0, 232_448]


def test_the_kernel_may_require_its_cluster(captured):
    assert captured["required_cluster"]["launches"][0]["cluster"] == [1, 1, 1]


def test_buffers_lie_apart_in_one_mapping():
    buffers = Buffers([Wanted("a", "int8", (3,), data=np.array([1, 2, 3], np.int8)), Wanted("b", "bfloat16", (4, 5))])
    a, b = buffers["a"], buffers["b"]
    assert a.address % ALIGNMENT == 0
    assert b.address % ALIGNMENT == 0
    assert (a.size, b.size, b.strides) == (3, 40, (5, 1))
    assert a.address - buffers.base >= GUARD_BYTES
    assert b.address - a.end >= GUARD_BYTES
    assert buffers.base + buffers.memory.size - b.end >= GUARD_BYTES
    assert buffers.bytes_of(a).tolist() == [1, 2, 3]
    assert (buffers.memory[a.offset + 3 : b.offset] == 0xFF).all()


def test_outputs_are_poisoned_and_uninitialised():
    data = np.arange(4, dtype=np.float32)
    buffers = Buffers([Wanted("x", "float32", (4,), data=data), Wanted("y", "float32", (4,))])
    assert [buffer.output for buffer in buffers.buffers] == [False, True]
    assert np.isnan(buffers.bytes_of(buffers["y"]).view(np.float32)).all()
    assert buffers.initialised_of(buffers["x"]).all()
    assert buffers.initialised.sum() == 16
    assert not buffers.written.any()


def test_a_buffer_is_found_by_address():
    buffers = Buffers([Wanted("x", "uint8", (10,)), Wanted("empty", "uint8", (0, 4)), Wanted("y", "uint8", (10,))])
    x = buffers["x"]
    assert buffers.find(x.address) is x
    assert buffers.find(x.address + 9) is x
    assert buffers.find(x.address + 10) is None
    assert buffers.find(x.address - 1) is None
    assert buffers["empty"].size == 0


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "size"),
    [
        ("float4_e2m1fn", (3, 16), (), 24),
        ("float4_e2m1fn_x2", (3, 8), (), 24),
        ("float8_e4m3fn", (7,), (), 7),
        ("bfloat16", (2, 3), (10, 2), 2 * 15),
        ("float32", (2, 3), (0, 1), 12),
    ],
)
def test_sizes_follow_dtype_and_strides(dtype, shape, strides, size):
    assert Buffers([Wanted("x", dtype, shape, strides)])["x"].size == size


def test_a_forked_worker_writes_into_the_same_memory():
    buffers = Buffers([Wanted("y", "uint8", (8,))])
    child = os.fork()
    if child == 0:
        for simulated in buffers.device_memory():
            simulated.data[2] = 7
            simulated.initialised[2] = simulated.written[2] = True
        os._exit(0)
    os.waitpid(child, 0)
    y = buffers["y"]
    assert buffers.bytes_of(y)[2] == 7
    assert buffers.initialised_of(y).tolist() == buffers.written_of(y).tolist() == [False, False, True] + [False] * 5


def test_addresses_are_the_same_in_every_run():
    code = (
        "from tunekit.simulate.launch.arguments import Buffers, Wanted\n"
        "print([Buffers([Wanted('y', 'int8', (9,))])['y'].address for _ in range(3)])"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    runs = [subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) for _ in range(2)]
    first, *later = json.loads(runs[0])
    assert runs[0] == runs[1]
    assert later == [first, first]  # each was unmapped with its last view


def test_memory_outlives_its_buffers_while_it_is_viewed():
    view = Buffers([Wanted("x", "int32", (3,), data=np.arange(3, dtype=np.int32))]).memory
    other = Buffers([Wanted("y", "int32", (3,))])
    assert view.ctypes.data != other.base
    assert view.view(np.int32)[GUARD_BYTES // 4 :][:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([Wanted("x", "float12", (1,))], "unknown dtype 'float12'"),
        ([Wanted("x", "int8", (1,)), Wanted("x", "int8", (1,))], "two buffers have one name: x, x"),
        ([Wanted("x", "int8", (2,), data=np.zeros(3, np.int8))], "x has 2 bytes; its data has 3"),
        ([Wanted("x", "int8", (2, 2), (1,))], r"x: strides \(1,\) do not fit shape \(2, 2\)"),
        ([Wanted("x", "int8", (2, 2), data=np.zeros((2, 2), np.int8).T[:1])], "must be contiguous"),
    ],
)
def test_a_buffer_that_can_t_be(wanted, words):
    with pytest.raises(UserError, match=words):
        Buffers(wanted)
