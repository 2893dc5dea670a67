"""What an H200 did where the ISA leaves it open, or where a result hangs on a detail: rows of it, and the rules behind.

The rows were compared by tests/gpu/test_gpu_sim_alu.py, which runs the rest of the same inputs on any Hopper GPU.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import alu_edges as edges
import alu_reference as ref
import numpy as np
import pytest
from alu_lanes import on_lanes, on_lanes_unguarded

Array = np.ndarray[Any, Any]
MODES = ["rn", "rz", "rm", "rp"]


Rows = tuple[str, list[Array], str, list[int]]
"""Instruction, inputs, size of the output, outputs."""


def measured() -> list[Rows]:
    found: list[Rows] = []
    names: list[str] = []
    sizes: list[int] = []
    output = ""
    rows: list[list[int]] = []

    def close() -> None:
        if rows:
            full = rows + rows[-1:] * (-len(rows) % 32)
            *inputs, results = zip(*full, strict=True)
            columns = [np.array(x, f"u{bits // 8}") for x, bits in zip(inputs, sizes, strict=True)]
            found.extend((name, columns, output, list(results)) for name in names)

    for line in Path(__file__).with_name("alu_h200.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        if line.startswith(" "):
            rows += [[int(x, 16) for x in row.replace(">", ",").split(",")] for row in line.split()]
            continue
        close()
        head, _, shape = line.partition(": ")
        names, rows = head.split(), []
        before, _, after = shape.partition(" > ")
        sizes, output = [int(x) for x in before.split()], f"b{after}"
    close()
    return found


@pytest.mark.parametrize("rows", measured(), ids=lambda rows: rows[0])
def test_rows_of_an_h200(rows: Rows) -> None:
    name, inputs, size, want = rows
    letters = ", ".join(f"{{{c}}}" for c in "abc"[: len(inputs)])
    (got,) = on_lanes_unguarded(f"{name} {{x}}, {letters};", inputs, size)
    assert [f"{v:x}" for v in got.tolist()] == [f"{v:x}" for v in want]


def flushed_after_rounding(operation: str, kind: str, inputs: list[Array], mode: str, sat: bool) -> Array:
    """The operation by fractions, .ftz as the H200 has it: rounded with an unbounded exponent, then too small."""
    shape, read, write = {
        "f32": (ref.SINGLE, ref.single, ref.single_bits),
        "f16": (ref.HALF, ref.half, ref.half_bits),
    }[kind]
    results = []
    for lane in zip(*(x.tolist() for x in inputs), strict=True):
        if operation == "cvt":
            value = ref.double(lane[0])
            result = ref.rounded(Fraction(value), mode, shape, ftz=True) if value else value
        else:
            values = [ref.flush(read(p), shape) for p in lane]
            if operation == "rcp":
                values.insert(0, 1.0)
            function = {"mul": ref.mul, "fma": ref.fma, "mad": ref.fma, "div": ref.div, "rcp": ref.div}[operation]
            result = function(*values, mode, shape, ftz=True)
        results.append(write(ref.saturate(result) if sat else result))
    return np.array(results, f"u{int(kind[1:]) // 8}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["mul", "fma", "mad", "div", "rcp", "cvt"])
def test_single_precision_flushes_after_rounding(operation: str, mode: str) -> None:
    inputs = {
        "div": lambda: edges.quotients_near_smallest_normal(256),
        "rcp": lambda: edges.reciprocals_near_smallest_normal(64),
        "cvt": lambda: edges.doubles_near_smallest_single(256),
    }.get(operation, lambda: edges.near_smallest_normal("f32", operation != "mul", 256))()
    kind = "f32.f64" if operation == "cvt" else "f32"
    letters = ", ".join(f"{{{c}}}" for c in "abc"[: len(inputs)])
    for flags in (".ftz", ".ftz.sat") if operation in ("mul", "fma", "mad") else (".ftz",):
        (got,) = on_lanes(f"{operation}.{mode}{flags}.{kind} {{x}}, {letters};", inputs)
        want = flushed_after_rounding(operation, "f32", inputs, mode, "sat" in flags)
        np.testing.assert_array_equal(got, want)
    if operation in ("mul", "fma"):
        wide = [x.view(np.uint64) for x in inputs]
        (got,) = on_lanes(f"{operation}.{mode}.ftz.f32x2 {{x}}, {letters};", wide, "b64")
        want = flushed_after_rounding(operation, "f32", inputs, mode, False)
        np.testing.assert_array_equal(got.view(np.uint32), want)


@pytest.mark.parametrize("operation", ["mul", "fma"])
def test_half_precision_flushes_after_rounding(operation: str) -> None:
    inputs = edges.near_smallest_normal("f16", operation == "fma", 512)
    letters = ", ".join(f"{{{c}}}" for c in "abc"[: len(inputs)])
    for flags in (".ftz", ".ftz.sat"):
        want = flushed_after_rounding(operation, "f16", inputs, "rn", "sat" in flags)
        (got,) = on_lanes(f"{operation}.rn{flags}.f16 {{x}}, {letters};", inputs, "b16")
        np.testing.assert_array_equal(got, want)
        (got,) = on_lanes(f"{operation}.rn{flags}.f16x2 {{x}}, {letters};", [x.view(np.uint32) for x in inputs])
        np.testing.assert_array_equal(got.view(np.uint16), want)


def test_a_sum_beside_the_bound_of_flushing() -> None:
    """a * b + c lies less above or below 2^-126 - 2^-151 than float64 can tell."""
    step = 2.0**-12
    a = np.array([1 + 2 * step**2, 1 + step] * 16) * 2.0**-70
    b = np.array([1 - 2 * step**2, 1 - step + step**2] * 16) * -(2.0**-81)
    c = np.full(32, 2.0**-126)
    inputs = [x.astype(np.float32).view(np.uint32) for x in (a, b, c)]
    assert set(a * b + c) == {2.0**-126 - 2.0**-151}
    for sat in ("", ".sat"):
        (got,) = on_lanes(f"fma.rn.ftz{sat}.f32 {{x}}, {{a}}, {{b}}, {{c}};", inputs)
        assert got.tolist() == [0x800000, 0] * 16
