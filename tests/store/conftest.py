"""Where the store's tests keep things; the values that they keep come from `store_values`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tunekit.db"


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """Makes files like a compile's: a function of their content."""

    def make(content: bytes = b"kernel") -> dict[str, Path]:
        made = {}
        for role in ("so", "ptx"):
            path = tmp_path / f"made-{os.getpid()}.{role}"
            path.write_bytes(role.encode() + content)
            made[role] = path
        return made

    return make
