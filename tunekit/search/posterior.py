"""What measured candidates say of the others: a Gaussian process over a pool, grown one candidate at a time.

`rows` holds, for each measured candidate, one row of the Cholesky factor's
inverse times the covariance with the whole pool. A further candidate adds one
row, in time linear in the pool; the last rows can be taken back, which is how
candidates that are out for measurement count as measured without a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.search.encoding import Codes, Floats
from tunekit.search.kernel import JITTER, Covariance

Singles = NDArray[np.float32]
Columns = list[NDArray[np.intp]]


class Posterior:
    """The mean and deviation of each candidate of `pool` (rows of codes), after `measured` (rows of codes)."""

    def __init__(self, covariance: Covariance, pool: Codes, measured: Codes) -> None:
        self._tables = [table.astype(np.float32) for table in covariance.tables()]
        self._noise = covariance.noise
        self._pool = _columns(pool)
        self._count = len(measured)
        room = 2 * self._count + 16
        self._measured = np.zeros((room, measured.shape[1]), np.intp)
        self._measured[: self._count] = measured
        within = self._between(_columns(measured), _columns(measured)).astype(np.float64)
        inverse = np.linalg.inv(np.linalg.cholesky(within + self._noise * np.eye(self._count)))
        self._inverse = np.zeros((room, room))
        self._inverse[: self._count, : self._count] = inverse
        self._rows = np.zeros((room, len(pool)), np.float32)
        self._rows[: self._count] = inverse.astype(np.float32) @ self._between(_columns(measured), self._pool)
        self._variance: Singles = 1 - np.einsum("ij,ij->j", self._rows, self._rows)

    def __len__(self) -> int:
        return self._count

    def add(self, code: NDArray[np.int16]) -> None:
        """Count one more candidate as measured."""
        if self._count == len(self._rows):
            self._grow()
        n, row = self._count, _columns(code[None, :])
        inverse = self._inverse[:n, :n]
        last = inverse @ self._between(row, _columns(self._measured[:n]))[0]
        pivot = np.sqrt(max(1 + self._noise - float(last @ last), JITTER))
        self._inverse[n, :n], self._inverse[n, n] = -(last @ inverse) / pivot, 1 / pivot
        new = self._between(row, self._pool)[0] - last.astype(np.float32) @ self._rows[:n]
        self._rows[n] = new / np.float32(pivot)
        self._variance -= self._rows[n] ** 2
        self._measured[n] = code
        self._count = n + 1

    def forget(self, count: int) -> None:
        """Take back all but the first `count`."""
        while self._count > count:
            self._count -= 1
            self._variance += self._rows[self._count] ** 2

    def mean(self, values: Floats) -> tuple[Singles, float]:
        """The mean of each candidate of the pool, given the standardised values of the first ones, and their scale."""
        n = len(values)
        whitened = self._inverse[:n, :n] @ values
        scale = max(float(whitened @ whitened) / n, 1e-3)
        return whitened.astype(np.float32) @ self._rows[:n], scale

    def variance(self) -> Singles:
        """The variance of each candidate of the pool, the signal's being 1."""
        return np.maximum(self._variance, np.float32(1e-8))

    def _between(self, left: Columns, right: Columns) -> Singles:
        product = np.ones((len(left[0]), len(right[0])), np.float32)
        for table, a, b in zip(self._tables, left, right, strict=True):
            product *= table[a][:, b]
        return product

    def _grow(self) -> None:
        n = self._count
        for name in ("_measured", "_rows"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        inverse = np.zeros((len(self._rows), len(self._rows)))
        inverse[:n, :n] = self._inverse[:n, :n]
        self._inverse = inverse


def _columns(codes: NDArray[np.integer[Any]]) -> Columns:
    return [np.ascontiguousarray(column, dtype=np.intp) for column in codes.T]
