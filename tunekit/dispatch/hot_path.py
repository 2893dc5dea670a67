"""The native half of dispatch, built once by the machine's C compiler and kept among the artifacts.

hot_path.c finds a call's entry and carries it out; caller.c is the call from Python. Where the first can't be had (no
C compiler, a torch without a DLPack exchange API) calls are dispatched in Python; where the second can't (no Python.h)
a call takes 1 to 4 us more, by what it leaves out and says by keyword.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import platform
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tunekit.backends.load import damaged, load_module
from tunekit.dispatch.forked import Guard
from tunekit.errors import DatabaseError, TunekitError
from tunekit.identity import distribution_version
from tunekit.store.artifacts import ArtifactStore

logger = logging.getLogger("tunekit")

T = TypeVar("T")
LIMIT_S = 30.0
"""What the C compiler may take for a part, of which each takes 0.2 s on an idle core."""
HERE = Path(__file__).parent
_loading = Guard()
_loaded: dict[str, Any] = {}
"""What this process has of each part, by name; None where it can't be had."""


class NativePart(NamedTuple):
    """One C file. `built_for` is what else its binary depends on; `headers` are of more than TVM-FFI."""

    name: str
    built_for: str
    headers: Path | None = None

    @property
    def source(self) -> Path:
        return HERE / f"{self.name}.c"

    @property
    def key(self) -> str:
        """Its artifact key."""
        parts = (self.source.read_text(encoding="utf-8"), self.built_for, platform.machine())
        return f"{self.name}-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def compile(self, directory: Path) -> Path:
        """Its shared object, made in `directory`.

        Raises:
            TunekitError: there is no C compiler, or it failed or hangs; or headers are missing.
        """
        from tunekit.backends.host import compile_c  # here: only who has no compiled one needs it

        if self.headers is not None and not (self.headers / "Python.h").is_file():
            raise TunekitError(f"no Python.h in {self.headers}: install Python's headers (python3-dev)")
        so = directory / f"{self.name}.so"
        more = [f"-I{self.headers}"] if self.headers else []
        failed = compile_c(self.source, so, *more, limit_s=LIMIT_S)
        damage = failed or damaged(so)
        if damage:
            raise TunekitError(f"{self.source.name} does not compile: {damage}")
        return so


def native_parts() -> tuple[NativePart, NativePart]:
    """hot_path and caller."""
    abi = sysconfig.get_config_var("EXT_SUFFIX") or ""
    hot = NativePart("hot_path", distribution_version("apache-tvm-ffi") or "")
    return hot, NativePart("caller", str(abi), Path(sysconfig.get_paths()["include"]))


class HotPath:
    """The functions that hot_path.c exports; see there."""

    def __init__(self, module: Any) -> None:
        self._module = module  # its functions live as long
        self.make: Callable[[int, int], int] = module["make"]
        self.function: Callable[[int], Callable[..., Any]] = module["function"]
        self.key: Callable[..., bytes | None] = module["key"]
        self.put: Callable[..., int] = module["put"]
        self.calls: Callable[[int, int], int] = module["calls"]


def hot_path(store: ArtifactStore) -> HotPath | None:
    """The native functions, loaded once a process: from `store`, or compiled now and put there."""

    def load() -> HotPath | None:
        import torch
        import tvm_ffi  # gives older versions of torch the exchange API, where it can  # noqa: F401

        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            logger.warning("torch %s has no DLPack exchange API: calls are dispatched in Python", torch.__version__)
            return None
        try:
            with _found(native_parts()[0], store) as so:
                return HotPath(load_module(so))
        except (TunekitError, AttributeError, OSError) as error:  # it lacks a function; there is nowhere to put it
            logger.warning("calls are dispatched in Python, at some microseconds each: %s", error)
            return None

    return _once("hot_path", load)


def caller(store: ArtifactStore) -> type | None:
    """The class of caller.c, loaded once a process; None where it can't be had."""

    def load() -> type | None:
        try:
            with _found(native_parts()[1], store) as so:
                return _extension(so)
        except (TunekitError, OSError) as error:
            logger.info("a call goes through Python: %s", error)
            return None

    return _once("caller", load)


def publish(store: ArtifactStore, part: NativePart) -> None:
    """Compile a part into `store`, unless it is there.

    Raises:
        TunekitError: it can't be compiled, or the store not be written.
    """
    if store.get(part.key) is None:
        with store.scratch() as scratch:
            store.put(part.key, part.name, {"so": part.compile(scratch)})


def _once(name: str, load: Callable[[], T]) -> T:
    with _loading:
        if name not in _loaded:
            _loaded[name] = load()
        loaded: T = _loaded[name]
        return loaded


@contextlib.contextmanager
def _found(part: NativePart, store: ArtifactStore) -> Iterator[Path]:
    """A part's shared object: of the store; of this process alone where that can't be written."""
    artifact = store.get(part.key)
    if artifact is None:
        with contextlib.suppress(DatabaseError):
            publish(store, part)
            artifact = store.get(part.key)
    if artifact is not None:
        yield store.path(artifact)
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tunekit-") as directory:
        yield part.compile(Path(directory))


def _extension(so: Path) -> type:
    """The class that a shared object of caller.c defines.

    Raises:
        TunekitError: it can't be loaded.
    """
    damage = damaged(so)
    if damage:
        raise TunekitError(f"{so} can't be loaded: {damage}")
    loader = importlib.machinery.ExtensionFileLoader("tunekit_caller", str(so))
    try:
        module = importlib.util.module_from_spec(
            importlib.machinery.ModuleSpec("tunekit_caller", loader, origin=str(so))
        )
        loader.exec_module(module)
    except ImportError as error:
        raise TunekitError(f"{so} can't be loaded: {error}") from error
    caller_type: type = module.Caller
    return caller_type
