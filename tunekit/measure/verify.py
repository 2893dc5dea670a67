"""Is a variant right? It is run on poisoned outputs and compared with the spec's oracle. Part of the device half."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tunekit.errors import SpecError, UserError
from tunekit.measure.compare import compare
from tunekit.measure.device import Device, is_out_of_memory
from tunekit.measure.inputs import Arguments, bits, poison
from tunekit.model import Outcome, Stage, Status, Values, Variant
from tunekit.space import serves
from tunekit.spec import KernelSpec, TensorArg
from tunekit.spec.inputs import draw, scalars

LAUNCHES = 2
ORACLE_CACHE_BYTES = 2 * 2**30

# Called with a phase ("prepare", "run", "check") and what is being done, in words.
Phase = Callable[[str, str], None]


@dataclass(frozen=True)
class Case:
    """One set of inputs that a variant must get right."""

    problem: Values
    seed: int

    def __str__(self) -> str:
        return f"{self.problem} seed={self.seed}"


def cases(spec: KernelSpec, variant: Variant, problem: Values, seeds: int) -> tuple[Case, ...]:
    """What to verify: `problem` under each seed, then each dynamic dim at each of its edges.

    Edges that the spec's or the variant's constraints forbid are left out.
    """
    found = [Case(problem, seed) for seed in range(seeds)]
    for axis in spec.axes:
        if axis.static or axis.kind != "dim":
            continue
        for edge in axis.edges:
            if edge == problem[axis.name]:
                continue
            try:
                at_edge = spec.problem(problem.merged({axis.name: edge}))
            except SpecError:
                continue
            if serves(spec, variant, at_edge) is None:
                found.append(Case(at_edge, seeds))
    return tuple(found)


class Oracle:
    """The spec's reference outputs, kept between variants, on the host: a faulty kernel can't reach them there."""

    def __init__(self, device: Device, limit_bytes: int = ORACLE_CACHE_BYTES) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[str, str, int, Case], dict[str, torch.Tensor]] = OrderedDict()

    def outputs(
        self, reference: str, spec: KernelSpec, case: Case, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The reference's outputs for `inputs`, by name, on the host.

        Raises:
            SpecError: the reference fails, leaves an output out or gives the wrong shape.
        """
        key = (reference, spec.name, spec.version, case)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        outputs = self._compute(spec, case, inputs)
        self._kept[key] = outputs
        while len(self._kept) > 1 and self._bytes() > self._limit_bytes:
            self._kept.popitem(last=False)
        return outputs

    def _bytes(self) -> int:
        return sum(tensor.nbytes for outputs in self._kept.values() for tensor in outputs.values())

    def _compute(self, spec: KernelSpec, case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            given = self._call(spec, case, inputs)
        except RuntimeError as error:
            if not (self._device.is_gpu and is_out_of_memory(error)):
                raise
            self._device.release()
            given = self._call(spec, case, {name: tensor.cpu() for name, tensor in inputs.items()})
        outputs: dict[str, torch.Tensor] = {}
        for argument in spec.arguments(case.problem):
            if not isinstance(argument, TensorArg) or argument.role == "input":
                continue
            tensor = given.get(argument.name)
            if not isinstance(tensor, torch.Tensor):
                raise SpecError(f"gives no output {argument.name} for {case.problem}", field="reference")
            if tuple(tensor.shape) != argument.sizes(case.problem):
                have, want = tuple(tensor.shape), argument.sizes(case.problem)
                raise SpecError(f"{argument.name} is {have}; the signature says {want}", field="reference")
            outputs[argument.name] = tensor.to("cpu", copy=True)
        return outputs

    def _call(self, spec: KernelSpec, case: Case, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        copies = {name: tensor.clone() for name, tensor in inputs.items()}  # a reference may write in place
        return spec.reference(case.problem, {**copies, **scalars(spec, case.problem)})


class Verifier:
    """Verifies variants on one device, one after another."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.oracle = Oracle(device)

    def verify(
        self,
        reference: str,
        spec: KernelSpec,
        variant: Variant,
        problem: Values,
        function: Callable[..., Any],
        seeds: int,
        phase: Phase,
    ) -> Outcome:
        """Run every case twice; the first fault ends it. `reference` is what ``load_spec`` took.

        What the launch itself raises goes on to the caller.
        """
        to_try = cases(spec, variant, problem, seeds)
        figures = _Figures()
        for case in to_try:
            wrong = self._case(reference, spec, case, function, figures, phase)
            if wrong:
                status, words = wrong
                return Outcome(Stage.VERIFY, status, f"{words} [{case}]", facts=figures.values(len(to_try)))
        return Outcome(Stage.VERIFY, Status.OK, facts=figures.values(len(to_try)))

    def _case(
        self,
        reference: str,
        spec: KernelSpec,
        case: Case,
        function: Callable[..., Any],
        figures: _Figures,
        phase: Phase,
    ) -> tuple[Status, str] | None:
        phase("prepare", f"inputs and oracle of {case}")
        inputs = draw(spec, case.problem, case.seed, self._device.torch)
        arguments = Arguments(spec, case.problem, inputs, self._device.torch)
        kept = self.oracle.outputs(reference, spec, case, inputs)
        wanted = {name: tensor.to(self._device.torch) for name, tensor in kept.items()}
        first: dict[str, torch.Tensor] = {}
        for launch in range(1, LAUNCHES + 1):
            arguments.reset(launch)
            self._device.synchronize()
            phase("run", f"launch {launch} on {case}")
            function(*arguments.call)
            self._device.synchronize()
            phase("check", f"launch {launch} on {case}")
            wrong = arguments.damage() or wrong_outputs(spec, case.problem, arguments, wanted, launch, figures)
            if wrong:
                return Status.WRONG_RESULT, f"launch {launch}: {wrong}"
            if launch == 1:
                first = {name: tensor.clone() for name, tensor in arguments.outputs().items()}
        changed = _differences(arguments, case.problem, first)
        return (Status.NOT_DETERMINISTIC, changed) if changed else None


def wrong_outputs(
    spec: KernelSpec,
    problem: Values,
    arguments: Arguments,
    wanted: Mapping[str, torch.Tensor],
    launch: int,
    figures: _Figures | None = None,
) -> str | None:
    """What is wrong with the outputs of launch number `launch`, in words; None if nothing."""
    for name, tensor in arguments.outputs().items():
        argument = arguments.guarded[name].argument
        comparison = compare(
            name,
            tensor,
            wanted[name].to(tensor.device),
            spec.tolerance_of(name),
            poison(tensor.dtype, launch),
            argument.shape,
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


def _differences(arguments: Arguments, problem: Values, first: Mapping[str, torch.Tensor]) -> str | None:
    """Where two launches on the same inputs differ in any bit of what must be written."""
    for name, tensor in arguments.outputs().items():
        part = region(arguments.guarded[name].argument, problem) or ()
        before, now = bits(first[name])[part], bits(tensor)[part]
        differ = (before != now).nonzero()
        if len(differ):
            at = tuple(int(i) for i in differ[0])
            values = f"{float(first[name][part][at]):.9g} then {float(tensor[part][at]):.9g}"
            return f"{name}: two launches differ in {len(differ)} of {now.numel()} elements, at {list(at)}: {values}"
    return None


class _Figures:
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
