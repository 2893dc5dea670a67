"""The tuners that dispatch is timed beside: each one's path of a cached hit, over a function that does nothing.

Part of benchmarks/dispatch.py. A peer that is not installed is left out. Where a package's own `__init__` imports
what a CPU can't, its tuner's module is imported without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Tensors = tuple[Any, ...]
Pair = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
"""What is called through the tuner, what is called without it, and the arguments of both."""


class Seeded(dict[Any, Any]):
    """A tuner's cache that has a result for whatever it is first asked for."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def __contains__(self, key: object) -> bool:
        self.setdefault(key, self._result)
        return True


def peers(tensors: Tensors, scale: float) -> Iterator[tuple[str, Pair | str]]:
    """name -> what to time, or why it can't be."""
    for name, make in PEERS.items():
        try:
            yield f"{name} {importlib.metadata.version(name)}", make(tensors, scale)
        except Exception as error:  # a package that is absent, or of another version
            yield name, f"{type(error).__name__}: {error}"


def triton(tensors: Tensors, scale: float) -> Pair:
    """`triton.autotune`'s launcher, keyed by two sizes."""
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    class Nothing:
        arg_names = ("q", "k", "v", "o", "scale", "batch", "s_k")

        @staticmethod
        def fn() -> None:
            pass

        def run(self, *args: Any, **options: Any) -> None:
            pass

    configs = [Config({"BLOCK": size}) for size in (64, 128)]
    nothing = Nothing()
    tuner = Autotuner(
        nothing, list(Nothing.arg_names), configs, ["batch", "s_k"], None, None, do_bench=lambda *_, **__: [1.0] * 3
    )
    arguments = (*tensors, scale, tensors[1].shape[0], tensors[1].shape[1])
    tuner.cache = Seeded(configs[0])
    tuner.run(*arguments)
    tuner.cache = dict(tuner.cache)
    return tuner.run, nothing.run, arguments


def quack(tensors: Tensors, scale: float) -> Pair:
    """quack's own `Autotuner`, keyed by shapes, strides and dtypes."""
    module = _alone("quack", "quack.autotuner")

    def nothing(q: Any, k: Any, v: Any, o: Any, scale: float, config: Any = None) -> None:
        pass

    configs = [module.AutotuneConfig(config=number) for number in (0, 1)]
    tuner = module.Autotuner(nothing, [], configs, do_bench=lambda *_, **__: [1.0] * 3)
    tuner.cache = Seeded(configs[0])
    tuner(*tensors, scale)
    tuner.cache = dict(tuner.cache)
    return tuner, nothing, (*tensors, scale)


def flashinfer(tensors: Tensors, scale: float) -> Pair:
    """FlashInfer's `AutoTuner.choose_one` and the call of what it chose, as its operators make them."""
    module = _alone("flashinfer", "flashinfer.autotuner.autotuner")

    class Nothing(module.TunableRunner):  # type: ignore[misc, name-defined]
        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
            return [0, 1]

        def forward(self, inputs: Any, tactic: int = -1, do_preparation: bool = False, **more: Any) -> None:
            pass

    tuner, runners, config = module.AutoTuner.get(), [Nothing()], module.TuningConfig()
    inputs = list(tensors)
    sizes = tuple(tuner._get_input_sizes(inputs))
    key = tuner._get_cache_key("stub", runners[0], sizes, config, runners[0].get_cache_key_extras(inputs))
    tuner.profiling_cache[key] = (1, None)
    hit, *_ = tuner.search_cache("stub", runners, sizes, config, inputs=inputs)
    if not hit:
        raise RuntimeError("its cache was not seeded")

    def tuned(*inputs: Any) -> None:
        given = list(inputs)
        runner, tactic = tuner.choose_one("stub", runners, config, given)
        runner.forward(given, tactic=tactic)

    def plain(*inputs: Any) -> None:
        runners[0].forward(list(inputs), tactic=1)

    return tuned, plain, tensors


def _alone(package: str, module: str) -> Any:
    """A module without what its package imports besides."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    if package not in sys.modules:
        bare = types.ModuleType(package)
        bare.__path__ = list(found.submodule_search_locations)
        bare.__file__ = str(Path(bare.__path__[0]) / "__init__.py")
        bare.__version__ = importlib.metadata.version({"quack": "quack-kernels"}.get(package, "flashinfer-python"))
        sys.modules[package] = bare
    return importlib.import_module(module)


PEERS = {"triton": triton, "quack-kernels": quack, "flashinfer-python": flashinfer}
