"""The packages whose functions are implementations: whether they are here, and which version. Nothing is imported."""

from __future__ import annotations

import shlex

from tunekit import identity
from tunekit.spec.declare import Implementation


def absence(implementation: Implementation) -> str | None:
    """That the package of a library is not installed, and what to do; None where it is, or none is needed."""
    if not implementation.is_library or identity.distribution_version(implementation.package) is not None:
        return None
    wanted = shlex.quote(implementation.install or implementation.package)
    return f"{implementation.package} is not installed (pip install {wanted})"


def installed(implementation: Implementation) -> str:
    """The package of a library with its version here: ``flash-attn-4 4.0.0b36``; empty where there is none."""
    version = identity.distribution_version(implementation.package) if implementation.is_library else None
    return f"{implementation.package} {version}" if version else ""


def tools_of(implementation: Implementation) -> dict[str, str | None]:
    """The versions that decide what an implementation's function does: the compilers', or the library's own."""
    if not implementation.is_library:
        return identity.toolchain()
    return {implementation.package: identity.distribution_version(implementation.package)}
