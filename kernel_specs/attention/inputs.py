"""Inputs of an attention problem whose values mean something: lengths, lists, pages, packed sequences.

They are as awkward as the problem allows: empty and full sequences, lists without entries, and NaN in every element of
K and V that no query may read. What is not drawn here is standard normal.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tunekit.model import Values

if TYPE_CHECKING:
    import torch

UNLISTED = 0.125  # the share of -1 entries in a list
FEW_KEYS = 64  # about a KV tile


def draw(problem: Values, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs that are more than noise, by argument name: the same for the same generator."""
    return _Draw(problem, generator, device).all()


class _Draw:
    """One drawing of a problem's inputs."""

    def __init__(self, problem: Values, generator: torch.Generator, device: torch.device) -> None:
        self._problem, self._generator, self._device = problem, generator, device

    def all(self) -> dict[str, torch.Tensor]:
        p = self._problem
        drawn: dict[str, torch.Tensor] = {}
        exists: torch.Tensor | None = None  # which rows of k and v may be read, None: all; the same for k2 and v2
        exists2: torch.Tensor | None = None
        if p.varlen:
            drawn["cu_seqlens_q"], drawn["cu_seqlens_k"] = self._packed()
            if p.page:
                del drawn["cu_seqlens_k"]
        if p.has_lengths:
            first, second = self._lengths()
            if p.page:
                drawn["page_table"], first, exists = self._pages(first)
            else:
                exists = self._below(first, p.s_k)
            drawn["lengths"] = self._int32(first)
            if p.sources == 2 and not p.gather:
                drawn["lengths2"], exists2 = self._int32(second), self._below(second, p.s_k2)
        if p.gather:
            rows = p.s_k2 if p.sources == 2 else p.s_k
            drawn["indices"], listed = self._lists(rows)
            exists, exists2 = (exists, listed) if p.sources == 2 else (listed, None)
        for source, rows in (("", exists), ("2", exists2)):
            if rows is not None:
                drawn[f"k{source}"] = self._with_nan(rows, p.head_dim)
                if not p.kv_shared:
                    drawn[f"v{source}"] = self._with_nan(rows, p.head_dim_v)
        return drawn

    def _lengths(self) -> tuple[list[int], list[int]]:
        """The lengths of both sources: ragged, at least half of what may be; as there are sequences enough, one
        without any keys, a full one, one with few keys, one each without keys of either source."""
        p = self._problem
        order = self._permutation(p.batch)
        lengths: list[list[int]] = []
        for source, most in enumerate((p.s_k, p.s_k2)):
            shares = self._shares(p.batch)
            drawn = [most - 1 - int(share * (most // 2)) for share in shares] if p.batch > 1 else [most - most // 3]
            drawn = [min(most, max(1, length)) for length in drawn]
            few = min(most, 1 + int(FEW_KEYS * shares[0]))
            special = {0: 0, 1: most, 2: few, 3 + source: 0} if p.batch > 3 else {0: 0, 1: most}
            for place, length in special.items():
                if 1 < p.batch > place:
                    drawn[order[place]] = length
            lengths.append(drawn)
        return lengths[0], lengths[1]

    def _pages(self, lengths: list[int]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        """(page table, lengths, rows of the pool that may be read): a permutation of the pool, as far as it reaches.

        No two sequences share a page that is read: where the pool is too small, the later ones are cut short.
        Entries of the table past a sequence's pages are pages of the pool all the same.
        """
        import torch

        p = self._problem
        free = self._permutation(p.pages)
        exists = torch.zeros((p.pages, p.page), dtype=torch.bool)
        table: list[list[int]] = []
        fitted: list[int] = []
        for wanted in lengths:
            own, free = free[: -(-wanted // p.page)], free[-(-wanted // p.page) :]
            length = min(wanted, len(own) * p.page)
            for place, page in enumerate(own):
                exists[page, : length - place * p.page] = True
            table.append(own)
            fitted.append(length)
        for row in table:
            wanted = p.table_pages - len(row)
            row += (free[:wanted] + [0] * wanted)[:wanted]
            free = free[wanted:]
        return self._int32(table), fitted, exists.to(self._device)

    def _lists(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, rows of the source that some query lists): each list names distinct rows in no order, with -1
        scattered between them; the first token's is as full as can be, the last one's empty if there are several."""
        import torch

        p = self._problem
        shape = (p.batch, p.t, p.top_k)
        indices = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        # A sequence's tokens read one permutation from different places: distinct rows without a sort for each.
        place = torch.arange(min(p.top_k, rows), device=self._device)
        for b in range(p.batch):
            permutation = torch.randperm(rows, generator=self._generator, device=self._device)
            start = torch.randint(rows, (p.t, 1), generator=self._generator, device=self._device)
            indices[b, :, : len(place)] = permutation[(start + place) % rows]
        if rows < p.top_k:
            indices = indices[..., torch.randperm(p.top_k, generator=self._generator, device=self._device)]
        none = torch.rand(shape, generator=self._generator, device=self._device) < UNLISTED
        none[0, 0] = False
        if p.batch * p.t > 1:
            none[-1, -1] = True
        indices.masked_fill_(none, -1)
        listed = torch.zeros((p.batch, rows + 1), dtype=torch.bool, device=self._device)
        listed.scatter_(1, (indices + 1).flatten(1), True)  # -1 goes to column 0, which is no row
        return indices.to(torch.int32), listed[:, 1:]

    def _packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first row of each packed sequence's queries and keys. Where both have the same sizes they are the
        same, as for a prompt that attends to itself."""
        p = self._problem
        queries = self._parts(p.total_t, p.t)
        same = (p.total_t, p.t) == (p.total_s_k, p.s_k)
        keys = queries if same or p.page else self._parts(p.total_s_k, p.s_k)
        starts, key_starts = ([0, *itertools.accumulate(lengths)] for lengths in (queries, keys))
        return self._int32(starts), self._int32(key_starts)

    def _parts(self, total: int, most: int) -> list[int]:
        """Lengths of `batch` sequences, at most `most` each, that sum to `total`: one is whole and, of three or more,
        one is empty, if the total allows; the others are ragged."""
        batch = self._problem.batch
        order = self._permutation(batch)
        parts = [0] * batch
        if batch >= 3 and total <= (batch - 1) * most:
            order = order[1:]
        if total >= most:
            parts[order[0]] = most
            order = order[1:]
        left = total - sum(parts)
        for place, share in zip(order, self._shares(len(order)), strict=True):
            # What the sequences after this one can't hold is its part at least; an equal part on average.
            others = len(order) - 1 - order.index(place)
            least = max(0, left - others * most)
            parts[place] = min(most, left, max(least, int(2 * share * left / (others + 1)) if others else left))
            left -= parts[place]
        return parts

    def _below(self, lengths: list[int], most: int) -> torch.Tensor:
        """[batch, most]: which rows lie below their sequence's length."""
        import torch

        return torch.arange(most, device=self._device) < self._int32(lengths).unsqueeze(1)

    def _with_nan(self, exists: torch.Tensor, columns: int) -> torch.Tensor:
        """Normal K or V with NaN in the rows that don't exist."""
        import torch

        p = self._problem
        shape = (*exists.shape, p.kv_heads, columns)
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        return noise.to(getattr(torch, p.dtype)).masked_fill_(~exists[..., None, None], torch.nan)

    def _int32(self, values: Any) -> torch.Tensor:
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _permutation(self, count: int) -> list[int]:
        import torch

        return list(torch.randperm(count, generator=self._generator, device=self._device).tolist())

    def _shares(self, count: int) -> list[float]:
        """Numbers of [0, 1)."""
        import torch

        return list(torch.rand(count, generator=self._generator, device=self._device).tolist())
