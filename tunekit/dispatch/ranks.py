"""The ranks of a job: what this one is called."""

from __future__ import annotations

import os
import sys
from typing import Any


def distributed() -> Any:
    """torch.distributed, where it is initialised; else None. Imports nothing."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def own_name() -> str:
    """This rank, or process, in words; read once, when a kernel is loaded."""
    group = distributed()
    rank = os.environ.get("RANK", "") if group is None else str(group.get_rank())
    local = os.environ.get("LOCAL_RANK", "")
    if not rank:
        return f"process {os.getpid()}"
    return f"rank {rank}" + (f" (local rank {local})" if local and local != rank else "")
