"""One compile of each C source a test run: what most tests need is the kernel, and a C compiler takes 0.1 to 0.5 s."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.backends import host

if TYPE_CHECKING:
    import pytest

compile_c = host.compile_c


class Cache:
    """Stands in for `host.compile_c`: what has compiled is copied from `directory`, which processes may share.

    Headers and the compiler behind its path are the same throughout a run, and what fails is compiled anew.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, source: Path, so: Path, *options: str, limit_s: float | None = None) -> str | None:
        parts = (host.compiler(), *host.OPTIONS, *options, source.read_text(encoding="utf-8"))
        kept = self._directory / hashlib.sha256("\0".join(parts).encode()).hexdigest()
        if kept.exists():
            shutil.copyfile(kept, so)
            shutil.copymode(kept, so)
            return None
        failed = compile_c(source, so, *options, limit_s=limit_s)
        if failed is None and so.is_file():
            fresh = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(so, fresh)
            shutil.copymode(so, fresh)
            fresh.replace(kept)
        return failed

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "compile_c", self)
