"""One output against its oracle: which elements are wrong, and how.

By the spec's tolerance. Cosine similarity and relative norm judge the whole; they let
one wrong element of a million pass, so each element is judged too:

    |out - ref| <= 8 * relative_norm * scale + eps * |ref|      scale = max(rms(ref), rms(ref's row))

`relative_norm` times the RMS is the standard deviation that the spec allows to errors
of the computation; rounding errors are close to normal and eight deviations have a
probability of 1e-15, so a kernel that passes the norm by rounding alone passes here at
any size. Errors grow with their own row (a peaked softmax), hence the row's RMS. `eps`,
one unit in the last place, is twice what rounding to the output's dtype can cost. An
element that is stale, misplaced or never accumulated is off by about the RMS itself.

Where the tolerance gives `rounding`, the error's norm is also held against that of the
*rounded oracle*: the reference with its intermediate results rounded as a kernel must
round them. That error is the floor on these inputs, and a fixed norm lies above it by
some factor or other. Right kernels round elsewhere (an online softmax, relative to
another maximum), so that the two errors differ by chance. Their ratio's standard
deviation is at most 0.65 / sqrt(n), where n = (sum e^2)^2 / sum e^4 is how many elements
effectively make up the rounded oracle's error e; its mean is 0.98 to 1.03 (simulated
2026-11: attention in KV tiles, with exact and with lazy rescaling, 64 to 131,072
outputs). So the factor is 1 + 2.5 / sqrt(n) where that is more: 1.25 holds from n = 100
on, some 400 elements.

Infinite elements (the LSE of a row that sees nothing) must be met exactly and are in no
norm. NaN is wrong, whatever the reference says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunekit.oracle.patterns import bits
from tunekit.oracle.place import Place
from tunekit.spec import Tolerance

if TYPE_CHECKING:
    import torch

DEVIATIONS = 8.0
CHANCE = 2.5
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Comparison:
    """`wrong` says what was wrong, None if nothing; the figures are over the elements whose reference is finite.

    `relative` is the largest |out - ref| / max(|ref|, 1); `rounding` the error's norm over the rounded oracle's, None
    where there is none.
    """

    wrong: str | None
    cosine: float
    relative_norm: float
    max_abs: float
    relative: float
    rounding: float | None = None

    def figures(self) -> tuple[float, ...]:
        """All of them that there are."""
        always = (self.cosine, self.relative_norm, self.max_abs, self.relative)
        return always if self.rounding is None else (*always, self.rounding)


def compare(
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    tolerance: Tolerance,
    unwritten: int,
    dims: Sequence[str | int],
    region: tuple[slice, ...] | None = None,
    rounded: torch.Tensor | None = None,
) -> Comparison:
    """Compare `out` with `ref` (any float dtype, the same shape) inside `region`.

    `unwritten` is the bit pattern that `out` held before the launch; `dims` names the
    dims for messages; `rounded` is the rounded oracle's output, if there is one.
    """
    part = ... if region is None else region
    offsets = [0] * out.ndim if region is None else [s.indices(n)[0] for s, n in zip(region, out.shape, strict=False)]
    offsets += [0] * (out.ndim - len(offsets))
    floor = None if rounded is None else rounded[part].contiguous()
    verdict = _Verdict(out[part].contiguous(), ref[part].contiguous(), floor, tolerance, unwritten)
    place = Place(name, out[part].shape, offsets, dims)
    return Comparison(
        verdict.words(place),
        verdict.cosine,
        verdict.relative_norm,
        verdict.max_abs,
        verdict.relative,
        verdict.rounding,
    )


class _Verdict:
    """The figures and the per-element masks, computed a chunk of rows at a time to bound the memory."""

    def __init__(
        self,
        out: torch.Tensor,
        ref: torch.Tensor,
        rounded: torch.Tensor | None,
        tolerance: Tolerance,
        unwritten: int,
    ) -> None:
        self._tolerance = tolerance
        columns = out.shape[-1] if out.ndim else 1
        self.out, self.ref = out.reshape(-1, columns), ref.reshape(-1, columns)
        self.unwritten = (bits(out) == unwritten).reshape(-1, columns)
        self.nan, self.off, self.infinite, self.far = (self.unwritten.new_zeros(self.unwritten.shape) for _ in range(4))
        self.max_abs = self.relative = 0.0
        squares = sum(float((ref.square()).sum()) for _, _, ref, _ in self._chunks())
        count = max(1, self.ref.numel())
        self._rms = math.sqrt(squares / count)
        dot = out_squares = error_squares = 0.0
        for rows, o, r, finite in self._chunks():
            error = self._judge(rows, o, r, finite)
            dot += float((o * r).sum())
            out_squares += float(o.square().sum())
            error_squares += float(error.square().sum())
        self.relative_norm = _ratio(error_squares, squares)
        self.cosine = 1.0 if squares == out_squares == 0 else _cosine(dot, out_squares, squares)
        self.rounding: float | None = None
        if rounded is not None:
            floor_squares, self._elements = self._floor(rounded.reshape(-1, columns))
            self.rounding = _ratio(error_squares, floor_squares)
            self._floor_norm = _ratio(floor_squares, squares)

    def _judge(self, rows: slice, o: torch.Tensor, r: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Marks what is wrong in some rows; the errors, 0 where the reference isn't finite."""
        out, ref = self.out[rows].double(), self.ref[rows].double()
        error = (o - r).abs()
        same = (error <= self._allowed(r)).where(finite, out == ref)
        self.nan[rows] = out.isnan()
        self.off[rows] = ~same
        self.infinite[rows] = ~same & (out.isinf() | ref.isinf())
        error = error.where(finite, 0.0)
        relative = error / r.abs().clamp(min=1.0)
        if self._tolerance.relative is not None:
            self.far[rows] = ~(relative <= self._tolerance.relative)
        if error.numel():
            self.max_abs = max(self.max_abs, float(error.max()))
            self.relative = max(self.relative, float(relative.max()))
        return error

    def _floor(self, rounded: torch.Tensor) -> tuple[float, float]:
        """Of the rounded oracle's error e: sum e^2, and (sum e^2)^2 / sum e^4, how many elements make it up."""
        squares = fourths = 0.0
        for rows, _, r, finite in self._chunks():
            error = (rounded[rows].double().where(finite, 0.0) - r).square()
            squares += float(error.sum())
            fourths += float(error.square().sum())
        return squares, squares * squares / fourths if fourths else 1.0

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

    def words(self, place: Place) -> str | None:
        """What was wrong, the most telling fault first."""
        floats = self.out.is_floating_point()
        unwritten = self.unwritten if floats else self.unwritten & self.off
        if bool(unwritten.any()):
            return place.describe("unwritten", unwritten)
        if bool(self.nan.any()):
            return place.describe("NaN", self.nan)
        if bool(self.infinite.any()):
            _, _, got, want = self._first(self.infinite)
            return place.state(self.infinite, f"is {got:.6g}, reference {want:.6g}")
        if bool(self.off.any()):
            row, column, got, want = self._first(self.off)
            allowed = float(self._allowed(self.ref[row : row + 1].double())[0, column])
            detail = f"got {got:.6g}, want {want:.6g} (off by {abs(got - want):.3g}, allowed {allowed:.3g})"
            return place.describe("mismatch", self.off, detail)
        if bool(self.far.any()):
            _, _, got, want = self._first(self.far)
            share, most = abs(got - want) / max(abs(want), 1.0), self._tolerance.relative
            detail = f"got {got:.6g}, want {want:.6g} (relative error {share:.3g}, allowed {most:g})"
            return place.describe("mismatch", self.far, detail)
        return self._norms(place.name) if floats else None

    def _norms(self, name: str) -> str | None:
        if self.relative_norm > self._tolerance.relative_norm:
            return f"{name}: relative norm error {self.relative_norm:.3g} > {self._tolerance.relative_norm:g}"
        if self.cosine < self._tolerance.cosine:
            return f"{name}: cosine similarity {self.cosine:.8f} < {self._tolerance.cosine:g}"
        factor = self._tolerance.rounding
        if factor is None or self.rounding is None:
            return None
        by_chance = 1 + CHANCE / math.sqrt(self._elements)
        if self.rounding <= max(factor, by_chance):
            return None
        few = f", {by_chance:.2f} for so few elements" if by_chance > factor else ""
        return (
            f"{name}: relative norm error {self.relative_norm:.3g} is {self.rounding:.3g} times the rounded oracle's "
            f"own {self._floor_norm:.3g} (allowed {factor:g} times{few})"
        )

    def _first(self, mask: torch.Tensor) -> tuple[int, int, float, float]:
        """Row, column, output and reference of the first element that a mask holds."""
        row, column = (int(i) for i in mask.nonzero()[0])
        return row, column, float(self.out[row, column].double()), float(self.ref[row, column].double())


def _ratio(error_squares: float, squares: float) -> float:
    if error_squares == 0:
        return 0.0
    return math.sqrt(error_squares / squares) if squares else math.inf


def _cosine(dot: float, out_squares: float, ref_squares: float) -> float:
    return dot / math.sqrt(out_squares * ref_squares) if out_squares and ref_squares else 0.0
