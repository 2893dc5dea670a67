"""The KV tiles that a CTA of the Hopper attention kernel visits.

They are one walk over two runs of tiles, each from its last tile to its first: of source 1, then of source 2. Step i
of the walk is the i-th tile of it. Producers and consumers derive the same walk, each for itself.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .attention.mask import Tiles
from .attention.sequences import Sequences
from .sm90_plan import Plan


@dataclass(frozen=True)
class Runs:
    """`first`, `second`: the tiles of each source; `queries`, `keys`, `keys2`: what the sequence has; `first_steps`,
    `steps`: tiles of the first source, and of both. All counts are Int32; source 2's are None where it is not there."""

    first: Tiles
    second: Tiles | None
    queries: object
    keys: object
    keys2: object
    first_steps: object
    steps: object

    def leading_cut_steps(self):
        """How many steps from the first on have a tile that is not fully seen, or none: the right side of a mask."""
        first = self.first
        return cutlass.min(self.first_steps, cutlass.max(first.end - first.full_end, 0))


def part_of(runs: Runs, split, splits: int) -> Runs:
    """The ``split``-th of ``splits`` even parts of a walk, which may be empty."""
    first_step, end_step = runs.steps * split // splits, runs.steps * (split + 1) // splits
    begin = runs.first.end - cutlass.min(end_step, runs.first_steps)
    end = runs.first.end - cutlass.min(first_step, runs.first_steps)
    second = runs.second
    if const_expr(second is not None):
        begin2 = second.end - cutlass.max(end_step - runs.first_steps, 0)
        end2 = second.end - cutlass.max(first_step - runs.first_steps, 0)
        second = second._replace(begin=begin2, end=end2)
    return replace(
        runs,
        first=runs.first._replace(begin=begin, end=end),
        second=second,
        first_steps=end - begin,
        steps=end_step - first_step,
    )


def runs_of(plan: Plan, sequences: Sequences, batch, first_block, sides) -> Runs:
    """The walk of a cluster: its CTAs share K and V, so it is over the tiles that any of their rows needs.

    `first_block`: the first row block of the cluster; `sides`: (left, right) of a window.
    """
    queries, keys = sequences.queries(batch), sequences.keys(batch)
    head_blocks, positions = plan.packing.head_blocks, plan.packing.positions
    last_block = first_block + plan.row_blocks * plan.cluster_m - 1
    first_position = first_block // head_blocks * positions
    last_position = cutlass.min((last_block // head_blocks + 1) * positions, queries) - 1
    first = plan.mask.tiles(first_position, last_position, queries, keys, *sides)
    if const_expr(plan.ragged_rows):
        # The grid is as long as the longest sequence: a cluster past its own one's end visits nothing.
        present = Int32(first_position < queries)
        first = first._replace(begin=first.begin * present, end=first.end * present)
    first_steps = first.end - first.begin
    if const_expr(not plan.two_sources):
        return Runs(first, None, queries, keys, None, first_steps, first_steps)
    keys2 = sequences.keys2(batch)
    second = Tiles(Int32(0), (keys2 + plan.kv_tile - 1) // plan.kv_tile, Int32(0), keys2 // plan.kv_tile)
    return Runs(first, second, queries, keys, keys2, first_steps, first_steps + second.end)


@cute.jit
def valid_keys(plan: Plan, runs: Runs, step):
    """How many keys of a step's tile its sequence has, if fewer than the tile's. Gathered tiles have zeros where
    nothing is listed: all are valid."""
    valid = runs.keys - (runs.first.end - 1 - step) * plan.kv_tile
    if const_expr(plan.two_sources):
        valid2 = plan.kv_tile
        if const_expr(not plan.gather):
            valid2 = runs.keys2 - (runs.second.end - 1 - (step - runs.first_steps)) * plan.kv_tile
        valid = valid if step < runs.first_steps else valid2
    return valid
