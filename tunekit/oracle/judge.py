"""All outputs of one call against the oracle's, and the worst figures of several calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.oracle.compare import compare
from tunekit.oracle.patterns import bits
from tunekit.spec import KernelSpec, TensorArg

if TYPE_CHECKING:
    import torch


def judge(
    spec: KernelSpec,
    problem: Values,
    outputs: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    unwritten: Callable[[torch.dtype], int],
    figures: Figures | None = None,
    written: Mapping[str, torch.Tensor] | None = None,
) -> str | None:
    """What is wrong with the outputs, in words; None if nothing.

    `wanted` are the reference's, by name; `unwritten` gives the bit pattern that an output held before. Where a
    part of a grid ran, `written` has a mask for each output: only what it holds is compared.
    """
    for argument in spec.arguments(problem):
        if not isinstance(argument, TensorArg) or argument.name not in outputs:
            continue
        out, want = outputs[argument.name], wanted[argument.name].to(outputs[argument.name].device)
        if written is not None:
            mask = written[argument.name]
            out, want = out.clone(), want.where(mask, 0)
            bits(out)[~mask] = 0
        comparison = compare(
            argument.name,
            out,
            want,
            spec.tolerance_of(argument.name),
            unwritten(out.dtype),
            argument.dims(problem),
            region(argument, problem),
        )
        if figures:
            figures.add(comparison.cosine, comparison.relative_norm, comparison.max_abs)
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
        self._cosine, self._relative_norm, self._max_abs = 1.0, 0.0, 0.0
        self._seen, self._finite = False, True

    def add(self, cosine: float, relative_norm: float, max_abs: float) -> None:
        self._seen = True
        self._finite &= math.isfinite(cosine) and math.isfinite(relative_norm) and math.isfinite(max_abs)
        self._cosine = min(self._cosine, cosine)
        self._relative_norm = max(self._relative_norm, relative_norm)
        self._max_abs = max(self._max_abs, max_abs)

    def values(self, cases: int) -> Values:
        """As facts."""
        if not self._seen or not self._finite:
            return Values(cases=cases)
        worst = {"cosine": self._cosine, "relative_norm": self._relative_norm, "max_abs_error": self._max_abs}
        return Values(cases=cases).merged(worst)
