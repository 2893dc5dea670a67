# ruff: noqa: SIM102  # conditions at compile time stay around those at run time
"""One CuTeDSL kernel, y = 2x, with every fault that a verifier or a worker must survive."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

THREADS = 128
FAR = 1 << 44  # elements: no GPU maps 64 TiB behind an allocation


def fake_args():
    """x, y of any n floats, and the caller's stream."""
    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(Float32, (n,), assumed_align=16) for _ in range(2))
    return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)


class Double:
    """y = 2x, a thread an element. `fault` says what goes wrong; `smem_bytes` is allocated and used, 0 is none;
    `cycles` is how long every thread waits."""

    def __init__(self, *, fault="none", smem_bytes=0, cycles=0):
        self.fault = fault
        self.smem_bytes = smem_bytes
        self.cycles = cycles

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        n = cute.size(x)
        if const_expr(self.cycles > 0):
            wait(self.cycles)
        if const_expr(self.fault == "spin"):
            spin()
        if const_expr(self.fault == "odd"):
            if i == n - 1 and n % 2 == 1:
                i = n  # skipped below
        last = n // 2 if const_expr(self.fault == "half") else n
        if i < last:
            value = x[i] * Float32(2.0)
            if const_expr(self.smem_bytes > 0):
                value = self.through_smem(value, thread)
            if const_expr(self.fault == "nan"):
                if i == n // 3:
                    value = value * Float32(float("nan"))
            if const_expr(self.fault == "one_element"):
                if i == n // 2 + 1:
                    value = value + Float32(1.0)
            y[i] = value
        if const_expr(self.fault == "past_end"):
            if i == 0:
                cute.make_tensor(y.iterator + n, cute.make_layout(1))[0] = Float32(1.0)
        if const_expr(self.fault == "out_of_bounds"):
            if i == 0:
                cute.make_tensor(y.iterator + Int64(FAR), cute.make_layout(1))[0] = Float32(1.0)

    @cute.jit
    def through_smem(self, value: Float32, thread: cutlass.Int32):
        """Store and load at both ends of the whole allocation, so that all of it must be there."""
        count = self.smem_bytes // 4
        tile = SmemAllocator().allocate_tensor(Float32, cute.make_layout(count), byte_alignment=16)
        tile[thread] = value
        tile[count - 1 - thread] = tile[thread]
        return tile[count - 1 - thread]

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(
            grid=(cute.ceil_div(cute.size(x), THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )


@cute.jit
def wait(cycles: cutlass.Constexpr):
    begin = cute.arch.clock64()
    while cute.arch.clock64() - begin < cycles:
        pass


@cute.jit
def spin():
    """An endless loop that no compiler may drop."""
    llvm.inline_asm(None, [], "{\nSPIN:\nnanosleep.u32 1000;\nbra SPIN;\n}", "", has_side_effects=True, asm_dialect=0)
