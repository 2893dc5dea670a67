"""Loading an artifact: through tvm_ffi, with no compiler in the process."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunekit.errors import TunekitError

CUDA_DIRECTORIES = ("cu13", "cu12")


def load_artifact(so: Path, symbol: str) -> Callable[..., Any]:
    """The function that `so` exports as `symbol`.

    It takes torch tensors (CUDA or CPU, as it was built for) and numbers in the
    signature's order and returns None. It stays loaded for the process's life.

    Raises:
        TunekitError: the file can't be loaded, or exports no such function.
    """
    import tvm_ffi

    preload_runtime()
    try:
        module = tvm_ffi.load_module(so)
    except (RuntimeError, OSError, ValueError) as error:
        raise TunekitError(f"{so} can't be loaded: {error}") from error
    try:
        function: Callable[..., Any] = module[symbol]
    except (AttributeError, KeyError, RuntimeError) as error:
        raise TunekitError(f"{so} exports no function '{symbol}'") from error
    return function


@functools.cache
def preload_runtime() -> Path | None:
    """Load the CuTeDSL runtime library that exported kernels link against; None if not installed.

    The artifact names it without a directory, so it must be there first. The
    cutlass package itself is located, never imported.
    """
    library = runtime_library()
    if library is not None:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return library


@functools.cache
def runtime_library() -> Path | None:
    """``libcute_dsl_runtime.so`` of the installed nvidia-cutlass-dsl, for CUDA 13 where there."""
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (found.submodule_search_locations or ()) if found else ():
        for directory in CUDA_DIRECTORIES:
            library = Path(root) / directory / "lib" / "libcute_dsl_runtime.so"
            if library.is_file():
                return library
    return None
