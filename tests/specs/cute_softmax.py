"""A row softmax: the small real kernel of tests and figures. Runs on every GPU architecture."""

from __future__ import annotations

from tunekit.model import Cost, Footprint
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tolerance, Tunable


def build(b):
    from .cute_softmax_kernel import RowSoftmax, fake_args

    return RowSoftmax(columns=b.problem.columns, **b.tunables), fake_args(b.problem.columns)


def footprint(v, arch):
    return Footprint(smem_bytes=2 * 4 * (v.threads // 32), tmem_columns=0, threads=v.threads, cluster=1)


def reference(problem, inputs):
    return {"y": inputs["x"].double().softmax(dim=-1)}


cute_softmax = KernelSpec(
    name="cute_softmax",
    version=1,
    axes=(Axis("rows", bucket="pow2", edges=(1, 3)), Axis("columns", values=(1024, 4096), static=True, default=4096)),
    signature=(
        TensorArg("x", ("rows", "columns"), "float32"),
        TensorArg("y", ("rows", "columns"), "float32", role="output"),
    ),
    implementations=(
        Implementation(
            name="one_row_a_cta",
            requires={"tma"},
            tunables=(Tunable("threads", (128, 32, 64, 256, 512, 1024)), Tunable("vector", (4, 1, 2))),
            constraints=(
                Constraint("registers", "a thread holds at most 64 values", lambda v: v.columns <= 64 * v.threads),
                Constraint("whole", "every thread needs a vector", lambda v: v.columns >= v.threads * v.vector),
            ),
            defaults=({"threads": 128, "vector": 4},),
            footprint=footprint,
            build=build,
        ),
    ),
    reference=reference,
    tolerance=Tolerance(cosine=0.999999, relative_norm=1e-5),
    cost=lambda p: Cost(flops=5.0 * p.rows * p.columns, bytes=8.0 * p.rows * p.columns),
    examples=({"rows": 64},),
)
