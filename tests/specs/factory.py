"""Two specs from one factory: their build functions differ only in the number that they close over."""

from __future__ import annotations

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

SOURCE = """
#include "tunekit_host.h"

TUNEKIT_KERNEL(args, count) {
    if (count != 2) return fail("expects x, y");
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    const int64_t n = tensor_arg(args, 0)->shape[0];
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] + ADDEND;
    return 0;
}
"""


def make(addend):
    return KernelSpec(
        name=f"add_{addend}",
        version=1,
        axes=(Axis("n", bucket="pow2"),),
        signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
        implementations=(
            Implementation(
                name="loop",
                requires={"host"},
                backend="host",
                tunables=(Tunable("unroll", (1,)),),
                build=lambda b: SOURCE.replace("ADDEND", f"{addend}.0f"),
                defaults=({"unroll": 1},),
            ),
        ),
        reference=lambda problem, inputs: {"y": inputs["x"].double() + addend},
        examples=({"n": 8},),
    )


SPECS = [make(3), make(40)]
