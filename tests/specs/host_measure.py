"""CPU kernels in C whose faults only a careful verifier sees.

``host_guard``: y = 2x, with a tunable `fault` for writes where nothing belongs.
``host_ragged``: writes the declared valid region only: the first cols-3 of each row.
``host_in_place``: acc += x, in place, and counts rows into an int output.
``host_squares``: sums of squares whose terms are rounded to bf16, as its rounded oracle rounds them, or worse.
``host_bad_oracle``: right kernels under a reference and inputs that are wrong themselves.
"""

from __future__ import annotations

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tolerance, Tunable

AXES = (Axis("rows", edges=(1, 33)), Axis("cols", values=(64, 1000), static=True, default=64))
TOLERANCE = Tolerance(cosine=0.999999, relative_norm=1e-6)

KERNEL = """
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
#include "tunekit_host.h"
TUNEKIT_KERNEL(args, count) {{
    (void)count;
    const float *x = data_arg(args, 0);
    const int64_t rows = tensor_arg(args, 0)->shape[0], cols = tensor_arg(args, 0)->shape[1];
    {body}
    return 0;
}}
"""

GUARD_BODY = """
    float *y = data_arg(args, 1);
    for (int64_t i = 0; i < rows * cols; ++i) y[i] = 2.0f * x[i];
    {fault}
"""
GUARD_FAULTS = {
    "none": "",
    "past_end": "y[rows * cols] = 1.0f;",
    "before_start": "y[-1] = 1.0f;",
    "past_tail": "if (rows % 2) for (int64_t i = 0; i < cols; ++i) y[rows * cols + i] = 0.0f;",
    "input": "((float *)x)[rows * cols - 1] += 1.0f;",
    "read_past_end": "y[rows * cols - 1] = 2.0f * x[rows * cols - 1] + 0.0f * x[rows * cols];",
    "last_bit": "static int launches; if (++launches % 2) y[7] = nextafterf(y[7], INFINITY);",
    "seventh_launch": "static int launches; if (++launches > 6) y[0] += 1.0f;",
    "spin_later": "static int launches; if (++launches > 50) for (volatile int forever = 1; forever;) {}",
    "crash_later": "static int launches; if (++launches > 50) raise(SIGSEGV);",
    "error_later": 'static int launches; if (++launches > 50) return fail("ran out of luck");',
    "alarm": "ualarm(300000, 0);",
    "slow": "usleep(2000);",
    "prints": 'puts("{\\"reply\\": 1}"); fflush(stdout);',
}

host_guard = KernelSpec(
    name="host_guard",
    version=1,
    axes=AXES,
    signature=(TensorArg("x", ("rows", "cols"), "float32"), TensorArg("y", ("rows", "cols"), "float32", role="output")),
    implementations=(
        Implementation(
            name="double",
            requires={"host"},
            backend="host",
            tunables=(Tunable("fault", tuple(GUARD_FAULTS)),),
            defaults=({"fault": "none"},),
            build=lambda b: KERNEL.format(body=GUARD_BODY.format(fault=GUARD_FAULTS[b.tunables.fault])),
        ),
    ),
    reference=lambda problem, inputs: {"y": 2 * inputs["x"].double()},
    tolerance=TOLERANCE,
)

RAGGED_BODY = """
    float *y = data_arg(args, 1);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols - {skipped}; ++c) y[r * cols + c] = 2.0f * x[r * cols + c];
"""

host_ragged = KernelSpec(
    name="host_ragged",
    version=1,
    axes=AXES,
    signature=(
        TensorArg("x", ("rows", "cols"), "float32"),
        TensorArg(
            "y",
            ("rows", "cols"),
            "float32",
            role="output",
            valid=lambda p: (slice(None), slice(0, p.cols - 3)),
        ),
    ),
    implementations=(
        Implementation(
            name="ragged",
            requires={"host"},
            backend="host",
            tunables=(Tunable("skipped", (3, 4)),),
            defaults=({"skipped": 3},),
            build=lambda b: KERNEL.format(body=RAGGED_BODY.format(skipped=b.tunables.skipped)),
        ),
    ),
    reference=lambda problem, inputs: {"y": 2 * inputs["x"].double()},
    tolerance=TOLERANCE,
)

IN_PLACE_BODY = """
    float *acc = data_arg(args, 1);
    int32_t *index = data_arg(args, 2);
    for (int64_t i = 0; i < rows * cols; ++i) acc[i] += x[i];
    for (int64_t r = 0; r < rows; ++r) index[r] = (int32_t)r + ({error} && r == rows - 1);
"""


def in_place_reference(problem, inputs):
    import torch

    inputs["acc"] += inputs["x"]  # a reference may write in place: it gets copies
    return {"acc": inputs["acc"].double(), "index": torch.arange(problem.rows)}


host_in_place = KernelSpec(
    name="host_in_place",
    version=1,
    axes=AXES,
    signature=(
        TensorArg("x", ("rows", "cols"), "float32"),
        TensorArg("acc", ("rows", "cols"), "float32", role="inout"),
        TensorArg("index", ("rows",), "int32", role="output"),
    ),
    implementations=(
        Implementation(
            name="add",
            requires={"host"},
            backend="host",
            tunables=(Tunable("error", (0, 1)),),
            defaults=({"error": 0},),
            build=lambda b: KERNEL.format(body=IN_PLACE_BODY.format(error=b.tunables.error)),
        ),
    ),
    reference=in_place_reference,
    tolerance=TOLERANCE,
)


def with_mistake(name, reference, inputs=None):
    return KernelSpec(
        name=name,
        version=1,
        axes=AXES,
        signature=host_guard.signature,
        implementations=host_guard.implementations,
        reference=reference,
        inputs=inputs,
        tolerance=TOLERANCE,
    )


def failing_reference(problem, inputs):
    raise ValueError("no oracle today")


bad_oracles = (
    with_mistake("host_reference_raises", failing_reference),
    with_mistake("host_reference_shape", lambda problem, inputs: {"y": inputs["x"][:1]}),
    with_mistake("host_reference_nothing", lambda problem, inputs: {}),
    with_mistake(
        "host_inputs_shape", host_guard.reference, lambda p, generator, device: {"x": __import__("torch").ones(3)}
    ),
    with_mistake("host_inputs_name", host_guard.reference, lambda p, generator, device: {"z": None}),
)

SQUARES_BODY = """
    float *y = data_arg(args, 1);
    for (int64_t r = 0; r < rows; ++r) {{
        double sum = 0.0;
        for (int64_t c = 0; c < cols; ++c) {{
            union {{ float f; uint32_t u; }} p = {{ x[r * cols + c] * x[r * cols + c] }};
            p.u = (p.u + {bias}) & 0xFFFF0000u;
            sum += p.f;
        }}
        y[r] = (float)sum;
    }}
    {fault}
"""
SQUARES_FAULTS = {
    "none": ("0x7FFFu + (p.u >> 16 & 1)", ""),
    "truncates": ("0", ""),
    "scales": ("0x7FFFu + (p.u >> 16 & 1)", "for (int64_t r = 0; r < rows; ++r) y[r] *= 1.003f;"),
    "infinite": ("0x7FFFu + (p.u >> 16 & 1)", "y[rows / 2] = -INFINITY;"),
}


def rounded_squares(problem, inputs):
    import torch

    return {"y": inputs["x"].double().square().to(torch.bfloat16).double().sum(1)}


host_squares = KernelSpec(
    name="host_squares",
    version=1,
    axes=AXES,
    signature=(TensorArg("x", ("rows", "cols"), "float32"), TensorArg("y", ("rows",), "float32", role="output")),
    implementations=(
        Implementation(
            name="squares",
            requires={"host"},
            backend="host",
            tunables=(Tunable("fault", tuple(SQUARES_FAULTS)),),
            defaults=({"fault": "none"},),
            build=lambda b: KERNEL.format(
                body=SQUARES_BODY.format(**dict(zip(("bias", "fault"), SQUARES_FAULTS[b.tunables.fault], strict=True)))
            ),
        ),
    ),
    reference=lambda problem, inputs: {"y": inputs["x"].double().square().sum(1)},
    rounded=rounded_squares,
    tolerance=Tolerance(cosine=0.9999, relative_norm=1e-2, rounding=1.25),
)
