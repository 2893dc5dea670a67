"""Twenty host variants whose builds take a while: for interruptions, kills and resuming.

The build of `number` 7 raises where the environment has TUNEKIT_TEST_FAIL_SEVENTH.
"""

from __future__ import annotations

import os
import time

from tunekit.model import Cost
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tunable

BUILD_S = 0.2
SOURCE = """
#include "tunekit_host.h"
TUNEKIT_KERNEL(args, count) {
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    for (int64_t i = 0; i < tensor_arg(args, 0)->shape[0]; ++i) y[i] = 2.0f * x[i] + %d * 0.0f;
    return 0;
}
"""


def build(b):
    time.sleep(BUILD_S)
    if b.tunables.number == 7 and "TUNEKIT_TEST_FAIL_SEVENTH" in os.environ:
        raise ValueError("the seventh is unlucky")
    return SOURCE % b.tunables.number


host_many = KernelSpec(
    name="host_many",
    version=1,
    axes=(Axis("n", bucket="pow2"),),
    signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
    implementations=(
        Implementation(
            name="numbered",
            requires={"host"},
            backend="host",
            tunables=(Tunable("number", tuple(range(1, 21))),),
            constraints=(Constraint("odd_n", "n = 13 has no variant at all", lambda v: v.n != 13),),
            defaults=({"number": 1},),
            build=build,
        ),
    ),
    reference=lambda problem, inputs: {"y": 2.0 * inputs["x"].double()},
    cost=lambda p: Cost(flops=2.0 * p.n, bytes=8.0 * p.n),
)
