"""What texts of sources import, kept beside the artifacts: a fresh process then parses none of them to know a key."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tunekit.identity import Import, Imports
from tunekit.store import files

FORMAT = 1


def read_imports(root: Path) -> Imports:
    """What `keep_imports` wrote under `root`; nothing where it is absent, damaged or not to be trusted."""
    if files.world_writable(root):
        return {}
    try:
        plain = json.loads((root / "imports.json").read_bytes())
        if plain["format"] != FORMAT:
            return {}
        return {str(text): tuple(_import(one) for one in imports) for text, imports in plain["imports"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep_imports(root: Path, imports: Imports) -> None:
    """Write down what texts import; where nothing can be written, nothing is."""
    content = json.dumps({"format": FORMAT, "imports": imports}).encode()
    with contextlib.suppress(OSError):
        scratch = root / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        files.publish(content, root / "imports.json", scratch)


def _import(plain: list[object]) -> Import:
    level, module, names = plain
    if not isinstance(level, int) or not isinstance(module, str) or not isinstance(names, list):
        raise TypeError("it is no import")
    return level, module, tuple(str(name) for name in names)
