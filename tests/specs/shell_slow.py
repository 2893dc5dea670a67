"""Builds that take a while, fail or hang: for the command line's tests."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

BUILD_S = 0.1
SOURCE = """
#include "tunekit_host.h"

TUNEKIT_KERNEL(args, count) {{
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    for (int64_t i = 0; i < tensor_arg(args, 0)->shape[0]; ++i) y[i] = x[i]; /* {n} */
    return 0;
}}
"""


def slow(b):
    time.sleep(BUILD_S)
    return SOURCE.format(n=b.tunables.n)


def hang(b):
    if b.tunables.n == 0:  # holds the GIL for ever, waiting for a lock of its own
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    return SOURCE.format(n=b.tunables.n)


def hang_late(b):
    """The C compiler hangs: it includes a pipe that nobody writes."""
    source = SOURCE.format(n=b.tunables.n)
    if b.tunables.n == 0:
        pipe = os.path.join(tempfile.mkdtemp(), "never.h")
        os.mkfifo(pipe)
        source = f'#include "{pipe}"\n{source}'
    return source


def fail(b):
    raise ValueError(f"tile {b.tunables.n} does not divide 64\nand that is all")


def make(name, build, variants=20, **more):
    return KernelSpec(
        name=name,
        version=1,
        axes=(Axis("rows", default=64),),
        signature=(TensorArg("x", ("rows",), "float32"), TensorArg("y", ("rows",), "float32", role="output")),
        implementations=(
            Implementation(
                name="copy",
                requires={"host"},
                backend="host",
                tunables=(Tunable("n", tuple(range(variants))),),
                build=build,
                defaults=({"n": 0},),
            ),
        ),
        reference=lambda problem, inputs: {"y": inputs["x"].double()},
        **more,
    )


shell_slow = make("shell_slow", slow)
shell_fail = make("shell_fail", fail)
shell_hang = make("shell_hang", hang, variants=2)
shell_hang_late = make("shell_hang_late", hang_late, variants=2)
shell_limited = make("shell_limited", hang_late, variants=2, compile_limit_s=1.5)
