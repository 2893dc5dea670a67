"""A host kernel with flags, an argument that exists for some problems only, and a constraint on sizes.

``host_moments``: y = scale * x, or with centred=True y = scale * (x - mean) and the row means.
"""

from __future__ import annotations

from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tunable

SOURCE = """
#include "tunekit_host.h"

TUNEKIT_KERNEL(args, count) {
    if (count != 3 + CENTRED) return fail("wrong number of arguments");
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    const float scale = (float)scalar_arg(args, 2 + CENTRED);
    const int64_t rows = tensor_arg(args, 0)->shape[0], cols = tensor_arg(args, 0)->shape[1];
    for (int64_t r = 0; r < rows; ++r) {
        float mean = 0.0f;
#if CENTRED
        for (int64_t c = 0; c < cols; ++c) mean += x[r * cols + c] / cols;
        ((float *)data_arg(args, 2))[r] = mean;
#endif
        for (int64_t c = 0; c < cols; ++c) y[r * cols + c] = scale * (x[r * cols + c] - mean);
    }
    return 0;
}
"""


def reference(problem, inputs):
    x = inputs["x"].double()
    scale = inputs.get("scale", 2.0)
    if not problem.centred:
        return {"y": scale * x}
    mean = x.mean(1)
    return {"y": scale * (x - mean[:, None]), "mean": mean}


host_moments = KernelSpec(
    name="host_moments",
    version=1,
    axes=(
        Axis("rows", bucket="pow2"),
        Axis("cols"),
        Axis("centred", kind="flag", static=True, default=False),
    ),
    signature=(
        TensorArg("x", ("rows", "cols"), "float32"),
        TensorArg("y", ("rows", "cols"), "float32", role="output"),
        TensorArg("mean", ("rows",), "float32", role="output", when=lambda p: p.centred),
        ScalarArg("scale", default=lambda p: 2.0),
    ),
    implementations=(
        Implementation(
            name="loop",
            requires={"host"},
            backend="host",
            tunables=(Tunable("block", (8, 16)),),
            constraints=(Constraint("block_divides", "the block must divide cols", lambda p: p.cols % p.block == 0),),
            build=lambda b: f"#define CENTRED {int(b.problem.centred)}\n{SOURCE}",
            defaults=({"block": 16}, {"block": 8}),
        ),
    ),
    reference=reference,
    examples=({"rows": 4, "cols": 32},),
)
