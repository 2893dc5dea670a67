"""A host kernel with an input that exists for some sizes alone, and that the output is like.

``host_biased``: y[r] = the sum of row r of x, and where x has more than 16 columns, bias[r] beside it.
"""

from __future__ import annotations

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

SOURCE = """
#include "tunekit_host.h"

TUNEKIT_KERNEL(args, count) {
    if (count != 2 + BIASED) return fail("wrong number of arguments");
    const float *x = data_arg(args, 0), *bias = data_arg(args, BIASED);
    float *y = data_arg(args, 1 + BIASED);
    const int64_t rows = tensor_arg(args, 0)->shape[0], cols = tensor_arg(args, 0)->shape[1];
    for (int64_t r = 0; r < rows; ++r) {
        float sum = BIASED ? bias[r] : 0.0f;
        for (int64_t c = 0; c < cols; ++c) sum += x[r * cols + c];
        y[r] = sum;
    }
    return 0;
}
"""


def reference(problem, inputs):
    sums = inputs["x"].double().sum(1)
    return {"y": sums + inputs["bias"] if problem.cols > 16 else sums}


host_biased = KernelSpec(
    name="host_biased",
    version=1,
    axes=(Axis("rows", bucket="pow2"), Axis("cols", static=True)),
    signature=(
        TensorArg("x", ("rows", "cols"), "float32"),
        TensorArg("bias", ("rows",), "float32", when=lambda p: p.cols > 16),
        TensorArg("y", ("rows",), "float32", role="output"),
    ),
    implementations=(
        Implementation(
            name="loop",
            requires={"host"},
            backend="host",
            tunables=(Tunable("block", (8,)),),
            build=lambda b: f"#define BIASED {int(b.problem.cols > 16)}\n{SOURCE}",
            defaults=({"block": 8},),
        ),
    ),
    reference=reference,
    examples=({"rows": 4, "cols": 32},),
)
