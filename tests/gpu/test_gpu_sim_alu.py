"""Arithmetic, conversions and comparisons on this GPU and in the simulator: the same inputs, the same bits.

The approximations differ in their last bits: there the distance is bounded by the sum of the ISA's error and one
rounding. With -s every instruction that differs is printed with examples, and what became of each NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_api import Gpu, driver_context
from loading import module_of

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
SIMULATE = Path(__file__).resolve().parent.parent / "simulate"
COUNT = 1024


lanes = module_of(SIMULATE / "alu_lanes.py")
edges = module_of(SIMULATE / "alu_edges.py")
instructions = module_of(Path(__file__).with_name("alu_instructions.py"))
MODES = instructions.MODES
# Instruction: largest relative error of the hardware (PTX ISA 9.7.3), plus one rounding of the simulator
APPROXIMATE = {
    "ex2.approx.ftz.f32": 2.0**-22,
    "ex2.approx.f32": 2.0**-22,
    "lg2.approx.f32": 2.0**-21,
    "rcp.approx.ftz.f32": 2.0**-22,
    "rsqrt.approx.f32": 2.0**-22,
    "sqrt.approx.f32": 2.0**-22,
    "tanh.approx.f32": 2.0**-10.5,
}


def inputs_of(types: str) -> list[Array]:
    made = []
    for seed, kind in enumerate(types.split()):
        if kind == "bf16":
            made.append((lanes.float_corners(COUNT, seed) >> np.uint32(16)).astype(np.uint16))
        elif kind in instructions.WORDS:
            low, high = instructions.WORDS[kind]
            made.append(np.random.default_rng(seed).integers(low, high, COUNT).astype(np.uint32))
        elif kind[0] == "f":
            made.append(lanes.float_corners(COUNT, seed, np.dtype(f"f{int(kind[1:]) // 8}")))
        else:
            made.append(lanes.corners(np.dtype(f"u{int(kind[1:]) // 8}").type, COUNT, seed))
    return made


def size_of(kind: str) -> str:
    return kind if kind == "pred" else f"b{kind.lstrip('busf')}"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with driver_context() as driver:
        yield Gpu(driver)


Case = tuple[str, list[Array], str]
"""An instruction, its inputs and the type of its output."""


def listed(chapter: Any) -> Iterator[Case]:
    return ((text, inputs_of(types), output) for text, types, output in chapter())


def next_to_the_smallest_normal() -> Iterator[Case]:
    """Whether a result is flushed, where rounding takes it up to the smallest normal number or nearly so."""
    singles, with_addend = (edges.near_smallest_normal("f32", addend, COUNT) for addend in (False, True))
    halves, half_addend = (edges.near_smallest_normal("f16", addend, COUNT) for addend in (False, True))
    for mode in MODES:
        for flags in (".ftz", "", ".ftz.sat"):
            yield f"mul.{mode}{flags}.f32 {{x}}, {{a}}, {{b}};", singles, "f32"
            yield f"fma.{mode}{flags}.f32 {{x}}, {{a}}, {{b}}, {{c}};", with_addend, "f32"
        for flags in (".ftz", ""):
            yield f"div.{mode}{flags}.f32 {{x}}, {{a}}, {{b}};", edges.quotients_near_smallest_normal(COUNT), "f32"
            yield f"rcp.{mode}{flags}.f32 {{x}}, {{a}};", edges.reciprocals_near_smallest_normal(256), "f32"
            yield f"cvt.{mode}{flags}.f32.f64 {{x}}, {{a}};", edges.doubles_near_smallest_single(COUNT), "f32"
    yield "mad.rn.ftz.f32 {x}, {a}, {b}, {c};", with_addend, "f32"
    for flags in (".ftz", "", ".ftz.sat"):
        yield f"mul.rn{flags}.f16 {{x}}, {{a}}, {{b}};", halves, "f16"
        yield f"fma.rn{flags}.f16 {{x}}, {{a}}, {{b}}, {{c}};", half_addend, "f16"
        yield f"fma.rn{flags}.f16x2 {{x}}, {{a}}, {{b}}, {{c}};", [x.view(np.uint32) for x in half_addend], "u32"
    for kind in ("bf16", "bf16x2"):
        near = [x if kind == "bf16" else x.view(np.uint32) for x in edges.near_smallest_normal("bf16", True, COUNT)]
        yield f"fma.rn.{kind} {{x}}, {{a}}, {{b}}, {{c}};", near, kind if kind == "bf16" else "u32"


def next_to_ties() -> Iterator[Case]:
    for kind in ("f16", "bf16", "f32"):
        for seed in range(4):
            inputs = edges.next_to_ties(kind, COUNT, seed)
            for flags in ("", ".relu") if kind != "f32" else ("", ".ftz"):
                yield f"fma.rn{flags}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", inputs, kind
                if kind != "f32":
                    pairs = [x.view(np.uint32) for x in inputs]
                    yield f"fma.rn{flags}.{kind}x2 {{x}}, {{a}}, {{b}}, {{c}};", pairs, "u32"


CHAPTERS: dict[str, Any] = {
    **{
        name: lambda name=name: listed(getattr(instructions, name))
        for name in ("floating", "conversions", "integers", "others")
    },
    "next_to_the_smallest_normal": next_to_the_smallest_normal,
    "next_to_ties": next_to_ties,
}


def both(gpu: Gpu, text: str, inputs: list[Array], output: str) -> tuple[Array, Array]:
    """The simulator's results and the GPU's."""
    chosen = np.zeros(len(inputs[0]), np.uint32)
    (simulated,) = lanes.on_lanes_unguarded(text, inputs, size_of(output))
    source, buffers = lanes.kernel_of(text, inputs, size_of(output), chosen, "sm_90a")
    return simulated, gpu.run(source, buffers, list(buffers), (len(buffers["g"]), 1, 1))["x"]


def differences(gpu: Gpu, cases: Iterable[Case]) -> list[str]:
    """A line for each instruction that differs: how many lanes, and some of them as inputs: simulator/GPU."""
    lines = []
    for text, inputs, output in cases:
        try:
            simulated, measured = both(gpu, text, inputs, output)
        except Exception as error:  # this one only: the list is to be complete
            lines.append(f"{text}: {type(error).__name__}: {str(error)[:300]}")
            continue
        wrong = np.flatnonzero(simulated != measured)
        if output == "f64":  # its NaN is looked at elsewhere
            both_nan = np.isnan(simulated.view(np.float64)) & np.isnan(measured.view(np.float64))
            wrong = wrong[~both_nan[wrong]]
        if len(wrong):
            examples = []
            for at in wrong[:: max(1, len(wrong) // 6)][:6]:
                values = ",".join(f"{int(x[at]):x}" for x in inputs)
                examples.append(f"{values}: {int(simulated[at]):x}/{int(measured[at]):x}")
            lines.append(f"{text}: {len(wrong)} of {len(simulated)} differ; " + "; ".join(examples))
    return lines


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_same_bits(gpu: Gpu, chapter: str) -> None:
    wrong = differences(gpu, CHAPTERS[chapter]())
    print(f"\n== {chapter}: {len(wrong)} instructions differ", *wrong, sep="\n")
    assert not wrong


def test_nan(gpu: Gpu) -> None:
    """What each instruction makes of NaN. Instructions that map alike are printed together.

    Of approximations only the rows with NaN are compared: of other numbers the last bits may differ.
    """
    tables: dict[str, list[str]] = {}
    count = 0
    for text, kinds, output in instructions.with_nan():
        count += 1
        inputs = edges.with_nans(kinds)
        try:
            simulated, measured = both(gpu, text, inputs, output)
        except Exception as error:  # this one only: the list is to be complete
            tables.setdefault(f"{type(error).__name__}: {str(error)[:300]}", []).append(text)
            continue
        if ".approx" in text:
            looked_at = np.zeros(len(measured), np.bool_)
            for values, kind in zip(inputs, kinds, strict=True):
                looked_at |= np.isin(values, edges.nans(kind))
            measured = np.where(looked_at, measured, simulated)
        if (simulated == measured).all():
            continue
        seen: dict[str, None] = {}
        for at in range(len(simulated)):
            ours = "" if simulated[at] == measured[at] else f" (not {int(simulated[at]):x})"
            seen[",".join(f"{int(x[at]):x}" for x in inputs) + f">{int(measured[at]):x}{ours}"] = None
        tables.setdefault(" ".join(seen), []).append(text)
    print(f"\n== NaN: {sum(map(len, tables.values()))} of {count} instructions differ")
    for table, texts in tables.items():
        print(" | ".join(t.split()[0] for t in texts), table, sep="\n  ")
    assert not tables


@pytest.mark.parametrize("name", sorted(APPROXIMATE))
def test_approximations_are_close(gpu: Gpu, name: str) -> None:
    simulated, measured = both(gpu, f"{name} {{x}}, {{a}};", inputs_of("f32"), "f32")
    ours, theirs = (x.view(np.float32).astype(np.float64) for x in (simulated, measured))
    special = ~np.isfinite(ours) | (ours == 0)
    np.testing.assert_array_equal(simulated[special], measured[special])
    bound = APPROXIMATE[name] * np.maximum(np.abs(ours), 0.5 if name.startswith("lg2") else 2.0**-126)
    assert np.all(np.abs(ours[~special] - theirs[~special]) <= bound[~special])
