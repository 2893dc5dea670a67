"""Specs over one small CuTeDSL kernel, for the GPU tests of verifying and timing.

``cute_double``: y = 2x for any n; `fault` picks what goes wrong, `smem_bytes` and `cycles` what it uses.
"""

from __future__ import annotations

from tunekit.model import Cost
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tolerance, Tunable

FAULTS = ("none", "half", "nan", "one_element", "odd", "past_end", "out_of_bounds", "spin")


def build(b):
    from .cute_measure_kernels import Double, fake_args

    return Double(**b.tunables), fake_args()


def one_thing_at_a_time(v):
    return (v.fault != "none") + (v.smem_bytes > 0) + (v.cycles > 0) <= 1


cute_double = KernelSpec(
    name="cute_double",
    version=1,
    axes=(Axis("n", edges=(1, 129, 4096), default=1 << 20),),
    signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
    implementations=(
        Implementation(
            name="double",
            requires={"tma"},
            tunables=(
                Tunable("fault", FAULTS),
                Tunable("smem_bytes", (0, 1024, 232_448, 232_448 + 4)),
                Tunable("cycles", (0, 8000, 80_000)),
            ),
            constraints=(Constraint("single", "one thing is tried at a time", one_thing_at_a_time),),
            defaults=({"fault": "none", "smem_bytes": 0, "cycles": 0},),
            build=build,
        ),
    ),
    reference=lambda problem, inputs: {"y": 2 * inputs["x"].double()},
    tolerance=Tolerance(cosine=0.999999, relative_norm=1e-6),
    cost=lambda p: Cost(flops=p.n, bytes=8.0 * p.n),
)
