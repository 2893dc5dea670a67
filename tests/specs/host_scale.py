"""CPU kernels in C for tests: right ones, and ones that fail in every way that a tuner meets.

``host_scale``: y = scale * x + shift(col), all variants right.
``host_positive``: the same, for a positive scale only.
``host_faulty``: the same, with a tunable `fault` that picks what goes wrong at run time.
``host_build``: the same, with a tunable `build` that picks what goes wrong when compiling.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time

from tunekit.model import Cost
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tolerance, Tunable

AXES = (
    Axis("rows", bucket="pow2", edges=(1, 7, 64)),
    Axis("cols", values=(16, 32, 64, 128, 1024), static=True, default=64),
    Axis("dtype", kind="dtype", values=("float32",), static=True, default="float32"),
)
SIGNATURE = (
    TensorArg("x", ("rows", "cols"), "dtype"),
    TensorArg("y", ("rows", "cols"), "dtype", role="output"),
    ScalarArg("scale", default=lambda p: 0.5),
)

HEAD = """
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include "tunekit_host.h"

#define COLS {cols}

static void pause_us(long us) {{
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000000L + (now.tv_nsec - begin.tv_nsec) / 1000 < us);
}}

TUNEKIT_KERNEL(args, count) {{
    if (count != 3) return fail("expects x, y, scale");
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    const float scale = (float)scalar_arg(args, 2);
    const int64_t rows = tensor_arg(args, 0)->shape[0];
    if (tensor_arg(args, 0)->shape[1] != COLS) return fail("compiled for another number of columns");
    int64_t first = 0, last = rows * COLS;
    (void)pause_us;
"""
LOOP = """
    for (int64_t i = first; i < last; i += {unroll})
        for (int64_t u = i; u < i + {unroll} && u < last; ++u) y[u] = scale * x[u] + (float)(u % COLS) / COLS;
"""
TAIL = """
    return 0;
}
"""

BEFORE = {
    "none": "",
    "ulp": "",
    "half": "last = rows * COLS / 2;",
    "nothing": "last = 0;",
    "nan": "",
    "one_element": "",
    "second_launch": "static int launches = 0; launches++;",
    "random": "",
    "odd_rows": "",
    "slow": "pause_us(3000);",
    "spin": "for (volatile int forever = 1; forever;) {}",
    "crash": "raise(SIGSEGV);",
    "abort": "abort();",
    "exit": "_Exit(0);",
    "error": 'return fail("asked to fail");',
    "input_write": "((float *)x)[0] = 12345.0f;",
    "odd_crash": "if (rows % 2) raise(SIGSEGV);",
}
AFTER = {
    "ulp": "for (int64_t i = 0; i < last; ++i) y[i] = nextafterf(y[i], INFINITY);",
    "nan": "y[last / 3] = NAN;",
    "one_element": "y[last / 2 + 1] += 100.0f;",
    "second_launch": "if (launches > 1) y[0] += 1.0f;",
    "random": "static unsigned state = 1; state = state * 1103515245u + 12345u; y[0] += (float)(state >> 16) * 1e-3f;",
    "odd_rows": "if (rows % 2) y[(rows - 1) * COLS] += 1.0f;",
}
FAULTS = tuple(BEFORE)


def source(cols: int, unroll: int = 1, fault: str = "none", delay_us: int = 0) -> str:
    delay = f"pause_us({delay_us});\n" if delay_us else ""
    body = HEAD.format(cols=cols) + BEFORE[fault] + delay + LOOP.format(unroll=unroll)
    return body + AFTER.get(fault, "") + TAIL


def reference(problem, inputs):
    import torch

    x = inputs["x"].double()
    columns = torch.arange(problem.cols, dtype=torch.float64, device=x.device) / problem.cols
    return {"y": inputs.get("scale", 0.5) * x + columns}


def cost(problem):
    return Cost(flops=2.0 * problem.rows * problem.cols, bytes=8.0 * problem.rows * problem.cols)


def spec(name, implementation, **more):
    return KernelSpec(
        name=name,
        version=1,
        axes=AXES,
        signature=SIGNATURE,
        implementations=(implementation,),
        reference=reference,
        tolerance=Tolerance(cosine=0.999999, relative_norm=1e-5, max_abs=1e-3),
        cost=cost,
        examples=({"rows": 8}, {"rows": 7, "cols": 128}),
        **more,
    )


host_scale = spec(
    "host_scale",
    Implementation(
        name="loop",
        requires={"host"},
        backend="host",
        tunables=(Tunable("unroll", (1, 2, 4, 8)), Tunable("delay_us", (0, 200, 1000))),
        constraints=(
            Constraint("delay", "an unrolled loop isn't tried with a delay", lambda p: p.unroll == 1 or not p.delay_us),
        ),
        defaults=({"unroll": 1, "delay_us": 200},),
        build=lambda b: source(b.problem.cols, b.tunables.unroll, delay_us=b.tunables.delay_us),
    ),
)

host_positive = dataclasses.replace(
    host_scale,
    name="host_positive",
    signature=(*SIGNATURE[:-1], ScalarArg("scale", default=lambda p: 0.5, positive=True)),
)

host_faulty = spec(
    "host_faulty",
    Implementation(
        name="faulty",
        requires={"host"},
        backend="host",
        tunables=(Tunable("fault", FAULTS),),
        defaults=({"fault": "none"},),
        build=lambda b: source(b.problem.cols, fault=b.tunables.fault),
    ),
)


def native_hang():
    """Holds the GIL for ever: neither a signal handler nor a thread gets a turn. It waits for a lock of its own."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def recurse(depth):
    return recurse(depth + 1) + 1


def unruly_build(b):
    """What build functions do in the field; the good one returns the source."""
    how = b.tunables.build
    if how == "hang":
        native_hang()
    if how == "hang_with_children":
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["setsid", "sleep", "601"])
        time.sleep(0.2)
        native_hang()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        print("about to abort", file=sys.stderr, flush=True)
        os.abort()
    if how == "exit0":
        print("leaving early", file=sys.stderr, flush=True)
        os._exit(0)
    if how == "exit9":
        os._exit(9)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "recursion":
        recurse(0)
    if how == "raises":
        raise ValueError("tile 48 does not divide 64")
    if how == "empty_error":
        raise RuntimeError
    if how == "sleep":
        time.sleep(1.0)
    if how == "bad_source":
        return "this is not C"
    return source(b.problem.cols)


BUILDS = (
    "good", "also_good", "hang", "hang_with_children", "segfault", "abort", "exit0", "exit9", "kill", "recursion",
    "raises", "empty_error", "sleep", "bad_source",
)  # fmt: skip

host_build = spec(
    "host_build",
    Implementation(
        name="unruly",
        requires={"host"},
        backend="host",
        tunables=(Tunable("build", BUILDS),),
        defaults=({"build": "good"},),
        build=unruly_build,
    ),
)
