"""Is a variant right? It is run on poisoned outputs and compared with the spec's oracle. Part of the device half."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tunekit.errors import SpecError
from tunekit.measure.device import Device, is_out_of_memory
from tunekit.measure.inputs import Arguments
from tunekit.measure.job import first_phase
from tunekit.model import Values, Variant
from tunekit.oracle.judge import Figures, judge, region
from tunekit.oracle.patterns import bits, poison
from tunekit.oracle.reference import Expected, expected
from tunekit.space import serves
from tunekit.spec import KernelSpec
from tunekit.spec.inputs import draw
from tunekit.trials import Outcome, Stage, Status

LAUNCHES = 2
ORACLE_CACHE_BYTES = 2 * 2**30

# Called with a phase ("prepare", "first", "run", "check") and what is being done, in words.
Phase = Callable[[str, str], None]


@dataclass(frozen=True)
class Case:
    """One set of inputs that a variant must get right."""

    problem: Values
    seed: int

    def __str__(self) -> str:
        return f"{self.problem} seed={self.seed}"


def cases(spec: KernelSpec, variant: Variant, problem: Values, seeds: int, edges: bool = True) -> tuple[Case, ...]:
    """What to verify: `problem` under each seed; then, with `edges`, each dynamic dim at each of its edges, with what
    follows from it.

    Edges that the spec's or the variant's constraints forbid are left out.
    """
    found = [Case(problem, seed) for seed in range(seeds)]
    for axis in spec.axes:
        if axis.static or axis.kind != "dim" or not edges:
            continue
        for edge in axis.edges:
            if edge == problem[axis.name]:
                continue
            try:
                at_edge = spec.varied(problem, {axis.name: edge})
            except SpecError:
                continue
            if serves(spec, variant, at_edge) is None:
                found.append(Case(at_edge, seeds))
    return tuple(found)


class Oracle:
    """What a spec's oracles give, kept between variants, on the host: a faulty kernel can't reach it there."""

    def __init__(self, device: Device, limit_bytes: int = ORACLE_CACHE_BYTES) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[str, str, int, Case], Expected] = OrderedDict()

    def outputs(self, reference: str, spec: KernelSpec, case: Case, inputs: Mapping[str, torch.Tensor]) -> Expected:
        """What the outputs must be for `inputs`, on the host. `reference` is what ``load_spec`` took.

        Raises:
            SpecError: an oracle fails, leaves an output out or gives the wrong shape.
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
        return sum(kept.nbytes for kept in self._kept.values())

    def _compute(self, spec: KernelSpec, case: Case, inputs: Mapping[str, torch.Tensor]) -> Expected:
        try:
            return expected(spec, case.problem, inputs)
        except RuntimeError as error:
            if not (self._device.is_gpu and is_out_of_memory(error)):
                raise
            self._device.release()
            return expected(spec, case.problem, {name: tensor.cpu() for name, tensor in inputs.items()})


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
        edges: bool,
        phase: Phase,
    ) -> Outcome:
        """Run every case twice; the first fault ends it. `reference` is what ``load_spec`` took.

        What the launch itself raises goes on to the caller.
        """
        to_try = cases(spec, variant, problem, seeds, edges)
        figures = Figures()
        for case in to_try:
            wrong = self._case(reference, spec, variant, case, function, figures, phase)
            if wrong:
                status, words = wrong
                return Outcome(Stage.VERIFY, status, f"{words} [{case}]", facts=figures.values(len(to_try)))
        return Outcome(Stage.VERIFY, Status.OK, facts=figures.values(len(to_try)))

    def _case(
        self,
        reference: str,
        spec: KernelSpec,
        variant: Variant,
        case: Case,
        function: Callable[..., Any],
        figures: Figures,
        phase: Phase,
    ) -> tuple[Status, str] | None:
        phase("prepare", f"inputs and oracle of {case}")
        inputs = draw(spec, case.problem, case.seed, self._device.torch)
        arguments = Arguments(spec, case.problem, inputs, self._device.torch, variant=variant)
        wanted = self.oracle.outputs(reference, spec, case, inputs).to(self._device.torch)
        first: dict[str, torch.Tensor] = {}
        first_launch = first_phase(spec.implementation(variant.implementation))
        for launch in range(1, LAUNCHES + 1):
            arguments.reset(launch)
            self._device.synchronize()
            phase("run" if launch > 1 else first_launch, f"launch {launch} on {case}")
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
    wanted: Expected,
    launch: int,
    figures: Figures | None = None,
) -> str | None:
    """What is wrong with the outputs of launch number `launch`, in words; None if nothing."""
    return judge(spec, problem, arguments.outputs(), wanted, lambda dtype: poison(dtype, launch), figures)


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
