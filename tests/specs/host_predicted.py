"""Twenty host variants that declare their work: the nearer to 12, the fewer steps.

``host_unpredictable``: the same; its work function fails at 20.
"""

from __future__ import annotations

from tunekit.model import Cost
from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable, Work

SOURCE = """
#include "tunekit_host.h"
TUNEKIT_KERNEL(args, count) {
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    for (int64_t i = 0; i < tensor_arg(args, 0)->shape[0]; ++i) y[i] = 2.0f * x[i] + %d * 0.0f;
    return 0;
}
"""


def work(v, arch):
    return Work(ctas=1, steps=abs(v.number - 12), stages=1, flops=0, step_bytes=0, edge_bytes=0)


def declared(name, work):
    return KernelSpec(
        name=name,
        version=1,
        axes=(Axis("n", bucket="pow2"),),
        signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
        implementations=(
            Implementation(
                name="numbered",
                requires={"host"},
                backend="host",
                tunables=(Tunable("number", tuple(range(1, 21))),),
                defaults=({"number": 1},),
                build=lambda b: SOURCE % b.tunables.number,
                work=work,
            ),
        ),
        reference=lambda problem, inputs: {"y": 2.0 * inputs["x"].double()},
        cost=lambda p: Cost(flops=2.0 * p.n, bytes=8.0 * p.n),
    )


host_predicted = declared("host_predicted", work)
host_unpredictable = declared("host_unpredictable", lambda v, arch: work(v, arch) if v.number < 20 else v.nothing)
