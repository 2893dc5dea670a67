"""Backends: who turns what a spec's ``build`` returns into an artifact.

A backend is named by its implementation (``cutedsl``, ``host``, ``library``) and imported only
when asked for: this module imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunekit.arch import Arch
from tunekit.errors import UserError
from tunekit.spec import Implementation

if TYPE_CHECKING:
    from tunekit.backends.contract import Backend

BACKENDS = ("cutedsl", "host", "library")
SYMBOL_DIGITS = 24
# Where under a request's out_dir the CuTeDSL backend's PTX appears when ptxas begins.
DUMP_PREFIX = "dump-"
PTX_PATTERN = f"{DUMP_PREFIX}*/*.ptx"


def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in BACKENDS:
        raise UserError(f"unknown backend '{name}' (known: {', '.join(BACKENDS)})")
    module: Any = importlib.import_module(f"tunekit.backends.{name}")
    loaded: Backend = module
    return loaded


def symbol_of(compile_key: str) -> str:
    """The exported function's name for a compile key."""
    return f"tunekit_{compile_key[:SYMBOL_DIGITS]}"


def refusal(implementation: Implementation, arch: Arch) -> str | None:
    """Why `implementation` must not be compiled for `arch`, in a sentence, or None."""
    if not implementation.is_library and (implementation.backend == "host") == arch.is_gpu:
        return f"{implementation.name} is for the {implementation.backend} backend, which can't build for {arch.name}"
    return implementation.unsupported(arch)
