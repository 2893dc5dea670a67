"""tcgen05.fence: order between the tcgen05 operations of different threads (PTX ISA 9.7.16.11).

The fences compose with whatever synchronises the threads, relaxed operations too (9.7.16.6.3): what lies before a
fence::before_thread_sync is passed on by every later arrival or write, and fence::after_thread_sync learns what every
earlier wait or read has seen of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.history.order import TENSOR, TENSOR_BEFORE, TENSOR_ISSUED
from tunekit.simulate.history.patterns import Patterns
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.units.tcgen05.state import WarpTensor

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp


@instruction("tcgen05.fence::before_thread_sync")
def before_thread_sync(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        known, pipe, patterns = w.known, w.part(WarpTensor).pipe, w.part(Patterns)
        known.room(pipe.index + 1)
        known.fence(TENSOR_BEFORE, TENSOR)
        known.rows[TENSOR_ISSUED, pipe.index] = pipe.epoch
        pipe.epoch += 1
        passed = w.cta.cluster.order.knowledge() if patterns.released is None else patterns.released.copy()
        passed.room(known.rows.shape[1])
        for row in (TENSOR_BEFORE, TENSOR_ISSUED):
            mine = passed.rows[row, : known.rows.shape[1]]
            np.maximum(mine, known.rows[row], out=mine)
        patterns.released = passed
        return None

    return step


@instruction("tcgen05.fence::after_thread_sync")
def after_thread_sync(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        known, seen = w.known, w.part(Patterns).observed
        if seen is not None:
            known.room(seen.rows.shape[1])
            for row in (TENSOR_BEFORE, TENSOR_ISSUED):
                mine = known.rows[row, : seen.rows.shape[1]]
                np.maximum(mine, seen.rows[row], out=mine)
        known.fence(TENSOR, TENSOR_BEFORE)
        return None

    return step
