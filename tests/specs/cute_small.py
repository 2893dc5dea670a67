"""Specs over the small CuTeDSL kernels: for the probe, the compile pool and its figures.

``cute_scale``: right kernels with every kind of footprint, declared exactly.
``cute_layout``: shared-memory layouts; declares nothing, so only the trace can tell.
``cute_fixture``: compiles that fail, hang, crash or don't fit, one a value of `fixture`.
"""

from __future__ import annotations

import sys

from tunekit.model import Footprint
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tunable

AXES = (Axis("n", values=(1024,), static=True, default=1024),)
TENSORS = (TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output"))
SCALE = ScalarArg("scale", default=lambda p: 0.5)

SMEM_LIMIT = 232_448


def reference(problem, inputs):
    return {"y": 0.5 * inputs["x"].double()}


def padded(offset, alignment):
    return -(-offset // alignment) * alignment


def scale_footprint(v, arch):
    """The four bytes for the TMEM address, then the tile at its alignment; static memory is padded for them."""
    dynamic = 8 if v.tmem > 512 else 4 if v.tmem else 0
    if v.smem_bytes:
        dynamic = padded(dynamic, v.smem_align) + v.smem_bytes
    smem = padded(v.static_bytes, 1024) + dynamic if dynamic else v.static_bytes
    return Footprint(smem_bytes=smem, tmem_columns=v.tmem, threads=v.threads, cluster=v.cluster)


def build_scale(b):
    from .cute_small_kernels import Scale, fake_args

    return Scale(**b.tunables), fake_args()


def scale_implementation(name, tmem):
    return Implementation(
        name=name,
        requires={"tma", "tcgen05"} if tmem != (0,) else {"tma"},
        tunables=(
            Tunable("smem_bytes", (128, 4000, 0, SMEM_LIMIT - 1024, SMEM_LIMIT, SMEM_LIMIT + 4)),
            Tunable("smem_align", (128, 16, 1024)),
            Tunable("static_bytes", (0, 512, 2048)),
            Tunable("tmem", tmem),
            Tunable("cluster", (1, 2, 4)),
            Tunable("threads", (128, 64, 256)),
        ),
        constraints=(
            Constraint("static", "the shelf holds one element a thread", static_holds_threads),
            Constraint("something", "it must copy through something", lambda v: v.smem_bytes or v.static_bytes),
        ),
        defaults=(
            {"smem_bytes": 4000, "smem_align": 128, "static_bytes": 0, "tmem": tmem[0], "cluster": 1, "threads": 128},
        ),
        footprint=scale_footprint,
        build=build_scale,
    )


def static_holds_threads(v):
    return v.static_bytes == 0 or v.static_bytes >= 4 * v.threads


cute_scale = KernelSpec(
    name="cute_scale",
    version=1,
    axes=AXES,
    signature=(*TENSORS, SCALE),
    implementations=(
        scale_implementation("plain", (0,)),
        scale_implementation("with_tmem", (32, 64, 512, 544)),
    ),
    reference=reference,
)

USER, RESERVED = 1, 0
LAYOUTS = {
    "one": ([(1000, 1024, USER), (4, 4, USER)], {}),
    "growing": ([(4, 4, USER), (1000, 1024, USER), (7, 1, USER), (24, 16, USER)], {}),
    "reserved": ([(4, 4, USER), (100, 128, RESERVED), (10, 16, RESERVED), (50, 64, USER)], {}),
    "branches": ([(100, 128, "branch"), (77, 128, USER)], {}),
    "merged_branches": ([(100, 128, "branch"), (77, 128, USER)], {"merge": True}),
    "asked": ([(100, 128, USER)], {"launch_smem": 5000}),
    "asked_too_little": ([(6000, 128, USER)], {"launch_smem": 5000}),
    "none": ([], {}),
    "two_kernels": (None, {}),
}


def build_layout(b):
    from .cute_small_kernels import Layout, TwoKernels, fake_args

    allocations, options = LAYOUTS[b.tunables.layout]
    kernel = TwoKernels() if allocations is None else Layout(allocations, **options)
    return kernel, fake_args(with_scale=False)


cute_layout = KernelSpec(
    name="cute_layout",
    version=1,
    axes=AXES,
    signature=TENSORS,
    implementations=(
        Implementation(
            name="layout",
            requires={"tma"},
            tunables=(Tunable("layout", tuple(LAYOUTS)),),
            defaults=({"layout": "one"},),
            build=build_layout,
        ),
    ),
    reference=reference,
)

FIXTURES = (
    "good",
    "whole_tile",
    "hungry",
    "nested_ifs",
    "nested_ifs_slow",
    "garbage_ptx",
    "register_count",
    "smem_overflow",
    "native_segfault",
    "native_abort",
    "not_a_kernel",
)


def build_fixture(b):
    from . import cute_small_kernels as kernels

    how = b.tunables.fixture
    sys.setrecursionlimit(1_000_000)  # the nested branches are traced by recursion
    args = kernels.fake_args(with_scale=False)
    if how == "whole_tile":
        kernel = kernels.WholeTileInOneThread(128, 128)
        return kernel, kernel.args()
    if how == "hungry":
        kernel = kernels.WholeTileInOneThread(128, 8)
        return kernel, kernel.args()
    if how == "nested_ifs":
        return kernels.NestedIfs(700), args
    if how == "nested_ifs_slow":
        return kernels.NestedIfs(400), args
    if how == "garbage_ptx":
        return kernels.GarbagePtx(), args
    if how == "register_count":
        return kernels.BadRegisterCount(), args
    if how == "smem_overflow":
        return kernels.Layout([(60_000 * 4, 128, USER)]), args
    if how == "native_segfault":
        kernels.on_small_stack(kib=512)
        return kernels.NestedIfs(300), args
    if how == "native_abort":
        kernels.with_little_memory(mib=200)
        kernel = kernels.WholeTileInOneThread(128, 8)
        return kernel, kernel.args()
    if how == "not_a_kernel":
        return "a string"
    return kernels.Layout([(1000, 128, USER)]), args


cute_fixture = KernelSpec(
    name="cute_fixture",
    version=1,
    axes=AXES,
    signature=TENSORS,
    implementations=(
        Implementation(
            name="fixture",
            requires={"tma"},
            tunables=(Tunable("fixture", FIXTURES),),
            defaults=({"fixture": "good"},),
            build=build_fixture,
        ),
    ),
    reference=reference,
)
