"""The native half of dispatch (hot_path.c): built once by the machine's C compiler, kept among the artifacts.

Where it can't be had (no C compiler, or a torch that has no DLPack exchange API) calls are dispatched in Python.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunekit.backends.load import load_module
from tunekit.dispatch.forked import Guard
from tunekit.errors import DatabaseError, TunekitError
from tunekit.identity import distribution_version
from tunekit.store.artifacts import ArtifactStore

logger = logging.getLogger("tunekit")

SOURCE = Path(__file__).with_name("hot_path.c")
SYMBOL = "hot_path"
_loading = Guard()
_loaded: list[HotPath | None] = []
"""What this process has: nothing yet, the functions, or None where they can't be had."""


class HotPath:
    """The functions that hot_path.c exports; see there."""

    def __init__(self, module: Any) -> None:
        self._module = module  # its functions live as long
        self.make: Callable[[int], int] = module["make"]
        self.function: Callable[[int], Callable[..., Any]] = module["function"]
        self.key: Callable[..., bytes | None] = module["key"]
        self.put: Callable[..., int] = module["put"]
        self.calls: Callable[[int, int], int] = module["calls"]
        dtype: Callable[[bytes], int] = module["dtype"]
        self.dtype = functools.cache(lambda name: dtype(name.encode()))


def hot_path(store: ArtifactStore) -> HotPath | None:
    """The native functions, loaded once a process: from `store`, or compiled now and put there."""
    with _loading:
        if not _loaded:
            _loaded.append(_load(store))
        return _loaded[0]


def hot_path_key() -> str:
    """The artifact key of the native half: its source, TVM-FFI's version and the kind of machine."""
    parts = (SOURCE.read_text(encoding="utf-8"), distribution_version("apache-tvm-ffi") or "", platform.machine())
    return "hot_path-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def publish(store: ArtifactStore) -> None:
    """Compile the native half into `store`, unless it is there.

    Raises:
        TunekitError: there is no C compiler, it failed, or the store can't be written.
    """
    key = hot_path_key()
    if store.get(key) is None:
        with store.scratch() as scratch:
            store.put(key, SYMBOL, {"so": _compiled(scratch)})


def _load(store: ArtifactStore) -> HotPath | None:
    import torch
    import tvm_ffi  # gives older versions of torch the exchange API, where it can  # noqa: F401

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        logger.warning("torch %s has no DLPack exchange API: calls are dispatched in Python", torch.__version__)
        return None
    try:
        artifact = store.get(hot_path_key())
        if artifact is not None:
            return HotPath(load_module(store.path(artifact)))
        try:
            publish(store)
        except DatabaseError:  # a store that can't be written: for this process alone
            return _private()
        published = store.get(hot_path_key())
        return _private() if published is None else HotPath(load_module(store.path(published)))
    except TunekitError as error:
        logger.warning("calls are dispatched in Python, at some microseconds each: %s", error)
        return None


def _private() -> HotPath:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tunekit-") as directory:
        return HotPath(load_module(_compiled(Path(directory))))


def _compiled(directory: Path) -> Path:
    from tunekit.backends.host import compile_c  # here: only who has no compiled one needs it

    so = directory / "hot_path.so"
    failed = compile_c(SOURCE, so)
    if failed:
        raise TunekitError(failed)
    return so
