"""A spec that sets a compile limit of its own, and whose one build hangs natively."""

from __future__ import annotations

import collections
import itertools

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable


def hang(b):
    collections.deque(itertools.repeat(0), maxlen=0)


def make(name, limit_s):
    return KernelSpec(
        name=name,
        version=1,
        axes=(Axis("n"),),
        signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
        implementations=(
            Implementation(
                name="hangs",
                requires={"host"},
                backend="host",
                tunables=(Tunable("block", (8,)),),
                build=hang,
                defaults=({"block": 8},),
            ),
        ),
        reference=lambda problem, inputs: {"y": inputs["x"].double()},
        examples=({"n": 8},),
        compile_limit_s=limit_s,
    )


SPECS = [make("limited", 1.0), make("unlimited", None)]
