"""The merge kernel of split_merge.py: nothing but its launch."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from kernel_specs.kernels.attention.merge import Combine


class Merge:
    def __init__(self, problem, pdl):
        p = problem
        outputs = ("o", "lse") if p.normalize else ("o", "lse", "row_max")
        self.names = ("partials", *(("sink",) if p.has_sink else ()), *outputs, "scale", "stream")
        self.combine = Combine(p.heads, p.columns, p.splits, p.normalize, pdl)

    @cute.jit
    def __call__(self, *arguments):
        given = dict(zip(self.names, arguments, strict=True))
        optional = (given.get("sink"), given["scale"], given["stream"])
        self.combine.launch(given["partials"], given["o"], given["lse"], given.get("row_max"), *optional)


def fake_args(p):
    batch, t = cute.sym_int32(), cute.sym_int32()
    outer = tuple(cute.sym_int64(divisibility=8) for _ in range(2))
    statistic = tuple(cute.sym_int64() for _ in range(2))
    tensors = [make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=16)]
    if p.has_sink:
        tensors.append(make_fake_tensor(Float32, (p.heads,), (1,), assumed_align=4))
    tensors.append(make_fake_tensor(BFloat16, (batch, t, p.heads, p.columns), (*outer, p.columns, 1), assumed_align=16))
    for _ in range(1 if p.normalize else 2):
        tensors.append(make_fake_tensor(Float32, (batch, p.heads, t), (*statistic, 1), assumed_align=4))
    return (*tensors, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
