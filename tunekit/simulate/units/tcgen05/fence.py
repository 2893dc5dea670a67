"""tcgen05.fence: order between the tcgen05 operations of different threads (PTX ISA 9.7.16.11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunekit.simulate.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.lanes import Lanes
from tunekit.simulate.order import TENSOR, TENSOR_BEFORE
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.warp import Warp


@instruction("tcgen05.fence::before_thread_sync")
def before_thread_sync(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        w.known.fence(TENSOR_BEFORE, TENSOR)
        return None

    return step


@instruction("tcgen05.fence::after_thread_sync")
def after_thread_sync(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        w.known.fence(TENSOR, TENSOR_BEFORE)
        return None

    return step
