"""What an attention problem can't do without: the products of visible pairs, and each byte moved once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tunekit.model import Cost, Values

ELEMENT_BYTES = 2
WORD_BYTES = 4


def cost(p: Values) -> Cost:
    """FLOPs and bytes, with every sequence as long as declared (`s_k`, `s_k2`) and every list full.

    flops = 2 * heads * pairs * (head_dim + head_dim_v), where pairs are the (query, key) pairs that see each other,
    counted exactly: by the mask in source 1, s_k2 or top_k a query in source 2. Packed sequences count as equal shares
    of total_t and total_s_k; what ragged ones need may be more or less.

    bytes = 2 * heads * tokens * (head_dim + head_dim_v) for Q and O, where tokens are the queries of all sequences,
    + 2 * kv_heads * rows * (head_dim + head_dim_v), without head_dim_v if kv_shared, where rows are the keys that some
    query sees, each once a sequence; of a gathered source min(keys, t * top_k),
    + 4 * (heads * tokens for each of lse and row_max, batch * t * top_k for the lists, batch * table_pages).
    """
    tokens = pairs = rows = 0
    for count, queries, keys in _sequences(p):
        tokens += count * queries
        if not p.gather or p.sources == 2:
            pairs += count * _visible_pairs(p, queries, keys)
            rows += count * _seen_keys(p, queries, keys)
        if p.gather:
            listed = min(p.top_k, keys if p.sources == 1 else p.s_k2)
            pairs += count * queries * listed
            rows += count * min(keys if p.sources == 1 else p.s_k2, queries * listed)
        elif p.sources == 2:
            pairs += count * queries * p.s_k2
            rows += count * p.s_k2
    columns = p.head_dim + p.head_dim_v
    row_columns = p.head_dim if p.kv_shared else columns
    words = tokens * p.heads * ((p.return_lse or not p.normalize) + (not p.normalize))
    words += p.batch * p.t * p.top_k + (p.batch * p.table_pages if p.page else 0)
    return Cost(
        flops=2.0 * p.heads * pairs * columns,
        bytes=float(
            ELEMENT_BYTES * (p.heads * tokens * columns + p.kv_heads * rows * row_columns) + WORD_BYTES * words
        ),
    )


def _sequences(p: Values) -> Iterator[tuple[int, int, int]]:
    """(how many, their queries, their keys) of each kind of sequence."""
    if not p.varlen:
        yield p.batch, p.t, p.s_k
        return
    queries, longer = divmod(p.total_t, p.batch)
    keys, more = divmod(p.total_s_k, p.batch) if not p.page else (p.s_k, 0)
    ends = sorted({0, longer, more, p.batch})
    for begin, end in itertools.pairwise(ends):
        yield end - begin, queries + (begin < longer), keys + (begin < more)


def _bounds(p: Values, queries: int, keys: int) -> tuple[int, int]:
    """(first, last) key of source 1 that query 0 sees by the mask, one more for each further query."""
    diagonal = 0 if p.mask == "causal_top_left" else keys - queries
    unlimited = queries + keys
    left = p.window_left if p.window_left >= 0 else unlimited
    right = p.window_right if p.mask == "window" else 0 if p.mask != "none" else -1
    return diagonal - left, diagonal + (right if right >= 0 else unlimited)


def _visible_pairs(p: Values, queries: int, keys: int) -> int:
    """Pairs of source 1: query i sees the keys below min(keys, last + i + 1), but not those below first + i."""
    first, last = _bounds(p, queries, keys)
    return _clamped_sum(last + 1, queries, keys) - _clamped_sum(first, queries, keys)


def _seen_keys(p: Values, queries: int, keys: int) -> int:
    """Keys of source 1 that at least one query sees."""
    first, last = _bounds(p, queries, keys)
    end = min(keys, last + queries)
    return max(0, end - max(0, first))


def _clamped_sum(begin: int, count: int, most: int) -> int:
    """The sum of min(max(x, 0), most) over `count` ints x from `begin` on."""

    def below(end: int) -> int:  # the same over 0 <= x < end
        inside = min(max(end, 0), most + 1)
        return inside * (inside - 1) // 2 + max(0, end - inside) * most if end > 0 else 0

    return below(begin + count) - below(begin)
