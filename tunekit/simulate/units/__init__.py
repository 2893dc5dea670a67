"""The instructions, one file a chapter of the ISA. `load` imports them all, which registers them."""

from __future__ import annotations

import functools
import importlib
import pkgutil


@functools.cache
def load() -> None:
    """Registers every unit's instructions (once)."""
    for module in pkgutil.walk_packages(__path__, __name__ + "."):
        importlib.import_module(module.name)
