"""``tunekit.load``: a spec, a store and a policy put together to a kernel.

A fresh process waits for all that this imports. So what most servers have no use for (bundles, compiles, ranks) is
imported where it is asked for, and what is small and only serves is a NamedTuple: to make the class of a frozen
dataclass takes 0.5 to 1 ms, that of a NamedTuple 0.1 (Python 3.11, 2026-11). A test counts them.
"""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import replace
from pathlib import Path

from tunekit.dispatch import recorder
from tunekit.dispatch.devices import Devices, TorchDevices
from tunekit.dispatch.hot_path import caller
from tunekit.dispatch.kernel import Kernel
from tunekit.dispatch.library import Library
from tunekit.dispatch.policy import Compile, policy
from tunekit.dispatch.resolver import Resolver
from tunekit.dispatch.watcher import watch
from tunekit.errors import UserError
from tunekit.settings import load_settings
from tunekit.spec import KernelSpec, absolute_reference, load_spec
from tunekit.store.artifacts import ArtifactStore


def load(
    name: str | Path,
    *,
    database: str | Path | None = None,
    artifacts: str | Path | None = None,
    bundle: str | Path | None = None,
    fallback: str = "default",
    strict: bool = False,
    compile: Compile = "never",
    all_or_nothing: bool = False,
    watch_s: float | None = None,
    devices: Devices | None = None,
    native: bool = True,
) -> Kernel:
    """A callable for the spec `name`, or a path as ``load_spec`` takes it.

    `database` and `artifacts` default to the settings' (TUNEKIT_DB, TUNEKIT_CACHE),
    read now. `fallback` is the last level of the ladder that may serve; `strict` raises
    instead of serving anything but the first choice. A missing artifact is left to the next
    level that has one; with `compile` ``"allow"`` it is compiled while the call waits, with
    ``"background"`` while the next level serves: in a process of its own, with its limits.
    With `all_or_nothing` the ranks of a job take the same artifact for each problem, the first
    that all of them have loaded; every rank must load, call and refresh alike. With `watch_s`
    a thread looks that often (seconds) whether other winners are recorded, and calls ``refresh``.
    `native` False dispatches in Python also where the native hot path is to be had.

    `bundle` is a directory that ``tunekit bundle`` made: winners and kernels come from it alone,
    and nothing is written there or compiled for it.

    Raises:
        UserError: no such spec; an unknown policy, or one that contradicts itself; `all_or_nothing`
            where nothing tells how many ranks there are; a bundle that is damaged or for another
            spec, or named beside a database, artifacts, compiling or watching.
    """
    chosen = policy(fallback, strict, compile, all_or_nothing, watch_s)
    reference = absolute_reference(name)
    spec = load_spec(reference)
    devices = devices or TorchDevices()
    if bundle is not None:
        if database is not None or artifacts is not None or compile != "never" or watch_s is not None:
            raise UserError("a bundle serves alone: leave out database, artifacts, compile and watch_s")
        from tunekit.dispatch.bundled import open_library  # here: most servers have none

        bundled = open_library(spec, Path(bundle).absolute())
        ranks = None
        if all_or_nothing:
            from tunekit.dispatch.ranks import join

            ranks = join(spec.name, bundled.store)
        resolver = Resolver(spec, reference, bundled.bundle, bundled, None, chosen, devices, ranks)
        return make_kernel(spec, resolver, bundled.store if native else None)
    settings = load_settings(database=database)
    settings = replace(
        settings,  # read whenever something is missing, wherever the process is by then
        database=Path(settings.database).absolute(),
        artifacts=Path(artifacts or settings.artifacts).absolute(),
    )
    library = Library(spec, ArtifactStore(settings.artifacts))
    compiler = ranks = None
    if compile != "never":  # these imports stand here because most servers neither compile nor are one of several ranks
        from tunekit.dispatch.on_request import OnRequestCompiler
        from tunekit.dispatch.ranks import own_name

        compiler = OnRequestCompiler(reference, spec, library.store, settings, own_name())
    if all_or_nothing:
        from tunekit.dispatch.ranks import WAIT_S, join

        ranks = join(spec.name, library.store, WAIT_S if compiler is None else 2 * compiler.wait_s)
    resolver = Resolver(spec, reference, settings.database, library, compiler, chosen, devices, ranks)
    kernel = make_kernel(spec, resolver, library.store if native else None)
    if watch_s is not None:
        watch(kernel, settings.database, watch_s)
    return kernel


def make_kernel(spec: KernelSpec, resolver: Resolver, native_from: ArtifactStore | None) -> Kernel:
    """A kernel, of the native class where that can be had."""
    native = None if native_from is None else caller(native_from)
    kernel = (Kernel if native is None else native_kernel(native))(spec, resolver, native_from)
    recorder.note(kernel, os.environ.get(recorder.DIRECTORY))
    return kernel


@functools.cache
def native_kernel(caller: type) -> type[Kernel]:
    """The class of kernels whose call is caller.c's."""
    says = inspect.signature(lambda *args, **keywords: None)  # which inspect can't read off a call in C
    names = {"__doc__": Kernel.__doc__, "__module__": Kernel.__module__, "__signature__": says}
    return type("Kernel", (caller, Kernel), names)
