"""A spec whose variants hold register fragments of every size: those that the back end bears, and those refused."""

from __future__ import annotations

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

# name: (how the fragment comes about, its shape, dtype)
FRAGMENTS = {
    "at_limit": ("copied", (128, 8), "Float32"),
    "one_over": ("copied", (1025,), "Float32"),
    "whole_tile": ("computed", (128, 64), "Float32"),
    "narrow": ("copied", (128, 16), "BFloat16"),
    "wide": ("copied", (513,), "Float64"),
    "value_at_limit": ("value", (32, 32), "Float32"),
    "value": ("value", (64, 32), "Float32"),
    "filled": ("filled", (2048,), "Float32"),
    "spread": ("spread", ((4, 4), (1, 512)), "Float32"),
    "partitioned": ("partitioned", (128, 64), "Float32"),
}


def build(b):
    from .cute_fragments_kernels import Held

    kernel = Held(*FRAGMENTS[b.tunables.fragment])
    return kernel, kernel.args()


cute_fragments = KernelSpec(
    name="cute_fragments",
    version=1,
    axes=(Axis("n", values=(1024,), static=True, default=1024),),
    signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
    implementations=(
        Implementation(
            name="held",
            requires={"tma"},
            tunables=(Tunable("fragment", tuple(FRAGMENTS)),),
            defaults=({"fragment": "at_limit"},),
            build=build,
        ),
    ),
    reference=lambda problem, inputs: {"y": inputs["x"].double()},
)
