"""The attention oracle in float64: the exact outputs, and the same with P and O rounded as a kernel must round them.

It works on one sequence, some KV heads and some queries at a time, so that no tensor has many more than
`CHUNK_ELEMENTS` elements; K and V past a sequence's length are never read. It runs where its inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tunekit.model import Values

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 2**24  # of float64: 128 MB


def reference(problem: Values, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The outputs of a problem for the inputs as they are, in float64."""
    return _attention(problem, inputs, rounding=False)


def rounded(problem: Values, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`reference` with P rounded to the inputs' dtype before the second product, and O at the end; still as float64.

    P is exp(scale * (score - row_max)), so relative to the row's maximum; the row sum is that of the unrounded P.
    """
    return _attention(problem, inputs, rounding=True)


def _attention(problem: Values, inputs: Mapping[str, Any], *, rounding: bool) -> dict[str, torch.Tensor]:
    import torch

    q = inputs["q"]
    rows = q.shape[:-1]  # [batch, t, heads], packed [total_t, heads]
    o = q.new_zeros((*rows, int(problem.head_dim_v)), dtype=torch.float64)
    lse, row_max = (q.new_full(rows, -torch.inf, dtype=torch.float64) for _ in range(2))
    kv_heads = int(problem.kv_heads)
    group = int(problem.heads) // kv_heads
    for where, sources in _sequences(problem, inputs):
        for heads in _slices(kv_heads, sum(source.elements_of_a_head for source in sources)):
            q_heads = slice(heads.start * group, heads.stop * group)
            per_query = (heads.stop - heads.start) * sum(source.elements_of_a_query(group) for source in sources)
            for part in _slices(q[where].shape[0], per_query):
                # [KV heads, positions, heads of the group, columns]
                queries = q[where][part, q_heads].double().unflatten(1, (-1, group)).transpose(0, 1)
                sink = inputs["sink"][q_heads].double().unflatten(0, (-1, 1, group)) if problem.has_sink else None
                chunk = _Chunk(queries, heads, part)
                seen = [source.within(part) for source in sources]
                done = _attend(problem, inputs["scale"], chunk, seen, sink, q.dtype if rounding else None)
                for whole, piece in zip((o, lse, row_max), done, strict=True):
                    whole[where][part, q_heads] = piece.transpose(0, 1).flatten(1, 2)
    outputs = {"o": o}
    if problem.return_lse or not problem.normalize:
        outputs["lse"] = lse.transpose(-1, -2).contiguous()
    if not problem.normalize:
        outputs["row_max"] = row_max.transpose(-1, -2).contiguous()
    return outputs


class _Chunk(NamedTuple):
    """Queries [KV heads, positions, heads of the group, head_dim], and which KV heads and positions these are."""

    queries: torch.Tensor
    heads: slice
    positions: slice


def _attend(
    problem: Values,
    scale: float,
    chunk: _Chunk,
    sources: list[_Dense | _Listed],
    sink: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, lse, row_max) of some queries: one softmax over all sources. `dtype`: what P and O are rounded to."""
    import torch

    parts = [source.scores(chunk) for source in sources]
    scores = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    widths = [source.width for source in sources]
    if not sum(widths):
        scores = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    row_max = scores.amax(-1)
    # A row that sees no key subtracts nothing, so that its weights are exp(-inf) = 0 and not NaN.
    subtracted = row_max.where(row_max.isfinite(), 0.0)
    weights = scores.sub_(subtracted.unsqueeze(-1)).mul_(scale).exp_()
    row_sum = weights.sum(-1)
    lse = scale * row_max + row_sum.log()
    if dtype is not None:
        weights = weights.to(dtype).double()
    o = chunk.queries.new_zeros((*row_sum.shape, int(problem.head_dim_v)))
    for source, mine in zip(sources, weights[..., : sum(widths)].split(widths, dim=-1), strict=True):
        o += source.mix(mine, chunk)
    if problem.normalize:
        denominator = row_sum if sink is None else row_sum + torch.exp(sink - scale * subtracted)
        o /= denominator.where(row_sum > 0, 1.0).unsqueeze(-1)
    return (o if dtype is None else o.to(dtype).double()), lse, row_max


class _Dense(NamedTuple):
    """A sequence's keys that exist, k [keys, kv_heads, head_dim] and v [keys, kv_heads, head_dim_v].

    Query i sees key j where ``first + i <= j <= last + i``; None: no such bound.
    """

    k: torch.Tensor
    v: torch.Tensor
    first: int | None = None
    last: int | None = None

    @property
    def width(self) -> int:
        """Scores of a query."""
        return self.k.shape[0]

    @property
    def elements_of_a_head(self) -> int:
        return self.width * (self.k.shape[-1] + self.v.shape[-1])

    def elements_of_a_query(self, group: int) -> int:
        return self.width * group

    def within(self, positions: slice) -> _Dense:
        """The keys that some query of `positions` may see."""
        begin = 0 if self.first is None else min(max(0, self.first + positions.start), self.width)
        end = self.width if self.last is None else max(begin, min(self.last + positions.stop, self.width))
        first, last = (None if bound is None else bound - begin for bound in (self.first, self.last))
        return _Dense(self.k[begin:end], self.v[begin:end], first, last)

    def scores(self, chunk: _Chunk) -> torch.Tensor:
        """q.k [KV heads, positions, heads of the group, keys], -inf where unseen."""
        import torch

        k = self.k[:, chunk.heads].double().transpose(0, 1)
        scores = (chunk.queries.flatten(1, 2) @ k.mT).unflatten(1, chunk.queries.shape[1:3])
        i = torch.arange(chunk.positions.start, chunk.positions.stop, device=k.device).view(-1, 1, 1)
        j = torch.arange(self.width, device=k.device)
        if self.first is not None:
            scores.masked_fill_(j < self.first + i, -torch.inf)
        if self.last is not None:
            scores.masked_fill_(j > self.last + i, -torch.inf)
        return scores

    def mix(self, weights: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """The weighted sums of V's rows: [KV heads, positions, heads of the group, head_dim_v]."""
        v = self.v[:, chunk.heads].double().transpose(0, 1)
        return (weights.flatten(1, 2) @ v).unflatten(1, weights.shape[1:3])


class _Listed(NamedTuple):
    """Rows of k and v by `indices` [positions, top_k]: those of each query, -1 for none."""

    k: torch.Tensor
    v: torch.Tensor
    indices: torch.Tensor

    @property
    def width(self) -> int:
        """Scores of a query."""
        return self.indices.shape[-1]

    @property
    def elements_of_a_head(self) -> int:
        return 0

    def elements_of_a_query(self, group: int) -> int:
        return self.width * (group + self.k.shape[-1] + self.v.shape[-1])

    def within(self, positions: slice) -> _Listed:
        """All of it: each query has a list of its own."""
        return self

    def scores(self, chunk: _Chunk) -> torch.Tensor:
        """q.k [KV heads, positions, heads of the group, top_k], -inf where nothing is listed."""
        import torch

        listed = self.indices[chunk.positions]
        scores = chunk.queries @ self._rows(self.k, chunk).mT
        return scores.masked_fill_((listed < 0).unsqueeze(1), -torch.inf)

    def mix(self, weights: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """The weighted sums of V's rows: [KV heads, positions, heads of the group, head_dim_v]."""
        return weights @ self._rows(self.v, chunk)

    def _rows(self, source: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """[KV heads, positions, top_k, columns] in float64; zeros where nothing is listed."""
        listed = self.indices[chunk.positions]
        rows = source[:, chunk.heads][listed.clamp(min=0).long()].masked_fill_((listed < 0)[..., None, None], 0.0)
        return rows.double().permute(2, 0, 1, 3)


def _sequences(problem: Values, inputs: Mapping[str, Any]) -> Iterator[tuple[int | slice, list[_Dense | _Listed]]]:
    """Each sequence: where its queries lie in q (q[it] is [positions, heads, head_dim]), and its sources."""
    starts = inputs["cu_seqlens_q"].tolist() if problem.varlen else None
    lengths, lengths2 = (inputs[name].tolist() if name in inputs else None for name in ("lengths", "lengths2"))
    columns = slice(int(problem.head_dim_v))
    for b in range(inputs["q"].shape[0] if starts is None else len(starts) - 1):
        where = b if starts is None else slice(starts[b], starts[b + 1])
        queries = inputs["q"].shape[1] if starts is None else starts[b + 1] - starts[b]
        ours = [_keys_of(problem, inputs, name, b, lengths) for name in ("k", *(() if problem.kv_shared else ("v",)))]
        sources: list[_Dense | _Listed] = []
        if problem.gather and problem.sources == 1:
            sources.append(_Listed(ours[0], ours[-1][..., columns], inputs["indices"][b]))
        else:
            first, last = _bounds(problem, inputs, queries, ours[0].shape[0])
            sources.append(_Dense(ours[0], ours[-1][..., columns], first, last))
        if problem.sources == 2:
            end = None if lengths2 is None else lengths2[b]
            k2 = inputs["k2"][b, :end]
            v2 = (k2 if problem.kv_shared else inputs["v2"][b, :end])[..., columns]
            sources.append(_Listed(k2, v2, inputs["indices"][b]) if problem.gather else _Dense(k2, v2))
        yield where, sources


def _keys_of(problem: Values, inputs: Mapping[str, Any], name: str, b: int, lengths: list[int] | None) -> torch.Tensor:
    """The rows of k or v that exist for sequence `b`: [keys, kv_heads, columns]."""
    tensor = inputs[name]
    if problem.page:
        length = lengths[b] if lengths else 0
        pages = inputs["page_table"][b, : -(-length // int(problem.page))].long()
        return tensor[pages].flatten(0, 1)[:length]
    if problem.varlen:
        begin, end = inputs["cu_seqlens_k"][b : b + 2].tolist()
        return tensor[begin:end]
    return tensor[b, : None if lengths is None else lengths[b]]


def _bounds(problem: Values, inputs: Mapping[str, Any], queries: int, keys: int) -> tuple[int | None, int | None]:
    """(first, last) key that query 0 sees, one more for each further query; None: no such bound."""
    if problem.mask == "none":
        return None, None
    if problem.mask == "causal_top_left":
        return None, 0
    diagonal = keys - queries
    if problem.mask == "causal":
        return None, diagonal
    left, right = int(inputs["left"]), int(inputs["right"])
    return (None if left < 0 else diagonal - left), (None if right < 0 else diagonal + right)


def _slices(count: int, elements_of_one: int) -> Iterator[slice]:
    """`count` things in runs of as many as `CHUNK_ELEMENTS` hold; at least one each."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements_of_one))
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))
