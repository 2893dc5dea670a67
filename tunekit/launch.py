"""How this package starts a process of its own: one of its modules in a new interpreter."""

from __future__ import annotations

import os
import sys

# `python -m` would put the working directory first on sys.path, where a json.py or torch.py
# of the user's hides the real one.
_BOOT = (
    "import sys; sys.path[:] = sys.argv.pop(1).split({separator!r}); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` with this process's sys.path."""
    boot = _BOOT.format(separator=os.pathsep)
    return [sys.executable, "-c", boot, os.pathsep.join(sys.path), module, *arguments]
