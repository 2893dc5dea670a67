"""All outputs of one call against the oracle's, and the worst figures of several calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.oracle.compare import Comparison, compare
from tunekit.oracle.patterns import bits
from tunekit.oracle.reference import Expected
from tunekit.spec import KernelSpec, TensorArg

if TYPE_CHECKING:
    import torch


def judge(
    spec: KernelSpec,
    problem: Values,
    outputs: Mapping[str, torch.Tensor],
    expected: Expected,
    unwritten: Callable[[torch.dtype], int],
    figures: Figures | None = None,
    written: Mapping[str, torch.Tensor] | None = None,
) -> str | None:
    """What is wrong with the outputs, in words; None if nothing.

    `unwritten` gives the bit pattern that an output held before. Where a
    part of a grid ran, `written` has a mask for each output: only what it holds is compared.
    """
    for argument in spec.arguments(problem):
        if not isinstance(argument, TensorArg) or argument.name not in outputs:
            continue
        out = outputs[argument.name]
        want, rounded = expected.outputs[argument.name].to(out.device), expected.rounded.get(argument.name)
        if rounded is not None:
            rounded = rounded.to(out.device)
        if written is not None:
            mask = written[argument.name]
            out, want = out.clone(), want.where(mask, 0)
            bits(out)[~mask] = 0
            rounded = rounded if rounded is None else rounded.where(mask, 0)
        comparison = compare(
            argument.name,
            out,
            want,
            spec.tolerance_of(argument.name),
            unwritten(out.dtype),
            argument.dims(problem),
            region(argument, problem),
            rounded,
        )
        if figures:
            figures.add(comparison)
        if comparison.wrong:
            return comparison.wrong
    return None


def region(argument: TensorArg, problem: Values) -> tuple[slice, ...] | None:
    """The part of an output that must be written; None is all of it.

    Raises:
        UserError: the spec's `valid` gives something else than slices.
    """
    if argument.valid is None:
        return None
    slices = argument.valid(problem)
    if not isinstance(slices, tuple) or not all(isinstance(s, slice) for s in slices):
        raise UserError(f"{argument.name}: valid must give a tuple of slices, not {slices!r}")
    return slices


class Figures:
    """The worst figures over all comparisons of one verification; none where NaN or infinity came in."""

    def __init__(self) -> None:
        self._seen: list[Comparison] = []

    def add(self, comparison: Comparison) -> None:
        self._seen.append(comparison)

    def values(self, cases: int) -> Values:
        """As facts: ``cosine``, ``relative_norm``, ``max_abs_error``, ``max_relative_error`` (|out - ref| / max(|ref|,
        1)) and, where a rounded oracle is held against, ``rounding_ratio``."""
        worst: dict[str, float] = {}
        if self._seen:
            worst["cosine"] = min(seen.cosine for seen in self._seen)
            worst["relative_norm"] = max(seen.relative_norm for seen in self._seen)
            worst["max_abs_error"] = max(seen.max_abs for seen in self._seen)
            worst["max_relative_error"] = max(seen.relative for seen in self._seen)
        ratios = [seen.rounding for seen in self._seen if seen.rounding is not None]
        if ratios:
            worst["rounding_ratio"] = max(ratios)
        finite = all(math.isfinite(figure) for seen in self._seen for figure in seen.figures())
        return Values(cases=cases).merged(worst if finite else {})
