"""Compiles variants of the sm_100a attention kernel, one after another, without a GPU.

For each: seconds, registers, stack (spills), and whether three readings of its footprint agree:
declared (kernel_specs/fmha_footprint_sm100.py), traced (the MLIR before the back end) and compiled
(PTX, cubin and the host code that launches).

    python benchmarks/compile_fmha_sm100.py            every 7th valid variant
    python benchmarks/compile_fmha_sm100.py --every 1  all of them
    python benchmarks/compile_fmha_sm100.py head_dim=128 kv_tile=64   those with these values
"""

import argparse
import itertools
import json
import re
import struct
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cutlass.cute as cute

from kernel_specs.fmha_footprint_sm100 import constraints, footprint
from kernel_specs.kernels import fmha_sm100

ARCH = "--gpu-arch sm_100a --enable-tvm-ffi"
AXES = {
    "head_dim": (64, 128, 256, 512),
    "pv_n_tile": (64, 128, 256),
    "kv_tile": (64, 128),
    "kv_stage": (1, 2, 3, 4),
    "smem_p": (False, True),
    "normalize": (True, False),
    "heads": ((16, 16), (16, 4), (128, 1)),
}


def variants():
    """The valid variants of AXES, in order."""
    for values in itertools.product(*AXES.values()):
        variant = dict(zip(AXES, values, strict=True))
        variant["heads"], variant["kv_heads"] = variant["heads"]
        if all(valid(variant) for _, _, valid in constraints):
            yield variant


def traced(variant):
    """Footprint read from the MLIR that tracing leaves, the back end not run."""
    text = str(
        cute.compile.to_precompiled_mlir(
            fmha_sm100.make_kernel(**variant), *fmha_sm100.make_fake_args(**variant), options=ARCH
        )
    )
    buffers = {
        name: int(size) for name, size in re.findall(r'^(!\w+) = !cute\.memref<i8, smem, [^"]*"(\d+):1">', text, re.M)
    }
    allocations = re.findall(r"cute\.memref\.alloca\(\) \{smem\.partition_id.*\} : (!\w+)", text)
    columns = re.findall(r"sm100\.alloc_tmem\(%(\w+),", text)
    threads = re.search(r"exact_block_dim = array<i64: (\d+), (\d+), (\d+)>", text)
    cluster = re.search(r"cluster_launch = (\w+)", text)
    return {
        "smem_bytes": sum(buffers[name] for name in allocations),
        "tmem_columns": sum(int(re.search(rf"%{name} = arith\.constant (\d+) : i32", text)[1]) for name in columns),
        "threads": int(threads[1]) * int(threads[2]) * int(threads[3]),
        "cluster": 1 if cluster[1] == "false" else None,
    }


def read_artifact(artifact):
    """An artifact's bytes: the compiler hands over a path or, for want of a folder, the content."""
    if isinstance(artifact, bytes):
        return artifact
    if len(artifact) < 4096 and "\n" not in artifact:
        return Path(artifact).read_bytes()
    return artifact.encode()


def cubin_facts(cubin):
    """Registers and stack bytes a thread, and shared memory the code declares, from the ELF."""
    section_offset = struct.unpack_from("<Q", cubin, 40)[0]
    count, names_index = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, section_offset + 64 * i) for i in range(count)]
    names_offset = sections[names_index][4]
    facts = {}
    for section in sections:
        start = names_offset + section[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name == ".nv.info":
            offset, end = section[4], section[4] + section[5]
            while offset < end:
                form, attribute, size = struct.unpack_from("<BBH", cubin, offset)
                offset += 4
                if form == 4:
                    if attribute == 0x2F:
                        facts["registers"] = struct.unpack_from("<II", cubin, offset)[1]
                    if attribute == 0x11:
                        _, stack = struct.unpack_from("<II", cubin, offset)
                        facts["stack_bytes"] = max(stack, facts.get("stack_bytes", 0))
                    offset += size
        if name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            # The 1,024 bytes that the system keeps of each CTA's shared memory are in the section.
            facts["static_smem_bytes"] = section[5] - 1024
    return facts


def compiled(variant):
    """(seconds, footprint as compiled, facts of the cubin)."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        function = cute.compile(
            fmha_sm100.make_kernel(**variant),
            *fmha_sm100.make_fake_args(**variant),
            options=f"{ARCH} --keep-ptx --keep-cubin --dump-dir {folder}",
        )
        seconds = time.perf_counter() - start
        function.export_to_c(f"{folder}/kernel.o", function_name="fmha_forward")
        ptx = read_artifact(function.artifacts.PTX).decode()
        facts = cubin_facts(read_artifact(function.artifacts.CUBIN))
        facts["object_bytes"] = Path(f"{folder}/kernel.o").stat().st_size
    host = str(function.ir_module)

    def launch_field(index):
        """A constant that the host code stores in the launch configuration."""
        field = re.search(
            rf"(%\d+) = llvm\.getelementptr %\d+\[0, {index}\][^\n]*struct<\(array<3 x i32>, array<3 x i32>,"
            rf" i64[^\n]*\n\s*llvm\.store (%\d+), \1 ",
            host,
        )
        # Values are numbered anew in each function: take the nearest definition above.
        before = host[: field.start()]
        return int(re.findall(rf"{field[2]} = llvm\.mlir\.constant\((\d+) : i\d+\)", before)[-1])

    allocation = re.findall(r"tcgen05\.alloc\.\S+\s+\[[^\]]*\], (%r\d+);", ptx)
    columns = [int(re.findall(rf"mov\.b32\s+{r}, (\d+);", ptx)[-1]) for r in allocation]
    reqntid = [int(n) for n in re.search(r"\.reqntid (\d+), (\d+), (\d+)", ptx).groups()]
    read = {
        "smem_bytes": launch_field("2") + facts["static_smem_bytes"],
        "tmem_columns": sum(columns),
        "threads": reqntid[0] * reqntid[1] * reqntid[2],
        "cluster": None if ".reqnctapercluster" in ptx else 1,
    }
    assert launch_field("1, 0") == read["threads"]
    return seconds, read, facts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("value", nargs="*", help="name=value, to keep only such variants")
    options = parser.parse_args()
    wanted = {k: json.loads(x.lower()) for k, x in (pair.split("=") for pair in options.value)}
    chosen = [v for v in variants() if all(v[k] == x for k, x in wanted.items())]
    total, failures = len(chosen), 0
    chosen = chosen[:: options.every]
    print(f"{len(chosen)} of {total} valid variants")
    print("hd   pv  kv  stage smem_p norm heads      s  regs stack   smem B TMEM  footprint")
    for v in chosen:
        declared, from_trace = footprint(**v), traced(v)
        seconds, from_binary, facts = compiled(v)
        agree = declared == from_trace == from_binary
        failures += not agree
        print(
            f"{v['head_dim']:<4} {v['pv_n_tile']:<3} {v['kv_tile']:<3} {v['kv_stage']:<5} "
            f"{v['smem_p']!s:<6} {v['normalize']!s:<5} {v['heads']:>3}/{v['kv_heads']:<3} "
            f"{seconds:6.1f} {facts['registers']:>4} {facts['stack_bytes']:>5} "
            f"{declared['smem_bytes']:>8} {declared['tmem_columns']:>4}  "
            + ("equal" if agree else f"DIFFERS {declared} {from_trace} {from_binary}"),
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
