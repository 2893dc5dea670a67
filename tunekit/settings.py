"""Where things lie and how long they may take: read once, at the edge.

Precedence: command-line flag or API argument, then environment variable, then
the spec, then the default. Nothing reads the environment after this.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import UserError

DEFAULT_TRACE_LIMIT_S = 60.0
DEFAULT_COMPILE_LIMIT_S = 300.0
DEFAULT_RUN_LIMIT_S = 20.0
DEFAULT_MEMORY_LIMIT_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Settings:
    """`database`: the SQLite file; `artifacts`: the content-addressed store; limits in seconds and bytes.

    A limit that is None was not set here: the spec's own, or the default, holds.
    """

    database: Path
    artifacts: Path
    compile_limit_s: float | None = None
    trace_limit_s: float | None = None
    run_limit_s: float | None = None
    memory_limit_bytes: int | None = None
    jobs: int | None = None


def load_settings(environ: Mapping[str, str] | None = None, *, database: str | Path | None = None) -> Settings:
    """Settings from the environment: TUNEKIT_DB, TUNEKIT_CACHE, TUNEKIT_COMPILE_TIMEOUT,
    TUNEKIT_TRACE_TIMEOUT, TUNEKIT_RUN_TIMEOUT (seconds), TUNEKIT_MEMORY_LIMIT (MiB), TUNEKIT_JOBS.

    Raises:
        UserError: a variable that does not parse.
    """
    env = os.environ if environ is None else environ
    cache = Path(env["TUNEKIT_CACHE"]) if env.get("TUNEKIT_CACHE") else _default_cache()
    chosen = Path(database or env.get("TUNEKIT_DB") or cache / "tunekit.db")
    memory_mib = positive_number(env, "TUNEKIT_MEMORY_LIMIT")
    jobs = positive_number(env, "TUNEKIT_JOBS")
    return Settings(
        database=chosen,
        artifacts=cache / "artifacts",
        compile_limit_s=positive_number(env, "TUNEKIT_COMPILE_TIMEOUT"),
        trace_limit_s=positive_number(env, "TUNEKIT_TRACE_TIMEOUT"),
        run_limit_s=positive_number(env, "TUNEKIT_RUN_TIMEOUT"),
        memory_limit_bytes=None if memory_mib is None else int(memory_mib * 2**20),
        jobs=None if jobs is None else max(1, int(jobs)),
    )


def _default_cache() -> Path:
    """The user's cache directory; without a home, a private one under the temp directory."""
    import platformdirs  # here: it takes 5 ms, and TUNEKIT_CACHE spares it

    with contextlib.suppress(RuntimeError, KeyError):
        cache = Path(platformdirs.user_cache_dir("tunekit", appauthor=False))
        if cache.is_absolute():  # older platformdirs hand back a literal ~
            return cache
    return Path(f"/tmp/tunekit-{os.getuid()}")


def positive_number(env: Mapping[str, str], name: str) -> float | None:
    """The environment variable `name` as a positive finite number; None where unset or empty."""
    text = env.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf):
        raise UserError(f"{name}={text!r} is not a positive number")
    return number


def limit_s(argument: float | None, environment: float | None, spec: float | None, default: float) -> float:
    """The limit that holds, in seconds: the first that is set of flag or API argument, environment, spec, default.

    Raises:
        UserError: an argument that is no positive finite number.
    """
    if argument is not None and not (0 < argument < math.inf):
        raise UserError(f"a limit of {argument} s is not a positive number")
    return next((float(value) for value in (argument, environment, spec) if value is not None), default)
