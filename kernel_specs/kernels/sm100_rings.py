"""Rings of buffers between roles: a full and an empty mbarrier for each stage.

Whoever fills a stage waits until it is empty, whoever uses it until it is full. Both walk the stages in the same order,
each with its own ``Place`` (CuTeDSL's PipelineState: an index and the parity of the phase to wait for).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import tcgen05

from .sm100_plan import Fixed


@dataclass(frozen=True)
class Ring(Fixed):
    """``stages`` stages on the mbarriers at ``barriers`` (2 * stages: the full ones, then the empty ones), each of
    which completes after ``fills`` or ``uses`` arrivals. After them come ``boundaries`` more: where a source's last
    tile is put right before its use, its bytes are counted on one of those, and the stage is reported full later."""

    barriers: cute.Pointer
    stages: int
    fills: int = 1
    uses: int = 1
    boundaries: int = 0

    def initialise(self):
        """By one thread, before anyone waits."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(self.full(i), self.fills)
            cute.arch.mbarrier_init(self.empty(i), self.uses)

        for i in range(self.boundaries):
            cute.arch.mbarrier_init(self.boundary(i), 1)

    def filler(self):
        """Where a filling role starts: every stage is empty."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def user(self):
        """Where a using role starts: no stage is full."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    def full(self, index):
        """The mbarrier that says that stage `index` is full."""
        return self.barriers + index

    def empty(self, index):
        """The mbarrier that says that stage `index` is empty."""
        return self.barriers + self.stages + index

    def boundary_at(self, source: int) -> int:
        """Which of ``barriers`` counts the bytes of the source's last tile."""
        return 2 * self.stages + source

    def boundary(self, source: int):
        """That mbarrier."""
        return self.barriers + self.boundary_at(source)

    def wait_full(self, place):
        cute.arch.mbarrier_wait(self.full(place.index), place.phase)

    def wait_empty(self, place):
        cute.arch.mbarrier_wait(self.empty(place.index), place.phase)

    def drain(self, place):
        """Wait, as the filling role, until every stage was used: commits arrive in this CTA's shared memory, which must
        outlive them."""
        for _ in range(self.stages):
            self.wait_empty(place)
            place.advance()


def arrive(barrier):
    """Each calling thread arrives."""
    cute.arch.mbarrier_arrive(barrier)


def expect(barrier, size: int):
    """One thread of the calling warp arrives; the phase also waits for `size` bytes of TMA."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


def commit(barrier):
    """One arrival, when every tcgen05 operation that this warp issued so far is complete."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)
