"""A spec of several files, whose compile key fresh processes compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "kernel.py": """\
from helper import tile
from bases import Kernel
from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

WIDTH = 4


class Scale(Kernel):
    def body(self):
        return tile(WIDTH)


def build(b):
    from parts.late import tail

    return Scale().source() + tail()


SPEC = KernelSpec(
    name="scale",
    version=1,
    axes=(Axis("rows"), Axis("cols", values=(64, 128), static=True)),
    signature=(TensorArg("x", ("rows",), "float32"), TensorArg("y", ("rows",), "float32", role="output")),
    implementations=(
        Implementation("scale_host", {"host"}, (Tunable("tile", (1, 2)),), build, {"tile": 1}, backend="host"),
    ),
    reference=lambda problem, inputs: inputs,
)
""",
    "helper.py": "from deep import depth\n\n\ndef tile(width):\n    return str(width * depth())\n",
    "deep.py": "DEPTH = 2\n\n\ndef depth():\n    return DEPTH\n",
    "bases.py": "from rootbase import Root\n\n\nclass Kernel(Root):\n    pass\n",
    "rootbase.py": "class Root:\n    def source(self):\n        return self.body()\n",
    "parts/__init__.py": "",
    "parts/late.py": "def tail():\n    return ';'\n",
    "unrelated.py": "X = 1\n",
}
KEY = """
import sys
from tunekit import identity, space
from tunekit.arch import parse_arch
from tunekit.spec import load_spec
spec = load_spec(sys.argv[1])
problem = spec.problem({"rows": 8, "cols": 64})
variant = space.expand(spec, parse_arch("host"), problem).variants[0]
print(variant.id, space.compile_key(spec, variant, problem))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The spec's directory."""
    root = tmp_path / "specs"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def key_in_a_new_process():
    """``key(directory, cwd=..., seed=...)``: variant id and compile key of its kernel.py, computed by a new process."""

    def key(directory: Path, cwd: Path | str = "/", seed: str = "0") -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", KEY, str(directory / "kernel.py")]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return key
