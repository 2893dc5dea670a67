"""Compile a sample of the sm_90a attention kernel's space and check what each variant uses against its footprint.

    python benchmarks/fmha_sm90_compile.py [--no-base] [--options N] [--seed N] [--json FILE]

Needs no GPU, but a ``ptxas`` on PATH for registers and spills. Every combination of head_dim, pv_n_tile, kv_tile,
smem_p and m_tile is compiled once, at its largest kv_stage; then N random variants with the optional tunables. The
traced IR gives shared memory, threads and cluster; they must equal ``fmha_footprint_sm90.footprint``.
"""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cutlass.cute as cute

from kernel_specs.fmha_footprint_sm90 import footprint, violated
from kernel_specs.kernels import fmha_sm90

SLICES = [(64, 64), (128, 64), (128, 128), (256, 64), (256, 128), (256, 256), (512, 64), (512, 128), (512, 256)]


def required(m_tiles):
    """Every combination of the required tunables, valid or not."""
    axes = itertools.product(SLICES, (64, 128), (1, 2, 3, 4), (False, True), (True, False), m_tiles)
    for (head_dim, pv_n_tile), kv_tile, kv_stage, smem_p, normalize, m_tile in axes:
        yield {
            "head_dim": head_dim, "heads": 128, "kv_heads": 1, "pv_n_tile": pv_n_tile, "kv_tile": kv_tile,
            "kv_stage": kv_stage, "smem_p": smem_p, "normalize": normalize, "m_tile": m_tile,
        }  # fmt: skip


def base_variants():
    """Every valid variant without optional tunables, m_tile 64 and 128."""
    return [v for v in required((64, 128)) if violated(**v) is None]


def option_variants():
    """Every valid variant that uses an optional tunable, or m_tile 192."""
    options = list(itertools.product((1, 2, 4), range(9), (1, 2), (1, 2), (1, 2)))
    found = []
    for variant in required((64, 128, 192)):
        for k_sub, k_stage, kv_groups, cluster_m, ctas_per_sm in options:
            if k_stage == variant["kv_stage"] * k_sub:
                continue  # what k_stage 0 says
            if variant["m_tile"] < 192 and (k_sub, k_stage, kv_groups, cluster_m, ctas_per_sm) == (1, 0, 1, 1, 1):
                continue  # no option used
            full = {
                **variant, "k_sub": k_sub, "k_stage": k_stage, "kv_groups": kv_groups, "cluster_m": cluster_m,
                "ctas_per_sm": ctas_per_sm,
            }  # fmt: skip
            if violated(**full) is None:
                found.append(full)
    return found


def sample(base, options, seed):
    """The variants to compile; head counts and ``normalize`` rotate over the sample."""
    deepest = {}
    for v in base_variants() if base else []:
        key = (v["head_dim"], v["pv_n_tile"], v["kv_tile"], v["smem_p"], v["m_tile"])
        if v["kv_stage"] >= deepest.get(key, v)["kv_stage"]:
            deepest[key] = v
    rng = random.Random(seed)
    chosen = [*deepest.values(), *rng.sample(option_variants(), options)]
    heads = [(128, 1), (8, 8), (32, 8)]
    return [
        {**v, "heads": heads[i % 3][0], "kv_heads": heads[i % 3][1], "normalize": i // 3 % 2 == 0}
        for i, v in enumerate(chosen)
    ]


def traced_footprint(variant):
    """Shared memory, threads and cluster as the traced IR has them."""
    kernel, arguments = fmha_sm90.make_fmha(**variant), fmha_sm90.make_fake_args(**variant)
    ir = str(cute.compile.to_precompiled_mlir(kernel, *arguments, options="--gpu-arch sm_90a --enable-tvm-ffi"))
    buffers = {int(n) for n in re.findall(r'!cute\.memref<i8, smem, align<1024>, "(\d+):1">', ir)}
    (cluster_x,) = re.findall(r"cluster_dim\[%\w+\] \((%\w+),", ir)
    value = re.search(rf"{cluster_x} = arith\.constant (\d+) : i32", ir)
    return {
        "smem_bytes": max(buffers) if len(buffers) == 1 else -1,
        "threads": int(re.search(r"nvvm\.reqntid = array<i32: (\d+)", ir)[1]),
        "cluster": int(value[1]) if value else int(re.search(r"%c(\d+)_i32", cluster_x)[1]),
    }


def compiled_facts(variant):
    """Seconds of the compile, and what ptxas says of the PTX."""
    with tempfile.TemporaryDirectory() as folder:
        kernel, arguments = fmha_sm90.make_fmha(**variant), fmha_sm90.make_fake_args(**variant)
        start = time.perf_counter()
        cute.compile(
            kernel, *arguments, options=f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        )  # fmt: skip
        seconds = time.perf_counter() - start
        (ptx,) = Path(folder).glob("*.ptx")
        command = ["ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", str(Path(folder) / "out.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "seconds": round(seconds, 2),
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "serialized": "serialized" in report,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", type=int, default=30, help="random variants with optional tunables")
    parser.add_argument("--base", action=argparse.BooleanOptionalAction, default=True, help="compile the base variants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write one line per variant")
    arguments = parser.parse_args()
    rows, wrong, spilled = [], 0, 0
    for variant in sample(arguments.base, arguments.options, arguments.seed):
        declared = footprint(**variant)
        expected = {**{k: declared[k] for k in ("smem_bytes", "threads")}, "cluster": declared["cluster"][0]}
        traced = traced_footprint(variant)
        row = {"variant": variant, "declared": expected, "traced": traced, **compiled_facts(variant)}
        bad = traced != expected or row["serialized"]
        wrong += bad
        spilled += row["spill_bytes"] > 0
        rows.append(row)
        shown = " ".join(f"{k}={v}" for k, v in variant.items())
        print(
            f"{'BAD' if bad else 'ok '} {row['seconds']:5.1f} s {row['registers']:3d} registers "
            f"{row['spill_bytes']} B spilled {traced['smem_bytes']:6d} B smem (declared {expected['smem_bytes']}) "
            f"{traced['threads']} threads cluster {traced['cluster']} | {shown}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text("".join(json.dumps(r) + "\n" for r in rows))
    print(
        f"{len(rows)} variants, {wrong} bad, {spilled} with spills; the space holds {len(base_variants())} without "
        f"optional tunables and {len(option_variants())} with them"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
