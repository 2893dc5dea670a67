"""A spec that sets a compile limit of its own, and whose one build hangs natively."""

from __future__ import annotations

import ctypes

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable


def hang(b):
    """Holds the GIL for ever, waiting for a lock of its own."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


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
