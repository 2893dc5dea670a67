"""The merge of split KV within a cluster, alone. `exit_barrier=False` leaves out the barrier before the exit."""

from __future__ import annotations

import math

from kernel_specs.kernels.attention.workspace import elements
from tunekit.model import Values
from tunekit.spec import Axis, Implementation, KernelSpec, ScalarArg, TensorArg, Tolerance, Tunable

from .split_merge import draw, reference


def as_merge(p):
    return Values({**p, "batch": 1, "t": 1, "heads": p.rows, "has_sink": False, "normalize": True})


def scaled(p, generator, device):
    """Partial results of any magnitude: O is exchanged in 16 bits."""
    found = draw(as_merge(p), generator, device)
    found["partials"][: p.rows * p.splits * p.columns] *= 10.0**p.exponent
    if p.infinite:  # the first column of the last row, of a split that has keys there
        found["partials"][(p.rows - 1) * p.columns] = math.inf
    return found


def expected(p, given):
    found = reference(as_merge(p), given)
    return {"o": found["o"].view(p.rows, p.columns), "lse": found["lse"].flatten()}


def build(b):
    from .split_cluster_kernel import Merge, fake_args

    return Merge(b.problem, b.tunables.exit_barrier, b.tunables.compact), fake_args(b.problem)


split_cluster = KernelSpec(
    name="split_cluster",
    version=1,
    axes=(
        Axis("rows", values=(64, 128), static=True, default=64),
        Axis("columns", values=(64, 128, 256), static=True, default=64),
        Axis("splits", values=(2, 3, 8, 16), static=True, default=3),
        Axis("exponent", values=(-30, 0, 30), default=0),
        Axis("infinite", kind="flag", default=False),
        Axis("n", default=lambda p: elements(p.rows, p.splits, p.columns)),
    ),
    signature=(
        TensorArg("partials", ("n",), "float32"),
        TensorArg("o", ("rows", "columns"), "bfloat16", role="output"),
        TensorArg("lse", ("rows",), "float32", role="output"),
        ScalarArg("scale", default=lambda p: 0.3),
    ),
    implementations=(
        Implementation(
            name="cluster",
            requires={"wgmma"},
            tunables=(Tunable("exit_barrier", (True, False)), Tunable("compact", (True, False))),
            defaults=({"exit_barrier": True, "compact": True},),
            build=build,
        ),
    ),
    inputs=scaled,
    reference=expected,
    tolerance=Tolerance(cosine=0.999997, relative_norm=3e-3),
    examples=({},),
)
