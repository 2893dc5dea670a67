"""Runs one instruction on many lanes: operands from arrays, results back as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loading import module_of

Array = np.ndarray[Any, Any]


# By its path, because tests of a GPU, which lie elsewhere, use this file too.
_harness = module_of(Path(__file__).with_name("conftest.py"))

_REGISTER = {1: "%p", 2: "%rs", 4: "%r", 8: "%rd"}
_BITS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}
_DTYPE = {"pred": np.uint32, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


def on_lanes(instruction: str, inputs: Sequence[Array], outputs: str = "b32") -> tuple[Array, ...]:
    """Results of `instruction` for each lane, one array for each word of `outputs` (pred b16 b32 b64).

    The instruction names its operands {a}, {b}, {c}, {e} (inputs, in order; bool arrays become predicates) and {x},
    {y}, {z}, {w} (outputs). All inputs have one length, a multiple of 32. Runs it twice: with all lanes, and under a
    guard that leaves out some, whose registers must keep what they held.
    """
    chosen = np.random.default_rng(len(inputs[0])).integers(0, 2, len(inputs[0])).astype(np.uint32)
    ran = _run(kernel_of(instruction, inputs, outputs, chosen, guarded=True))
    letters = "xyzw"[: len(outputs.split())]
    for kind, letter in zip(outputs.split(), letters, strict=True):
        held = 0 if kind == "pred" else 0x5A5A
        np.testing.assert_array_equal(ran[letter + "g"], np.where(chosen != 0, ran[letter], _DTYPE[kind](held)))
    return tuple(ran[letter] for letter in letters)


def on_lanes_unguarded(instructions: str, inputs: Sequence[Array], outputs: str = "b32") -> tuple[Array, ...]:
    """The same for several instructions, on all lanes only."""
    ran = _run(kernel_of(instructions, inputs, outputs, np.zeros(len(inputs[0]), np.uint32)))
    return tuple(ran[letter] for letter in "xyzw"[: len(outputs.split())])


def _run(kernel: tuple[str, dict[str, Array]]) -> dict[str, Array]:
    text, buffers = kernel
    ran = _harness.run(text, buffers, list(buffers), block=(len(buffers["g"]), 1, 1))
    assert not ran.faults, ran.faults
    return ran.buffers  # type: ignore[no-any-return]


def kernel_of(
    instruction: str,
    inputs: Sequence[Array],
    outputs: str,
    chosen: Array,
    target: str = "sm_100a",
    guarded: bool = False,
) -> tuple[str, dict[str, Array]]:
    """The PTX around an instruction, and its buffers in the order of the parameters.

    guarded: it runs once more, under a guard that holds where `chosen` is not 0, into buffers with a g in their names.
    """
    count = len(inputs[0])
    assert count % 32 == 0 and count <= 1024
    lines = ["mov.u32 %r1, %tid.x;", *_place("g", 4), "ld.global.b32 %r2, [%rd3];", "setp.ne.b32 %p1, %r2, 0;"]
    buffers: dict[str, Array] = {"g": chosen}
    names: dict[str, str] = {}
    for k, (letter, array) in enumerate(zip("abce", inputs, strict=False)):
        predicate = array.dtype == np.bool_
        values = array.astype(np.uint32) if predicate else array
        size = values.dtype.itemsize
        register = f"%p{k + 2}" if predicate else f"{_REGISTER[size]}{k + 10}"
        loaded = f"%r{k + 100}" if predicate else register
        lines += [*_place(letter, size), f"ld.global.b{8 * size} {loaded}, [%rd3];"]
        if predicate:
            lines.append(f"setp.ne.b32 {register}, {loaded}, 0;")
        buffers[letter] = values
        names[letter] = register
    for guard, suffix in (("", ""), ("@%p1 ", "g"))[: 1 + guarded]:
        kinds = list(zip("xyzw", outputs.split(), strict=False))
        for k, (letter, kind) in enumerate(kinds):
            register = names[letter] = f"{_REGISTER[max(1, _BITS[kind] // 8)]}{k + 40}"
            lines.append(
                f"setp.ne.b32 {register}, %r1, %r1;" if kind == "pred" else f"mov.{kind} {register}, {0x5A5A};"
            )
            buffers[letter + suffix] = np.zeros(count, _DTYPE[kind])
        lines.append(guard + instruction.format(**names))
        for letter, kind in kinds:
            register, size = names[letter], np.dtype(_DTYPE[kind]).itemsize
            if kind == "pred":
                lines.append(f"selp.b32 %r3, 1, 0, {register};")
                register = "%r3"
            lines += [*_place(letter + suffix, size), f"st.global.b{8 * size} [%rd3], {register};"]
    parameters = ", ".join(f".param .u64 p{letter}" for letter in buffers)
    return _harness.kernel_text("\n".join([*lines, "ret;"]), parameters, target), buffers


def _place(letter: str, size: int) -> list[str]:
    """The address of this thread's element of a buffer, in %rd3."""
    return [f"ld.param.b64 %rd1, [p{letter}];", f"mul.wide.u32 %rd2, %r1, {size};", "add.s64 %rd3, %rd1, %rd2;"]


def corners(dtype: Any, count: int = 256, seed: int = 0) -> Array:
    """Integers: ends, small ones, single bits, and random ones; each call with another seed gives another order."""
    rng = np.random.default_rng(seed)
    bits = np.dtype(dtype).itemsize * 8
    special = [
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        63,
        64,
        255,
        (1 << bits) - 1,
        (1 << bits) - 2,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
    ]
    special += [1 << k for k in range(bits)]
    values = [special[k] if k < len(special) else 0 for k in rng.integers(0, 2 * len(special), count)]
    noise = rng.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + rng.integers(0, 2, count, dtype=np.uint64)
    picked = np.array([v & ((1 << bits) - 1) for v in values], np.uint64)
    return np.where(rng.random(count) < 0.5, picked, noise).astype(dtype)


def float_corners(count: int = 256, seed: int = 0, dtype: Any = np.float32) -> Array:
    """Floats: zeros, infinities, NaN, subnormals, ends, ordinary ones and any bit pattern; as unsigned patterns."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    info = np.finfo(kind)
    named = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.0,
        -2.5,
        info.max,
        -info.max,
        info.tiny,
        -info.tiny,
    ]
    named += [info.smallest_subnormal, -info.smallest_subnormal, 1 + info.eps, 1 - info.epsneg, 16777216.0, 3.0, 0.1]
    with np.errstate(over="ignore"):
        table = np.array(named).astype(kind)
    choice = rng.random(count)
    ordinary = (rng.standard_normal(count) * np.exp2(rng.integers(-8, 8, count))).astype(kind)
    patterns = rng.integers(0, 1 << 63, count, dtype=np.uint64).astype(unsigned)
    sign = rng.integers(0, 2, count).astype(unsigned) << unsigned.type(8 * kind.itemsize - 1)
    subnormal = (patterns & unsigned.type((1 << info.nmant) - 1)) | sign
    values = table[rng.integers(0, len(table), count)].view(unsigned)
    values = np.where(choice > 0.3, ordinary.view(unsigned), values)
    values = np.where(choice > 0.8, patterns, values)
    return np.where(choice > 0.92, subnormal, values).astype(unsigned)


def each(function: Callable[..., Any], *arrays: Array) -> list[Any]:
    """function applied to the Python numbers of each lane."""
    return [function(*values) for values in zip(*(a.tolist() for a in arrays), strict=True)]
