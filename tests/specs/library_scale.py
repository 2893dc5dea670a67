"""y = scale * x by a kernel of our own and by functions of packages: one that is always here, one that a test installs.

``pause_us`` makes a variant as slow as a test wants it. The package ``tunekit-fake-library`` is a module and its
metadata, which a test writes into a directory of its own.
"""

from __future__ import annotations

import time

from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tolerance, Tunable

PAUSES = (0, 20_000)
SOURCE = """
#include <time.h>
#include "tunekit_host.h"

TUNEKIT_KERNEL(args, count) {{
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    const float scale = (float)scalar_arg(args, 2);
    const int64_t size = tensor_arg(args, 0)->shape[0] * tensor_arg(args, 0)->shape[1];
    struct timespec pause = {{0, {pause_us} * 1000L}};
    if (pause.tv_nsec) nanosleep(&pause, 0);
    for (int64_t i = 0; i < size; ++i) y[i] = scale * x[i];
    return 0;
}}
"""


def build_loop(b):
    return SOURCE.format(pause_us=b.tunables.pause_us)


def build_torch(b):
    import torch

    pause_s = b.tunables.pause_us * 1e-6

    def scale_by_torch(x, y, scale):
        if pause_s:
            time.sleep(pause_s)
        torch.mul(x, scale, out=y)

    return scale_by_torch


def build_fake(b):
    import tunekit_fake_library

    return tunekit_fake_library.function(b.tunables.pause_us)


def library(name, package, build, requires=("host",), **more):
    return Implementation(
        name=name,
        requires=requires,
        backend="library",
        package=package,
        tunables=(Tunable("pause_us", PAUSES),),
        build=build,
        defaults=({"pause_us": 0},),
        **more,
    )


def spec(name, *implementations):
    return KernelSpec(
        name=name,
        version=1,
        axes=(
            Axis("rows", bucket="pow2", edges=(1, 7)),
            Axis("cols", values=(16, 64), static=True, default=64),
        ),
        signature=(
            TensorArg("x", ("rows", "cols"), "float32"),
            TensorArg("y", ("rows", "cols"), "float32", role="output"),
            ScalarArg("scale", default=lambda p: 0.5),
        ),
        implementations=implementations,
        reference=lambda problem, inputs: {"y": inputs["scale"] * inputs["x"].double()},
        tolerance=Tolerance(cosine=0.999999, relative_norm=1e-6),
        examples=({"rows": 8},),
    )


LOOP = Implementation(
    name="loop",
    requires={"host"},
    backend="host",
    tunables=(Tunable("pause_us", PAUSES),),
    constraints=(Constraint("narrow", "the loop is for narrow rows", lambda v: v.cols == 64),),
    build=build_loop,
    defaults=({"pause_us": 20_000},),
)
BY_TORCH = library("by_torch", "torch", build_torch)
FAKE = library("fake", "tunekit-fake-library", build_fake, install="tunekit[fake]")

library_scale = spec("library_scale", LOOP, BY_TORCH)
library_fake = spec("library_fake", LOOP, FAKE)
library_only = spec("library_only", FAKE)
library_gpu = spec("library_gpu", library("by_torch", "torch", build_torch, requires=()))
