"""The base of a comparison: the same kernels as another checkout has them, compiled in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunekit.check.baseline import Baseline
from tunekit.check.rounds import Samples
from tunekit.check.targets import Selection, Target, vanished
from tunekit.check.verdict import Entry, Row, Verdict, fastest
from tunekit.errors import UserError
from tunekit.spec import KernelSpec


@dataclass(frozen=True)
class Base:
    """The targets of one spec in the base checkout, by name; empty where there is no base."""

    targets: Mapping[str, Target] = field(default_factory=dict)

    def baseline(self, targets: Sequence[Target], samples: Samples) -> Baseline:
        """What the base's compiles say, as a baseline: kernels that it lacks, or can't compile, are new."""
        kernels: dict[str, Entry] = {}
        for target in targets:
            before, unit = fastest(samples.base.get(target.name, [])), fastest(samples.reference_of(target))
            if max(before, unit) < float("inf"):
                v = target.variant
                kernels[target.name] = Entry(
                    v.spec, v.implementation, v.arch, target.static, v.tunables, before / unit, before
                )
        return Baseline(kernels)

    def gone(self, spec: KernelSpec, selection: Selection) -> list[Row]:
        """A failing row for each kernel of the base that the spec can't make any more."""
        rows = []
        kept = {target.name for target in selection.targets}
        for name, target in self.targets.items():
            v = target.variant
            why = "" if name in kept else vanished(spec, v.implementation, v.arch, target.static, v.tunables)
            if why:
                reason = f"is in the base, but no longer in the spec: {why}"
                rows.append(Row(name, Verdict.VANISHED, reason, file=selection.targets[0].file))
        return rows


def in_base(reference: str, base: Path) -> str:
    """The reference of a spec in the checkout `base`: a shipped spec by name, or a file at the same place.

    Raises:
        UserError: `base` is no directory, or a path spec lies outside the working directory.
    """
    if not base.is_dir():
        raise UserError(f"no directory {base} (--base takes another checkout)")
    text, _, name = reference.partition(".py:")
    if not (name or reference.endswith(".py")):
        return f"{base.absolute() / 'kernel_specs' / reference}.py:{reference}"
    path = Path(f"{text}.py" if name else reference).absolute()
    if not path.is_relative_to(Path.cwd()):
        raise UserError(f"{path} lies outside {Path.cwd()}: its place in {base} is not known")
    return f"{base.absolute() / path.relative_to(Path.cwd())}" + (f":{name}" if name else "")
