"""Which peers are installed."""

from __future__ import annotations

import importlib.metadata

import pytest


def needs(distribution: str) -> pytest.MarkDecorator:
    """Skips where a package of the extra isn't installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return pytest.mark.skip(reason=f"{distribution} isn't installed: pip install 'tunekit[peers]'")
    return pytest.mark.skipif(False, reason="")
