"""Static facts of Blackwell attention kernels: our default variants, flash-attn-4's and CUTLASS's from their PTX.

    python benchmarks/blackwell_facts.py [--ptx LABEL=FILE ...] [--json]

Nothing runs, so nothing is timed. Registers, spills and barriers are what ptxas says (of peers: the ptxas of PATH or
--ptxas, on PTX that tests/peers/drive.py --compile-only leaves in its --directory); shared memory of a peer is chosen
at its launch, which its PTX does not say. Instructions are counted in the PTX, in the innermost loops that do more
than wait, both sides of every branch: an iteration of them is one KV tile of each row group of the CTA. tcgen05.ld and
.st are counted by the 32-bit columns that they move, ex2 by results, the rest by instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernel_specs.kernels.fmha_sm100_pair_space import FIXED
from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Values
from tunekit.space import default_variants
from tunekit.spec import load_spec

ARCH = "sm_100a"
OURS = {"sm100": "", "sm100_pair": ", 2 CTAs"}
LIMITS = Limits(trace_s=120.0, backend_s=600.0, memory_bytes=8 * 2**30)
PREFILL = {"batch": 2, "heads": 16, "kv_heads": 16, "t": 8192, "s_k": 8192}
WINDOW = {"mask": "window", "window_left": 127, "window_right": 0, "has_lengths": True, "has_sink": True}
DECODE = {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 512}
LATENT = {"kv_shared": True, "s_k": 128, "sources": 2}
PROBLEMS: dict[str, dict[str, Any]] = {
    **{
        f"prefill d={d}{', causal' if mask == 'causal' else ''}": {**PREFILL, "head_dim": d, "mask": mask}
        for d in (64, 128, 256)
        for mask in ("none", "causal")
    },
    "decode d=512": DECODE,
    "decode d=512, shared KV": {**DECODE, "kv_shared": True},
    "decode d=512, window + compressed, sink": {**DECODE, **WINDOW, **LATENT, "s_k2": 1024},
    "decode d=512, window + list, sink": {**DECODE, **WINDOW, **LATENT, "s_k2": 8192, "gather": True, "top_k": 1024},
}

LABEL = re.compile(r"^\s*([$\w]+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)\s*;")
OPCODE = re.compile(r"^[\s{]*(?:@!?%?\w+\s+)?([a-z][\w:.]*)")
MOVED = re.compile(r"tcgen05\.(?:ld|st)\.\S*?\.(16x64b|16x128b|16x256b|32x32b|16x32bx2)\.x(\d+)")
REGISTERS_A_THREAD = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
KINDS = ("mma", "tmem ld", "tmem st", "TMA", "cp.async", "ex2", "mbarrier", "bar")
SETMAXNREG = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
TMEM = re.compile(r"tcgen05\.alloc\.[^;]*,\s*(\w+|%\w+)\s*;")
THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptx", action="append", default=[], metavar="LABEL=FILE", help="a peer's kernel")
    parser.add_argument("--ptxas", default=shutil.which("ptxas"), help="for the peers' registers and spills")
    parser.add_argument("--only", default="", help="of our problems, those whose name has this in it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = list(ours({name: p for name, p in PROBLEMS.items() if options.only in name}))
    for given in options.ptx:
        label, _, file = given.rpartition("=")
        rows.append(peer(label, Path(file), options.ptxas))
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
    else:
        print_table(rows)


def ours(problems: dict[str, dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The facts of each problem's default variants, one of every kernel of ours."""
    spec = load_spec("fmha")
    arch = ARCHES[ARCH]
    with tempfile.TemporaryDirectory() as root, Pool(workers=1, warm=("cutedsl",), limits=LIMITS) as pool:
        for name, given in problems.items():
            problem = spec.problem(given)
            variants = [v for v in default_variants(spec, arch, problem) if v.implementation in OURS]
            if not variants:
                yield {"kernel": f"tunekit, {name}", "said": "no default variant fits"}
            for unit in units(spec, "fmha", problem, variants):
                (result,) = pool.run(
                    [compile_task(unit.request(Path(root) / unit.key[:16], trace_only=False), id=unit.key)]
                )
                kernel = f"tunekit, {name}{OURS[unit.variant.implementation]}"
                if not result.ok or result.value is None:
                    yield {"kernel": kernel, "said": f"{result.status}: {result.reason}"}
                    continue
                compiled, tunables = result.value["compiled"], unit.variant.tunables
                text = Path(result.value["files"]["ptx"]).read_text()
                yield {
                    "kernel": kernel,
                    "threads": unit.declared.threads,
                    "registers": compiled["registers"],
                    "spill_bytes": compiled["spill_bytes"],
                    "smem_bytes": unit.declared.smem_bytes,
                    "tmem_columns": unit.declared.tmem_columns,
                    "stages": stages(tunables),
                    **facts_of(text),
                    "variant": str(tunables),
                }


def stages(tunables: Values) -> str:
    """Stages of K and V, of S for each of the row groups, and the tile of a CTA."""
    t = Values({**FIXED, **tunables})
    return f"kv {t.kv_stage}, s {t.row_groups}x{t.s_stage}; {t.row_groups}x{t.m_tile}x{t.kv_tile}"


def peer(label: str, file: Path, ptxas: str | None) -> dict[str, Any]:
    """The facts of a peer's kernel."""
    text = file.read_text()
    row: dict[str, Any] = {"kernel": label, **facts_of(text)}
    threads = THREADS.search(text)
    if threads:
        row["threads"] = int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
    alloc = TMEM.search(text)
    if alloc:
        row["tmem_columns"] = constant(text, alloc[1])
    if ptxas is not None:
        command = [ptxas, "-v", "-arch", ARCH, "-o", "/dev/null", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600).stderr
        used, spills = USED.findall(said), SPILLS.findall(said)
        row["registers"] = max(map(int, used), default=None)
        row["spill_bytes"] = max((int(stores) for stores, _ in spills), default=None)
    return row


def constant(text: str, operand: str) -> int | None:
    """An operand's value, if it is a number or was moved from one."""
    if operand.isdigit():
        return int(operand)
    moved = re.search(rf"mov\.\w+\s+{re.escape(operand)},\s*(\d+);", text)
    return int(moved[1]) if moved else None


def facts_of(text: str) -> dict[str, Any]:
    """What the PTX says: setmaxnreg of the roles, and a tile's instructions by kind."""
    counts = count(text.splitlines())
    return {
        "setmaxnreg": "/".join(SETMAXNREG.findall(text)),
        "per_tile": {kind: counts[kind] for kind in KINDS if counts[kind]},
    }


def count(lines: list[str]) -> Counter[str]:
    """Instructions by kind in the innermost working loops."""
    found: Counter[str] = Counter()
    for begin, end in innermost(lines):
        for line in lines[begin:end]:
            kind, amount = kind_of(line)
            if kind:
                found[kind] += amount
    return found


def innermost(lines: list[str]) -> list[tuple[int, int]]:
    """The loops (a label, a later branch back to it) that hold no other loop but those that only wait."""
    at = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    loops: dict[int, int] = {}
    for i, line in enumerate(lines):
        for target in BRANCH.findall(line):
            if at.get(target, i) < i:
                loops[at[target]] = max(i, loops.get(at[target], 0))
    working = [loop for loop in loops.items() if works(lines[loop[0] : loop[1]])]
    return [a for a in working if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in working)]


def works(body: list[str]) -> bool:
    """Whether a loop does more than wait for a barrier or clear memory."""
    return any(kind_of(line)[0] in ("mma", "tmem ld", "tmem st", "TMA", "cp.async", "ex2") for line in body)


def kind_of(line: str) -> tuple[str, int]:
    """(kind, amount) of a line of PTX; ("", 0) of what is not counted."""
    match = OPCODE.match(line)
    opcode = match[1] if match else ""
    if opcode.startswith("tcgen05.mma"):
        return "mma", 1
    if moved := MOVED.search(line):
        return f"tmem {'ld' if '.ld.' in opcode else 'st'}", REGISTERS_A_THREAD[moved[1]] * int(moved[2])
    if opcode.startswith("cp.async.bulk.tensor"):
        return "TMA", 1
    if opcode.startswith("cp.async.c"):
        return ("cp.async", 1) if opcode.startswith(("cp.async.ca", "cp.async.cg")) else ("", 0)
    if opcode.startswith("ex2"):
        return "ex2", 2 if "x2" in opcode[4:] else 1
    if opcode.startswith(("mbarrier.try_wait", "mbarrier.arrive", "tcgen05.commit")):
        return "mbarrier", 1
    if opcode.startswith(("bar.", "barrier.")):
        return "bar", 1
    return "", 0


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("threads", "registers", "setmaxnreg", "spill_bytes", "smem_bytes", "tmem_columns", "stages")
    print("Blackwell attention (sm_100a), static facts. Timings: not measured.\n")
    print("| kernel | " + " | ".join(columns) + " | instructions a KV tile | time |")
    print("|---" * (len(columns) + 3) + "|")
    for row in rows:
        if "said" in row:
            print(f"| {row['kernel']} | {row['said']} |")
            continue
        cells = ["-" if row.get(name) is None else str(row[name]) for name in columns]
        counted = ", ".join(f"{kind} {n}" for kind, n in row["per_tile"].items())
        print(f"| {row['kernel']} | {' | '.join(cells)} | {counted} | not measured |")


if __name__ == "__main__":
    main()
