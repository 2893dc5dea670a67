"""Time the promising decode variants of fmha on this GPU, split and not: JSON lines, then a table of the best.

    python benchmarks/decode_space.py --out decode.jsonl [--seconds 440] [--peers] [--only 64,128] [--list]

128 heads over 1, T=1, bf16. Every variant that is promising for some shape is compiled (all cores), then timed on the
shapes that it is promising for: CUDA-graph replay, `warm` (back to back) and `cold` (an L2 flush before each call, the
time of the flushes alone subtracted), and checked against float32 torch. The best few of each shape are timed again,
in turns. A JSON line for each (shape, variant); at the end one "best" line a shape.
"""

import argparse
import collections
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HEADS = 128
SHAPES = list(itertools.product((64, 128, 256), (1, 8, 32, 128), (640, 1152, 8192)))
# The best of flash-attn-4 4.0.0b36, cuDNN and FA2 through torch 2.11 SDPA for each (d, b, s_k), microseconds: one
# H200, 2026-11-29, CUDA-graph replay with a cold L2. `--peers` measures them anew.
PEER = {
    (64, 1, 640): 7.0,
    (64, 1, 1152): 7.3,
    (64, 1, 8192): 9.4,
    (64, 8, 640): 9.3,
    (64, 8, 1152): 10.4,
    (64, 8, 8192): 20.1,
    (64, 32, 640): 9.9,
    (64, 32, 1152): 14.5,
    (64, 32, 8192): 41.6,
    (64, 128, 640): 13.6,
    (64, 128, 1152): 19.7,
    (64, 128, 8192): 86.3,
    (128, 1, 640): 8.4,
    (128, 1, 1152): 8.6,
    (128, 1, 8192): 12.1,
    (128, 8, 640): 11.1,
    (128, 8, 1152): 13.1,
    (128, 8, 8192): 26.9,
    (128, 32, 640): 12.2,
    (128, 32, 1152): 17.6,
    (128, 32, 8192): 65.9,
    (128, 128, 640): 19.4,
    (128, 128, 1152): 29.7,
    (128, 128, 8192): 133.9,
    (256, 1, 640): 12.2,
    (256, 1, 1152): 14.1,
    (256, 1, 8192): 27.9,
    (256, 8, 640): 16.6,
    (256, 8, 1152): 19.4,
    (256, 8, 8192): 45.2,
    (256, 32, 640): 18.7,
    (256, 32, 1152): 27.9,
    (256, 32, 8192): 122.8,
    (256, 128, 640): 34.2,
    (256, 128, 1152): 50.3,
    (256, 128, 8192): 255.2,
}
SMS = 132
COLD_CALLS, WARM_CALLS = 16, 48  # in one graph
HANG_S = 20.0
HUNG = 3  # exit status of a measuring process that found a kernel hanging: the next one goes on without it


def ctas(t, d, b):
    return b * (HEADS // t.m_tile) * (d // t.pv_n_tile) * t.get("num_splits", 1)


def promising(t, d, b, s):
    """Whether a variant is worth timing on a shape."""
    splits, tiles = t.get("num_splits", 1), -(-s // t.kv_tile)
    n, room = ctas(t, d, b), SMS * t.ctas_per_sm
    if splits > tiles or (t.kv_groups == 2 and tiles < 2 * splits and splits > 1):
        return False
    if splits > 1 and n > 1.05 * room:  # a split that only adds waves
        return False
    if t.kv_stage == 1 and tiles > splits:  # one stage serialises loads and products
        return False
    if splits == 1:
        return b >= 32 or s <= 1152
    # With far fewer CTAs than room, more splits are the better variant, up to two tiles a CTA.
    if n * 4 <= room and tiles >= 4 * splits and splits < 64:
        return False
    return t.ctas_per_sm == 1 or n > SMS


def shortlist(variants, d):
    """Plain variants with the deepest rings that fit; split ones likewise, and one-stage ones."""
    groups = collections.defaultdict(list)
    for v in variants:
        t = v.tunables
        if v.implementation == "sm90":
            if t.smem_p or t.rescale_log2 or t.m_tile == 192 or (t.cluster_m > 1 and t.m_tile == 128):
                continue
            if t.k_sub > (2 if d == 256 else 1):
                continue
        if t.pv_n_tile < d and not (t.m_tile == 64 and t.get("num_splits", 1) >= 4) and (d, t.pv_n_tile) != (256, 128):
            continue
        if t.get("num_splits", 1) in (3, 5) and (t.ctas_per_sm == 2 or t.kv_groups == 2):
            continue
        if t.get("num_splits", 1) in (3, 5, 64) and t.pv_n_tile < d:
            continue
        key = tuple((k, x) for k, x in t.items() if k != "kv_stage")
        groups[(v.implementation, key)].append(v)
    chosen = []
    for (implementation, _), found in groups.items():
        found.sort(key=lambda v: v.tunables.kv_stage)
        chosen.append(found[-1])
        if implementation == "sm90_split" and found[0].tunables.kv_stage == 1 and len(found) > 1:
            chosen.append(found[0])
    return chosen


def short(v):
    t = v.tunables
    words = f"m{t.m_tile} pv{t.pv_n_tile} kv{t.kv_tile}x{t.kv_stage} g{t.kv_groups} c{t.ctas_per_sm}"
    if "merge" in t:
        return f"{words} {t.merge} {t.num_splits}"
    return f"{words} mc{t.cluster_m} ks{t.k_sub}"


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="decode.jsonl")
    parser.add_argument("--seconds", type=float, default=440.0, help="no shape is begun after this")
    parser.add_argument("--peers", action="store_true", help="time torch's SDPA (and flash-attn-4) as well")
    parser.add_argument("--only", default="64,128,256", help="head dims")
    parser.add_argument("--shapes", default="", help="d:b:s,... instead of the 36")
    parser.add_argument("--list", action="store_true", help="count what would be compiled and timed, and stop")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--limit", type=int, default=10**6, help="compile that many variants only")
    parser.add_argument("--measure", default="", help="(the measuring process) where the compiled kernels lie")
    parser.add_argument("--began", type=float, default=0.0)
    return parser.parse_args()


def shapes_of(given):
    if given.shapes:
        return [tuple(int(x) for x in word.split(":")) for word in given.shapes.split(",")]
    dims = [int(d) for d in given.only.split(",")]
    return [s for s in SHAPES if s[0] in dims]


def planned(given):
    """(the spec, {shape: keys to time}, {key: unit to compile})."""
    from tunekit.arch import parse_arch
    from tunekit.compiling import units
    from tunekit.space import expand, misfit
    from tunekit.spec import load_spec

    spec, arch, shapes = load_spec("fmha"), parse_arch("sm_90a"), shapes_of(given)
    plan, by_key = collections.defaultdict(list), {}
    for d in sorted({s[0] for s in shapes}):
        p = problem_of(spec, d, 1, 1152)
        fitting = [
            v
            for v in expand(spec, arch, p).variants
            if v.implementation in ("sm90", "sm90_split")
            and misfit(spec.implementation(v.implementation), arch, p, v.tunables) is None
        ]
        for unit in units(spec, "fmha", p, shortlist(fitting, d)):
            wanted = [s for s in shapes if s[0] == d and promising(unit.variant.tunables, *s)]
            if wanted and len(by_key) < given.limit:
                by_key[unit.key] = unit
                for shape in wanted:
                    plan[shape].append(unit.key)
    return spec, plan, by_key


def problem_of(spec, d, b, s):
    return spec.problem({"batch": b, "heads": HEADS, "kv_heads": 1, "t": 1, "s_k": s, "head_dim": d})


def appended(path):
    out = open(path, "a")  # noqa: SIM115 - until the process ends

    def write(row):
        out.write(json.dumps(row, default=str) + "\n")
        out.flush()

    return write


def main():
    given, began = arguments(), time.time()
    _, plan, by_key = planned(given)
    print(f"{len(by_key)} variants, {sum(map(len, plan.values()))} timings of {len(plan)} shapes", file=sys.stderr)
    if given.list:
        for shape, keys in plan.items():
            print(shape, len(keys))
        return 0
    from tunekit.jobs import Limits, Pool, Task

    write, root, built = appended(given.out), Path(tempfile.mkdtemp()), {}
    tasks = []
    for key, unit in by_key.items():
        (root / key[:20]).mkdir()
        tasks.append(Task(id=key, payload=unit.request(root / key[:20]).to_payload()))
    with Pool(workers=given.workers, warm=("cutedsl",), limits=Limits(60, 120, 8 * 2**30)) as pool:
        for result in pool.run(tasks):
            if result.ok and result.value is not None:
                built[result.id] = {"so": result.value["files"]["so"], "compiled": result.value["compiled"]}
            else:
                write({"failed": short(by_key[result.id].variant), "reason": result.reason[:300]})
    (root / "built.json").write_text(json.dumps(built))
    print(f"{len(built)} of {len(by_key)} compiled in {time.time() - began:.0f} s", file=sys.stderr)
    again = [sys.executable, *sys.argv, "--measure", str(root), "--began", str(began)]
    for _ in range(6):
        status = subprocess.run(again).returncode
        if status != HUNG:
            break
    summary(given.out)
    print(f"all {time.time() - began:.0f} s")
    return status


def summary(path):
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    ratios = {tuple(r["best"]): r["peer_us"] / r["cold_us"] for r in rows if r.get("best") and r.get("peer_us")}
    if ratios:
        least = min(ratios, key=ratios.get)
        mean = statistics.geometric_mean(ratios.values())
        print(f"geometric mean {mean:.3f}, least {ratios[least]:.3f} at {least}, of {len(ratios)} shapes")


class Watch:
    """Ends this process if what it surrounds takes too long: a kernel hangs. Its key is left in the skip list."""

    def __init__(self, root, key, row, write):
        def hang():
            with open(root / "skip", "a") as skip:
                skip.write(key + "\n")
            write({**row, "hang": True})
            os._exit(HUNG)

        self.timer = threading.Timer(HANG_S, hang)

    def __enter__(self):
        self.timer.start()

    def __exit__(self, *_):
        self.timer.cancel()


def measure(given):
    import torch

    from tunekit.backends.load import load_artifact
    from tunekit.measure.device import Device
    from tunekit.measure.timing import CudaTimer
    from tunekit.space import workspace

    root, write = Path(given.measure), appended(given.out)
    spec, plan, by_key = planned(given)
    built = json.loads((root / "built.json").read_text())
    skip = set((root / "skip").read_text().split()) if (root / "skip").exists() else set()
    done = set((root / "done").read_text().split()) if (root / "done").exists() else set()
    timer, side = CudaTimer(Device(0), cold=True), torch.cuda.Stream()
    gc.collect()
    gc.freeze()
    gc.disable()
    kernels = {}

    def capture(calls):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return graph

    def elapsed(graph):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        timer.flush()  # the GPU is busy until the host has enqueued the graph
        begin.record()
        graph.replay()
        end.record()
        return begin, end

    def us(pair, calls):
        return 1000 * pair[0].elapsed_time(pair[1]) / calls

    flushes = capture([timer.flush] * COLD_CALLS)

    def times(graphs, takes):
        """{key: (cold, warm, least cold, most cold)} in us, of {key: (cold graph, warm graph)}, in turns; medians."""
        cold, warm = collections.defaultdict(list), collections.defaultdict(list)
        for take in range(takes):
            order = list(graphs) if take % 2 == 0 else list(graphs)[::-1]
            pairs = [(key, elapsed(flushes), elapsed(graphs[key][0]), elapsed(graphs[key][1])) for key in order]
            torch.cuda.synchronize()
            flush_us = statistics.median(us(base, COLD_CALLS) for _, base, _, _ in pairs) if pairs else 0.0
            for key, _, one, other in pairs:
                cold[key].append(us(one, COLD_CALLS) - flush_us)
                warm[key].append(us(other, WARM_CALLS))
        return {k: (statistics.median(cold[k]), statistics.median(warm[k]), min(cold[k]), max(cold[k])) for k in graphs}

    def graphs_of(call):
        return capture([c for _ in range(COLD_CALLS) for c in (timer.flush, call)]), capture([call] * WARM_CALLS)

    for shape in sorted(plan, key=lambda s: (s[2] == 8192, s[1] == 128, s[1], s[0])):
        word = ":".join(map(str, shape))
        if word in done:
            continue
        if time.time() - given.began > given.seconds:
            write({"skipped": shape})
            continue
        d, b, s = shape
        p = problem_of(spec, d, b, s)
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*dims, generator=generator):
            return torch.randn(dims, generator=generator, device="cuda").to(torch.bfloat16)

        q, k, v = random(b, 1, HEADS, d), random(b, s, 1, d), random(b, s, 1, d)
        o, scale = torch.empty_like(q), d**-0.5
        scores = torch.matmul(q[:, 0].float(), k[:, :, 0].float().transpose(1, 2)) * scale
        want = torch.matmul(torch.softmax(scores, -1), v[:, :, 0].float())
        del scores
        ready, rows = {}, {}
        keys = [key for key in plan[shape] if key in built and key not in skip]
        spaces = {key: workspace(spec, by_key[key].variant, p) for key in keys}
        scratch = torch.full((max([1, *spaces.values()]),), math.nan, device="cuda")
        for key in keys:
            variant = by_key[key].variant
            if key not in kernels:
                kernels[key] = load_artifact(Path(built[key]["so"]), by_key[key].symbol)
            more = (scratch[: spaces[key]],) if spaces[key] else ()

            def call(kernel=kernels[key], more=more, q=q, k=k, v=v, o=o, scale=scale):
                kernel(q, k, v, o, scale, *more)

            row = {"d": d, "b": b, "s_k": s, "variant": short(variant), "implementation": variant.implementation}
            row |= {"tunables": dict(variant.tunables)}
            row |= {name: built[key]["compiled"].get(name) for name in ("registers", "spill_bytes", "smem_bytes")}
            o.fill_(math.nan)
            scratch.fill_(math.nan)
            torch.cuda.synchronize()
            try:
                with Watch(root, key, row, write):
                    call()
                    torch.cuda.synchronize()
                row["error"] = float((o[:, 0].float() - want).norm() / want.norm())
                if not row["error"] < 3e-3:
                    write({**row, "wrong": True})
                    continue
                with Watch(root, key, row, write):
                    ready[key] = graphs_of(call)
                    elapsed(ready[key][1])
                    torch.cuda.synchronize()
            except RuntimeError as error:
                write({**row, "fault": str(error)[:300]})
                if any(word in str(error) for word in ("illegal", "misaligned", "launch failure")):
                    with open(root / "skip", "a") as skipped:  # the context is lost: another process goes on
                        skipped.write(key + "\n")
                    os._exit(HUNG)
                continue
            rows[key] = row
        found = times(ready, 4)
        finalists = sorted(found, key=lambda key: found[key][0])[:5]
        final = times({key: ready[key] for key in finalists}, 14)
        for key, (cold, warm, low, high) in {**found, **final}.items():
            rows[key] |= {"cold_us": round(cold, 2), "warm_us": round(warm, 2)}
            rows[key] |= {"low": round(low, 2), "high": round(high, 2), "final": key in final}
            write(rows[key])
        if final:
            best, peer = min(final, key=lambda key: final[key][0]), PEER.get(shape)
            write({"best": shape, **{n: rows[best][n] for n in ("variant", "cold_us", "warm_us")}, "peer_us": peer})
            words = f"{word} {rows[best]['variant']}: cold {final[best][0]:.2f} warm {final[best][1]:.2f}"
            print(words, f"peer {peer} {peer / final[best][0]:.2f}x" if peer else "", f"[{len(ready)}]", flush=True)
        if given.peers:
            their_times(q, k, v, (d, b, s), graphs_of, times, write)
        with open(root / "done", "a") as file:
            file.write(word + "\n")
        ready.clear()
        gc.collect()
    return 0


def their_times(q, k, v, shape, graphs_of, times, write):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    d, b, s = shape
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    packed = qt.reshape(b, 1, HEADS, d)
    calls = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        for form, x, more in (("", qt, {"enable_gqa": True}), ("pack_", packed, {})):

            def call(backend=backend, x=x, more=more):
                with sdpa_kernel(backend):
                    return sdpa(x, kt, vt, **more)

            calls[form + name] = call
    try:
        from flash_attn.cute import flash_attn_func

        calls["fa4"] = lambda: flash_attn_func(q, k, v)
    except ImportError:
        pass
    ready = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            ready[name] = graphs_of(call)
        except Exception as error:
            write({"d": d, "b": b, "s_k": s, "peer": name, "refused": str(error)[:100]})
    for name, (cold, warm, _, _) in times(ready, 8).items():
        write({"d": d, "b": b, "s_k": s, "peer": name, "cold_us": round(cold, 2), "warm_us": round(warm, 2)})


if __name__ == "__main__":
    sys.exit(measure(arguments()) if arguments().measure else main())
