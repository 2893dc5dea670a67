"""One output against its oracle: which elements are wrong, and how.

Three checks, by the spec's tolerance. Cosine similarity and relative norm judge the
whole; they let one wrong element of a million pass, so each element is judged too:

    |out - ref| <= 8 * relative_norm * scale + eps * |ref|      scale = max(rms(ref), rms(ref's row))

`relative_norm` times the RMS is the standard deviation that the spec allows to errors
of the computation; rounding errors are close to normal and eight deviations have a
probability of 1e-15, so a kernel that passes the norm by rounding alone passes here at
any size. Errors grow with their own row (a peaked softmax), hence the row's RMS. `eps`,
one unit in the last place, is twice what rounding to the output's dtype can cost. An
element that is stale, misplaced or never accumulated is off by about the RMS itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunekit.oracle.patterns import bits
from tunekit.spec import Tolerance

if TYPE_CHECKING:
    import torch

DEVIATIONS = 8.0
CHUNK_ELEMENTS = 2**24
RANGES = 3


@dataclass(frozen=True)
class Comparison:
    """`wrong` says what was wrong, None if nothing; the figures are over the finite elements."""

    wrong: str | None
    cosine: float
    relative_norm: float
    max_abs: float


def compare(
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    tolerance: Tolerance,
    unwritten: int,
    dims: Sequence[str | int],
    region: tuple[slice, ...] | None = None,
) -> Comparison:
    """Compare `out` with `ref` (any float dtype, the same shape) inside `region`.

    `unwritten` is the bit pattern that `out` held before the launch; `dims` names the
    dims for messages. Where the reference is infinite or NaN the output must be the same.
    """
    judged = out if region is None else out[region]
    wanted = ref if region is None else ref[region]
    offsets = [0] * out.ndim if region is None else [s.indices(n)[0] for s, n in zip(region, out.shape, strict=False)]
    offsets += [0] * (out.ndim - len(offsets))
    verdict = _Verdict(name, judged.contiguous(), wanted.contiguous(), tolerance, unwritten)
    place = _Place(name, judged.shape, offsets, dims)
    return Comparison(verdict.words(place), verdict.cosine, verdict.relative_norm, verdict.max_abs)


class _Verdict:
    """The figures and the per-element masks, computed a chunk of rows at a time to bound the memory."""

    def __init__(self, name: str, out: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance, unwritten: int) -> None:
        self._name, self._tolerance = name, tolerance
        columns = out.shape[-1] if out.ndim else 1
        self.out, self.ref = out.reshape(-1, columns), ref.reshape(-1, columns)
        self.unwritten = (bits(out) == unwritten).reshape(-1, columns)
        self.nan = self.unwritten.new_zeros(self.unwritten.shape)
        self.off = self.unwritten.new_zeros(self.unwritten.shape)
        self.max_abs = 0.0
        squares = sum(float((ref.square()).sum()) for _, _, ref, _ in self._chunks())
        count = max(1, self.ref.numel())
        self._rms = math.sqrt(squares / count)
        dot = out_squares = error_squares = 0.0
        for rows, o, r, finite in self._chunks():
            allowed = self._allowed(r)
            error = (o - r).abs()
            same = (error <= allowed).where(finite, self._identical(rows))
            self.nan[rows] = self.out[rows].double().isnan() & ~same
            self.off[rows] = ~same
            error = error.where(finite, 0.0)
            self.max_abs = max(self.max_abs, float(error.max())) if error.numel() else self.max_abs
            dot += float((o * r).sum())
            out_squares += float(o.square().sum())
            error_squares += float(error.square().sum())
        self.relative_norm = _ratio(error_squares, squares)
        self.cosine = 1.0 if squares == out_squares == 0 else _cosine(dot, out_squares, squares)

    def _chunks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Row slices with out and ref in float64, zero where the reference is not finite, and that mask."""
        step = max(1, CHUNK_ELEMENTS // max(1, self.out.shape[1]))
        for start in range(0, len(self.out), step):
            rows = slice(start, start + step)
            ref = self.ref[rows].double()
            finite = ref.isfinite()
            yield rows, self.out[rows].double().where(finite, 0.0), ref.where(finite, 0.0), finite

    def _allowed(self, ref: torch.Tensor) -> torch.Tensor:
        """The largest error allowed to each element."""
        import torch

        limit = self._tolerance.max_abs
        if not self.out.is_floating_point():
            return ref.new_full(ref.shape, limit or 0.0)
        info = torch.finfo(self.out.dtype)
        row_rms = ref.square().mean(dim=1, keepdim=True).sqrt()
        scale = row_rms.clamp(min=self._rms)
        smallest = info.tiny * info.eps  # the step between subnormals
        allowed = DEVIATIONS * self._tolerance.relative_norm * scale + info.eps * ref.abs() + smallest
        return allowed if limit is None else allowed.clamp(max=limit)

    def _identical(self, rows: slice) -> torch.Tensor:
        out, ref = self.out[rows].double(), self.ref[rows].double()
        return (out == ref) | (out.isnan() & ref.isnan())

    def words(self, place: _Place) -> str | None:
        """What was wrong, the most telling fault first."""
        floats = self.out.is_floating_point()
        unwritten = self.unwritten if floats else self.unwritten & self.off
        if bool(unwritten.any()):
            return place.describe("unwritten", unwritten)
        if bool(self.nan.any()):
            return place.describe("NaN", self.nan)
        if bool(self.off.any()):
            row, column = (int(i) for i in self.off.nonzero()[0])
            got, want = float(self.out[row, column].double()), float(self.ref[row, column].double())
            allowed = float(self._allowed(self.ref[row : row + 1].double())[0, column])
            detail = f"got {got:.6g}, want {want:.6g} (off by {abs(got - want):.3g}, allowed {allowed:.3g})"
            return place.describe("mismatch", self.off, detail)
        if self.relative_norm > self._tolerance.relative_norm and floats:
            return f"{self._name}: relative norm error {self.relative_norm:.3g} > {self._tolerance.relative_norm:g}"
        if self.cosine < self._tolerance.cosine and floats:
            return f"{self._name}: cosine similarity {self.cosine:.8f} < {self._tolerance.cosine:g}"
        return None


def _ratio(error_squares: float, squares: float) -> float:
    if error_squares == 0:
        return 0.0
    return math.sqrt(error_squares / squares) if squares else math.inf


def _cosine(dot: float, out_squares: float, ref_squares: float) -> float:
    return dot / math.sqrt(out_squares * ref_squares) if out_squares and ref_squares else 0.0


@dataclass(frozen=True)
class _Place:
    """Puts a mask over an output's region into words, by the signature's names for the dims."""

    name: str
    shape: Sequence[int]
    offsets: Sequence[int]
    dims: Sequence[str | int]

    def describe(self, fault: str, mask: torch.Tensor, detail: str = "") -> str:
        """``o: mismatch at [3, 5]: ...; 2 of 64 elements, in rows 3-4, cols 5``."""
        where = mask.reshape(tuple(self.shape))
        first = [int(i) + offset for i, offset in zip(where.nonzero()[0], self.offsets, strict=True)]
        count, total = int(where.sum()), where.numel()
        parts = [self._ranges(where, dim) for dim in range(where.ndim)]
        spread = ", ".join(part for part in parts if part)
        detail = f": {detail}" if detail else ""
        return f"{self.name}: {fault} at {first}{detail}; {count} of {total} elements" + (
            f", in {spread}" if spread else ""
        )

    def _ranges(self, where: torch.Tensor, dim: int) -> str:
        """The indices of one dim that hold a fault, as ranges; empty if all do."""
        others = [d for d in range(where.ndim) if d != dim]
        hit = (where.any(dim=others) if others else where).nonzero().flatten().tolist()
        if len(hit) == where.shape[dim]:
            return ""
        ranges: list[list[int]] = []
        for index in hit:
            if ranges and ranges[-1][1] == index - 1:
                ranges[-1][1] = index
            else:
                ranges.append([index, index])
        offset = self.offsets[dim]
        shown = " ".join(f"{a + offset}" if a == b else f"{a + offset}-{b + offset}" for a, b in ranges[:RANGES])
        more = f" and {len(ranges) - RANGES} more" if len(ranges) > RANGES else ""
        label = self.dims[dim] if isinstance(self.dims[dim], str) else f"dim {dim}"
        return f"{label} {shown}{more}"
