"""The cost model in a sweep: it orders the first evaluations, and adds or leaves out none."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunekit.model import Footprint, Values, Variant
from tunekit.search.cost_model import CostModel, launch_of, parse_cost_model
from tunekit.spec import KernelSpec
from tunekit.store.shipped import shipped_cost_model

log = logging.getLogger("tunekit")


def cost_model_of(spec: KernelSpec, arch: str, directory: Path | None = None) -> CostModel | None:
    """The model that ships for a spec's version on an architecture, if its order is worth following."""
    raw = shipped_cost_model(spec.name, arch, directory)
    if raw is None:
        return None
    try:
        model = parse_cost_model(raw)
    except ValueError as error:
        log.warning("the cost model of %s on %s can't be used: %s", spec.name, arch, error)
        return None
    own = (model.spec, model.version, model.arch) == (spec.name, spec.version, arch)
    return model if own and model.usable else None


@dataclass(frozen=True)
class Predictor:
    """The predictions for one problem; there are none where `model` is None."""

    spec: KernelSpec
    problem: Values
    model: CostModel | None

    def predict_us(self, variant: Variant, compiled: Footprint | None = None) -> float | None:
        """A variant's time by what is declared, and what its compile found out; None where its work isn't declared."""
        if self.model is None:
            return None
        launch = launch_of(self.spec, self.problem, variant, compiled)
        return None if launch is None else self.model.predict_us(launch)

    def all_us(self, variants: Iterable[Variant]) -> dict[str, float]:
        """The times that can be predicted, by the variant's id."""
        times = {variant.id: self.predict_us(variant) for variant in variants}
        return {id: time for id, time in times.items() if time is not None}
