"""Where the parts of K's and V's tiles come from by TMA, for the Hopper kernels of head_dim 512.

A part is some keys times some columns, keys by columns in memory, be it K's or V's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from .attention.sequences import Sequences
from .sm90_plan import Plan


class PartStreams:
    """A stream (atom, shared, source) for K and V of each source; `source` is (.., tile, part, outer), `shared` (..,
    slot).

    `operands`: TMA's, by name; `slots` (keys, columns, slot) of the ring; `box`: (keys, columns) of a part. In a
    cluster the CTA of a `rank` fetches its share of a part's keys for all `sharers`.
    """

    def __init__(self, plan: Plan, operands: dict, slots, sequences: Sequences, place, box, rank=0, sharers=1):
        self.plan, self.sequences, self.batch, self.keys = plan, sequences, place.batch, box[0]
        self.streams = {}
        for name in operands:
            if const_expr(name not in ("q", "o")):
                atom, view = operands[name]
                view = view[None, None, place.kv_head, None]
                if const_expr(plan.problem.varlen and plan.problem.page == 0):
                    view = cute.domain_offset((sequences.first_key(place.batch), 0, 0), view)
                shared, source = cpasync.tma_partition(
                    atom,
                    rank,
                    cute.make_layout(sharers),
                    cute.group_modes(slots, 0, 2),
                    cute.group_modes(cute.local_tile(view, box, (None, None, None)), 0, 2),
                )
                self.streams[name] = atom, shared, source

    @cute.jit
    def of_step(self, operand: cutlass.Constexpr[str], runs, step, load: cutlass.Constexpr):
        """``load(stream, tile, outer)`` K or V of a step's tile, whichever source it lies in."""
        if const_expr(self.plan.two_sources):
            if step < runs.first_steps:
                self.of_first(operand, runs.first.end - 1 - step, load)
            else:
                load(self.streams[f"{operand}2"], runs.second.end - 1 - (step - runs.first_steps), self.batch)
        else:
            self.of_first(operand, runs.first.end - 1 - step, load)

    def of_first(self, operand, tile, load):
        """The same of a tile of source 1."""
        row = self.sequences.tile_row(tile, self.keys)
        load(self.streams[operand], row, self.sequences.tile_outer(self.batch, tile, self.keys))
