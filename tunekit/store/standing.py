"""Whether a recorded number counts here: the fields that make two environments the same.

A winner's key is spec, version, bucket, arch, GPU, driver, power limit, MIG,
CUDA, CuTeDSL version and protocol; of a library that won, also its version. Torch,
Python and tunekit don't change what a compiled kernel takes on a GPU, so they are
recorded but not compared.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tunekit.arch import ARCHES
from tunekit.identity import distribution_version
from tunekit.model import Environment, Winner

GPU_FIELDS = ("gpu", "arch", "driver", "power_limit_w", "mig", "cuda")
KEY_FIELDS = (*GPU_FIELDS, "cutlass_dsl")


class Standing(NamedTuple):
    """``here``: measured in this environment, by this protocol. ``seed``: raced first in the
    next sweep, and served only as a labelled fallback; `reason` says why in words."""

    kind: Literal["here", "seed"]
    reason: str

    @property
    def here(self) -> bool:
        return self.kind == "here"


def comparable(environment: Environment) -> dict[str, str | float | None]:
    """The fields of an environment that a measured time depends on."""
    return {name: getattr(environment, name) for name in KEY_FIELDS}


def differences(recorded: Environment, here: Environment) -> list[str]:
    """What differs, each as ``driver 570.1, here 580.2``; where no GPU is here, nothing more of the GPU's."""
    no_gpu = recorded.gpu is not None and here.gpu is None
    differ = [f"gpu {recorded.gpu}, none here"] if no_gpu else []
    return differ + [
        f"{name} {_shown(theirs)}, here {_shown(ours)}"
        for name, ours in comparable(here).items()
        if (theirs := getattr(recorded, name)) != ours and not (no_gpu and name in GPU_FIELDS)
    ]


def other_version(winner: Winner) -> str:
    """How the library that won differs from the one installed here; empty where it doesn't, or none is."""
    package, _, version = winner.library.rpartition(" ")
    here = distribution_version(package) if package else None
    return "" if here in (None, version) else f"{winner.library}, here {here}"


def is_gpu(arch: str) -> bool:
    """Whether `arch` is a GPU's; one that this version doesn't know is taken for one."""
    return arch not in ARCHES or ARCHES[arch].is_gpu


def missing_identity(environment: Environment, arch: str) -> str | None:
    """Why an environment can't be compared with any: a GPU's record that names no GPU or no driver."""
    if not is_gpu(arch):
        return None
    lacking = [name for name in ("gpu", "driver") if getattr(environment, name) is None]
    return f"the record names no {' and no '.join(lacking)}" if lacking else None


def classify(winner: Winner, environment: Environment, protocol: str, *, version: int | None = None) -> Standing:
    """Whether `winner` may be served as measured here, or is only a seed, and why.

    `version` is the spec's present one: the meaning of a problem may have changed since.
    """
    if version is not None and winner.variant.version != version:
        return Standing("seed", f"made for version {winner.variant.version} of the spec, now {version}")
    lacking = missing_identity(winner.environment, winner.variant.arch)
    if lacking:
        return Standing("seed", lacking)
    differing = list(filter(None, [*differences(winner.environment, environment), other_version(winner)]))
    if differing:
        return Standing("seed", f"measured elsewhere: {'; '.join(differing)}")
    if winner.protocol != protocol:
        return Standing("seed", f"measured by protocol '{winner.protocol}', not comparable with '{protocol}'")
    if winner.source == "shipped":
        return Standing("seed", "shipped with tunekit, not measured on this machine")
    return Standing("here", "measured here")


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)
