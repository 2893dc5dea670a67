"""The kernels of cute_split_sum: a warp a row and split, then a warp a row."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

WARP = 32


class SplitSum:
    """y[r] = the sum of x[r, :]; split i of a row leaves its sum in workspace[r * splits + i].

    `forgets`: the last split of a row leaves nothing.
    """

    def __init__(self, *, splits, forgets):
        self.splits = splits
        self.written = splits - 1 if forgets else splits

    @cute.jit
    def over_warp(self, value: Float32):
        for step in range(5):
            value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << step)
        return value

    @cute.kernel
    def parts(self, x: cute.Tensor, sums: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        row, split, _ = cute.arch.block_idx()
        total = Float32(0.0)
        for column in range(split * WARP + lane, x.shape[1], self.splits * WARP):
            total += x[row, column]
        total = self.over_warp(total)
        if lane == 0 and split < self.written:
            sums[row * self.splits + split] = total

    @cute.kernel
    def combine(self, sums: cute.Tensor, y: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        total = Float32(0.0)
        if lane < self.splits:
            total = sums[row * self.splits + lane]
        total = self.over_warp(total)
        if lane == 0:
            y[row] = total

    @cute.jit
    def __call__(self, *arguments):
        x, y, *workspace, stream = arguments
        rows = x.shape[0]
        if const_expr(self.splits == 1):
            self.parts(x, y).launch(grid=(rows, 1, 1), block=(WARP, 1, 1), stream=stream)
        else:
            self.parts(x, workspace[0]).launch(grid=(rows, self.splits, 1), block=(WARP, 1, 1), stream=stream)
            self.combine(workspace[0], y).launch(grid=(rows, 1, 1), block=(WARP, 1, 1), stream=stream)


def fake_args(with_workspace):
    rows, columns, elements = (cute.sym_int() for _ in range(3))
    tensors = [
        make_fake_compact_tensor(Float32, (rows, columns), stride_order=(1, 0), assumed_align=4),
        make_fake_compact_tensor(Float32, (rows,), assumed_align=4),
    ]
    if with_workspace:
        tensors.append(make_fake_compact_tensor(Float32, (elements,), assumed_align=16))
    return (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))
