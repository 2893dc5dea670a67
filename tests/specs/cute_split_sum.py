"""Row sums in two kernels, one after another: partial sums go through a workspace. Runs on every GPU architecture."""

from __future__ import annotations

from tunekit.model import Footprint
from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tolerance, Tunable


def build(b):
    from .cute_split_sum_kernel import SplitSum, fake_args

    return SplitSum(**b.tunables), fake_args(b.tunables.splits > 1)


cute_split_sum = KernelSpec(
    name="cute_split_sum",
    version=1,
    axes=(Axis("rows", bucket="pow2", edges=(1, 3)), Axis("columns", bucket="pow2", edges=(1, 100), default=256)),
    signature=(
        TensorArg("x", ("rows", "columns"), "float32"),
        TensorArg("y", ("rows",), "float32", role="output"),
    ),
    implementations=(
        Implementation(
            name="two_kernels",
            requires={"tma"},
            tunables=(Tunable("splits", (4, 1)), Tunable("forgets", (False, True))),
            workspace=lambda v, arch: v.rows * v.splits if v.splits > 1 else 0,
            footprint=lambda v, arch: Footprint(smem_bytes=0, tmem_columns=0, threads=32, cluster=1),
            build=build,
            defaults=({"splits": 4, "forgets": False},),
        ),
    ),
    reference=lambda problem, inputs: {"y": inputs["x"].double().sum(1)},
    tolerance=Tolerance(cosine=0.999999, relative_norm=1e-5),
    examples=({"rows": 3},),
)
