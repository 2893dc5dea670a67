"""Where a sequence's queries and keys lie: padded, packed end to end, or in the pages of a pool.

Everything is asked by batch index and answered in Int32.
"""

from dataclasses import dataclass

from cutlass import Int32, const_expr

from tunekit.model import Values


def extent(problem: Values, tensors: dict):
    """(the most query positions of a sequence, sequences) of a call, for its grid: numbers of the host's side."""
    if const_expr(problem.varlen):
        return tensors["max_t"], tensors["cu_seqlens_q"].shape[0] - 1
    return tensors["q"].shape[1], tensors["q"].shape[0]


@dataclass(frozen=True)
class Sequences:
    """The layout of one call. `problem`: the static axes; `tensors`: the call's tensors by argument name."""

    problem: Values
    tensors: dict

    def queries(self, batch):
        """How many query positions the sequence has."""
        if const_expr(self.problem.varlen):
            starts = self.tensors["cu_seqlens_q"]
            return starts[batch + 1] - starts[batch]
        return Int32(self.tensors["q"].shape[1])

    def first_query(self, batch):
        """The row of the sequence's first query in Q, O and the statistics."""
        return self.tensors["cu_seqlens_q"][batch] if const_expr(self.problem.varlen) else Int32(0)

    def keys(self, batch):
        """How many keys of source 1 the sequence has, or entries of its list where that is gathered."""
        if const_expr(self.problem.gather and self.problem.sources == 1):
            return self.listed()
        if const_expr(self.problem.has_lengths):
            return self.tensors["lengths"][batch]
        if const_expr(self.problem.varlen):
            starts = self.tensors["cu_seqlens_k"]
            return starts[batch + 1] - starts[batch]
        return Int32(self.tensors["k"].shape[1])

    def keys2(self, batch):
        """How many keys of source 2 the sequence has, or entries of its list where that is gathered."""
        if const_expr(self.problem.gather):
            return self.listed()
        if const_expr(self.problem.has_lengths):
            return self.tensors["lengths2"][batch]
        return Int32(self.tensors["k2"].shape[1])

    def listed(self):
        """How many entries a query token's index list has, the -1 ones counted."""
        return Int32(self.tensors["indices"].shape[2])

    def batch_mode(self, batch):
        """The batch coordinate of Q and O in their `rows_view`: packed ones have a single batch."""
        return Int32(0) if const_expr(self.problem.varlen) else batch

    def first_key(self, batch):
        """The row of the sequence's first key in K and V, where they are packed end to end."""
        return self.tensors["cu_seqlens_k"][batch]

    def tile_row(self, tile, kv_tile: int):
        """Which tile a KV tile of source 1 is from the sequence's first key on, or within its page."""
        return tile % (self.problem.page // kv_tile) if const_expr(self.problem.page > 0) else tile

    def tile_outer(self, batch, tile, kv_tile: int):
        """Which [rows, heads, d] a KV tile of source 1 lies in: see `key_place`."""
        if const_expr(self.problem.page > 0):
            return self.tensors["page_table"][batch, tile * kv_tile // self.problem.page]
        return Int32(0) if const_expr(self.problem.varlen) else batch

    def key_place(self, batch, tile, kv_tile: int):
        """(row, outer coordinate) of a KV tile of source 1: the first row of the tile, and which [rows, heads, d] it
        lies in: the sequence's own, the one packed tensor, or a page of the pool. A tile lies within one page, so a
        page must be a multiple of ``kv_tile``."""
        row = tile * kv_tile
        if const_expr(self.problem.page > 0):
            page = self.problem.page
            return row % page, self.tensors["page_table"][batch, row // page]
        if const_expr(self.problem.varlen):
            return self.tensors["cu_seqlens_k"][batch] + row, Int32(0)
        return row, batch
