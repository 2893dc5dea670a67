"""tunekit: declarative CuTeDSL kernel specs, tuned in isolation, served by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunekit.dispatch.loading import load
    from tunekit.dispatch.lookup import best
    from tunekit.dispatch.recorder import capture
    from tunekit.dispatch.starting import start_cuda
    from tunekit.dispatch.stats import prometheus, stats
    from tunekit.dispatch.torch_op import torch_op

    __version__: str

__all__ = ["__version__", "best", "capture", "load", "prometheus", "start_cuda", "stats", "torch_op"]


_HOMES = {
    "load": "tunekit.dispatch.loading",
    "best": "tunekit.dispatch.lookup",
    "capture": "tunekit.dispatch.recorder",
    "start_cuda": "tunekit.dispatch.starting",
    "stats": "tunekit.dispatch.stats",
    "prometheus": "tunekit.dispatch.stats",
    "torch_op": "tunekit.dispatch.torch_op",
}


def __getattr__(name: str) -> Any:
    """The public names, each imported when it is first asked for: `import tunekit` costs nothing."""
    import importlib

    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "__version__":
        value = importlib.import_module("tunekit.identity").distribution_version("tunekit") or "0+unknown"
    else:
        raise AttributeError(f"module 'tunekit' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
