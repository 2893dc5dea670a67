"""Where partial results of split KV lie: one float32 workspace, in elements. Plain arithmetic, no CuTeDSL.

A *row* is one query head of one query token, in the order of O: ``row = token * heads + head``, tokens counted over all
sequences. Each of ``splits`` ranges of keys leaves, for every row,

- its un-normalised output, ``columns`` values: the sum of exp(scale * (s - max)) v over its keys,
- its statistics, two values: the raw maximum of its scores (-inf: it has no key) and the sum of exp(scale * (s - max)).

Un-normalised, since that costs neither a division nor accuracy in float32. An empty range leaves zeros and -inf, so
that whoever merges need not tell it from others. The outputs come first, [splits, rows, columns]; the statistics after
them, [rows, splits, 2], so that a warp reads those of one row in one access.
"""

STATISTICS = 2


def statistics_at(rows, splits: int, columns: int):
    """Where the statistics begin; `rows` may be a number of the trace."""
    return rows * (splits * columns)


def elements(rows, splits: int, columns: int):
    """Float32 elements in all."""
    return rows * (splits * (columns + STATISTICS))
