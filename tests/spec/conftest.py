"""A valid spec file as text, to break in one place at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

VALID = """\
from tunekit.model import Footprint
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tolerance, Tunable

AXES = (
    Axis("rows", minimum=1, bucket="pow2"),
    Axis("cols", values=(64, 128), static=True),
    Axis("dtype", kind="dtype", values=("float32",), default="float32"),
    Axis("fast", kind="flag", static=True, default=False),
)


def build(b):
    return "/* C */"


SPEC = KernelSpec(
    name="toy",
    version=1,
    axes=AXES,
    signature=(
        TensorArg("x", ("rows", "cols"), "dtype"),
        TensorArg("y", ("rows", "cols"), "dtype", role="output"),
        ScalarArg("scale", default=lambda p: 1.0, positive=True),
    ),
    implementations=(
        Implementation(
            name="toy_host",
            requires={"host"},
            backend="host",
            tunables=(
                Tunable("tile", [16, 32, 64]),
                Tunable("stages", [1, 2, 3]),
                Tunable("vector", [False, True]),
            ),
            constraints=(
                Constraint("tile_divides_cols", "the tile must divide cols", lambda v: v.cols % v.tile == 0),
                Constraint("one_stage_if_vector", "vector code has one stage", lambda v: not v.vector or v.stages == 1),
            ),
            footprint=lambda v, arch: Footprint(smem_bytes=v.tile * v.stages * 1024),
            build=build,
            defaults=({"tile": 16, "stages": 1, "vector": False},),
        ),
    ),
    reference=lambda problem, inputs: {"y": inputs["x"]},
    tolerance={"y": Tolerance(cosine=0.999)},
    examples=({"rows": 7, "cols": 64},),
)
"""


@pytest.fixture
def valid() -> str:
    return VALID


@pytest.fixture
def write(tmp_path: Path):
    """Write the text of a spec file; its path."""

    def write(text: str, name: str = "toy.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
