"""Kernel specs: how they are declared, checked and loaded."""

from tunekit.spec.arguments import ScalarArg, TensorArg
from tunekit.spec.axes import Axis, Constraint, Tolerance, Tunable
from tunekit.spec.declare import Build, Implementation, KernelSpec
from tunekit.spec.load import absolute_reference, list_specs, load_spec
from tunekit.spec.work import Work

__all__ = [
    "Axis",
    "Build",
    "Constraint",
    "Implementation",
    "KernelSpec",
    "ScalarArg",
    "TensorArg",
    "Tolerance",
    "Tunable",
    "Work",
    "absolute_reference",
    "list_specs",
    "load_spec",
]
