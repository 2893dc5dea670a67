"""Loading an artifact: a kernel through tvm_ffi, with no compiler in the process; or a library's function."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunekit.errors import TunekitError, words_of
from tunekit.spec import Build, Implementation, KernelSpec
from tunekit.spec.packages import absence, installed

LIBRARY_SUFFIX = ".library"
CUDA_DIRECTORIES = ("cu13", "cu12")
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
RUNTIME_PACKAGE = "nvidia-cutlass-dsl-libs-cu12"
"""The package with the runtime library, for a machine that has none."""
# Elf64_Ehdr: e_ident, type, machine, version, entry, phoff, shoff, flags, ehsize, phentsize, phnum,
# shentsize, shnum, shstrndx.
ELF64_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def load_artifact(file: Path, symbol: str, spec: KernelSpec | None = None) -> Callable[..., Any]:
    """The function that the shared object `file` exports as `symbol`; or the one that a library's entry tells of.

    It takes torch tensors (CUDA or CPU, as it was built for) and numbers in the
    signature's order. It stays loaded for the process's life. `spec` is that of a library's
    entry, where it is loaded already.

    Raises:
        TunekitError: the file can't be loaded, or exports no such function.
    """
    return load_library(file, spec) if file.suffix == LIBRARY_SUFFIX else load_kernel(file, symbol)


def load_library(file: Path, spec: KernelSpec | None = None) -> Callable[..., Any]:
    """The function of a library that the entry `file` tells of, its package imported.

    Raises:
        TunekitError: the entry can't be read, or the function not be made here.
    """
    from tunekit.backends.library.entry import Entry

    try:
        return Entry.of_bytes(file.read_bytes()).function(spec)
    except (OSError, TunekitError) as error:
        raise TunekitError(f"{file} can't be loaded: {error}") from error


def make(implementation: Implementation, build: Build) -> Callable[..., Any]:
    """The function of a library implementation. This is where its package is imported.

    Raises:
        TunekitError: the package is not installed, its import or the build function fails, or it returns no function.
    """
    absent = absence(implementation)
    if absent:
        raise TunekitError(absent)
    try:
        function: Callable[..., Any] = implementation.build(build)
    except (Exception, SystemExit) as error:  # foreign code: a package's import raises anything
        of = installed(implementation)
        raise TunekitError(f"{implementation.name} can't be made of {of}: {words_of(error)}") from error
    if not callable(function):
        raise TunekitError(f"{implementation.name}: build must return a function, not {type(function).__name__}")
    return function


def load_kernel(so: Path, symbol: str) -> Callable[..., Any]:
    """The function that `so` exports as `symbol`.

    Raises:
        TunekitError: the file can't be loaded, or exports no such function.
    """
    preload_runtime()
    module = load_module(so)
    try:
        function: Callable[..., Any] = module[symbol]
    except (AttributeError, KeyError, RuntimeError) as error:
        raise TunekitError(f"{so} exports no function '{symbol}'") from error
    return function


def load_module(so: Path) -> Any:
    """A shared object as a module of TVM-FFI, which maps names to functions.

    Raises:
        TunekitError: it can't be loaded.
    """
    import tvm_ffi

    damage = damaged(so)
    if damage:
        raise TunekitError(f"{so} can't be loaded: {damage}")
    try:
        return tvm_ffi.load_module(so)
    except (RuntimeError, OSError, ValueError) as error:
        lacking = missing_runtime() if RUNTIME_LIBRARY in str(error) else None
        raise TunekitError(f"{so} can't be loaded: {lacking or error}") from error


def damaged(so: Path) -> str | None:
    """What is wrong with a shared object on its face, or None.

    The dynamic linker maps a truncated file and then dies of SIGBUS, so its length is
    checked first: the section headers, which linkers put last, must lie within it.
    """
    try:
        size = so.stat().st_size
        with so.open("rb") as file:
            header = file.read(ELF64_HEADER.size)
    except OSError as error:
        return error.strerror or str(error)
    if len(header) < ELF64_HEADER.size or not header.startswith(b"\x7fELF\x02"):
        return "it is no 64-bit ELF file"
    fields = ELF64_HEADER.unpack(header)
    sections_at, section_size, sections = fields[6], fields[11], fields[12]
    if sections_at + section_size * sections > size:
        return f"it is cut off at {size} bytes"
    return None


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


def missing_runtime(version: str | None = None) -> str | None:
    """That the library which exported GPU kernels link against is nowhere here, and what to do; None where it is.

    `version` is that of nvidia-cutlass-dsl which compiled them. Besides an installed nvidia-cutlass-dsl, the dynamic
    linker's own places count (LD_LIBRARY_PATH).
    """
    if preload_runtime() is not None:
        return None
    try:
        ctypes.CDLL(RUNTIME_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        package = RUNTIME_PACKAGE + (f"=={version}" if version else "")
        return (
            f"{RUNTIME_LIBRARY}, which GPU kernels link against, is not installed: `pip install --no-deps {package}` "
            "(alone it compiles nothing), or name its directory in LD_LIBRARY_PATH"
        )
    return None


@functools.cache
def runtime_library() -> Path | None:
    """``libcute_dsl_runtime.so`` of the installed nvidia-cutlass-dsl, for CUDA 13 where there."""
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (found.submodule_search_locations or ()) if found else ():
        for directory in CUDA_DIRECTORIES:
            library = Path(root) / directory / "lib" / RUNTIME_LIBRARY
            if library.is_file():
                return library
    return None
