"""Tensor copies on this GPU and in the simulator: the same PTX, the same tensor maps, the same bytes afterwards.

Where the simulator finds a fault the GPU must fail too, and nowhere else. The maps are this package's own encoding,
so that a map that the hardware reads otherwise shows too. The GPU's half runs in child processes (gpu_jobs.py).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import module_of

from tunekit.simulate.tma.rules import off_coordinates, problems
from tunekit.simulate.tma.swizzle import PATTERNS, Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parent.parent
BOX_BYTES = 8192  # in shared memory
MOST_FAILURES = 8  # of a test, on the GPU: each costs a process
PLAIN = [element for element in Element if not element.packed]
SWIZZLES = [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128]
REDUCTIONS = {
    "add": "U32 S32 U64 F16 BF16 F32",
    "min": "U32 S32 U64 S64 F16 BF16",
    "max": "U32 S32 U64 S64 F16 BF16",
    "inc": "U32",
    "dec": "U32",
    "and": "U32 U64",
    "or": "U32 U64",
    "xor": "U32 U64",
}

SPECIAL = {
    "F16": np.array(
        [0, 1, 2, 0x3FF, 0x400, 0x1000, 0x1400, 0x3C00, 0x3C01, 0x4C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7E12, 0x7FFF],
        np.uint16,
    ),
    "BF16": np.array(
        [0, 1, 2, 0x7F, 0x80, 0x180, 0x3B80, 0x3C00, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FC5, 0x7FFF],
        np.uint16,
    ),
    "F32": np.array(
        [
            *(0, 1, 0x1000, 0x1001, 0x3000, 0x400000, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F801000, 0x3F803000),
            *(0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x7FFFFFFF),
        ],
        np.uint32,
    ),
}


kernels = module_of(TESTS / "specs" / "tensor_copy_kernels.py")
gpu_jobs = module_of(TESTS / "specs" / "gpu_jobs.py")
run_simulated = module_of(TESTS / "simulate" / "conftest.py").run


@dataclasses.dataclass(frozen=True)
class Case:
    """One box: map.address counts from the start of the tensor's buffer, `start` from that of the tile."""

    map: TensorMap
    coordinates: tuple[int, ...]
    start: int
    reduction: str = ""

    @property
    def bytes_needed(self) -> int:
        return self.map.address + self.map.span_bytes

    @property
    def parameters(self) -> list[Any]:
        """The kernels' parameters in order, as gpu_jobs takes them."""
        coordinates = (*self.coordinates, *(0,) * (5 - self.map.rank))
        words = [self.map.transaction_bytes, self.start, *coordinates]
        return [(self.map, "tensor"), "out", *((word & 0xFFFFFFFF).to_bytes(4, "little") for word in words)]

    def __str__(self) -> str:
        return f"{self.reduction} {self.map}, L2 {self.map.l2_promotion_bytes}, at {self.coordinates}, +{self.start}"


def cases(
    seed: int,
    count: int,
    elements: Sequence[Element] = PLAIN,
    *,
    inside: bool = False,
    strided: bool = False,
    legal: bool = True,
) -> Iterator[Case]:
    """Random boxes, partly outside their tensors. inside: no coordinate is negative. strided: element strides too.

    legal: rows start at multiples of 16 bytes; else none does.
    """
    draw = random.Random(seed)
    made = 0
    while made < count:
        element, swizzle, rank = draw.choice(elements), draw.choice(SWIZZLES), draw.randint(1, 5)
        each = element.bits // 8
        span = PATTERNS[swizzle].span_bytes
        box = [draw.choice([n for n in (16, 32, 48, 64, 96, 128, 256) if n <= (span or 256)]) // each]
        left = BOX_BYTES // max(box[0] * each, span)
        for _ in range(rank - 1):
            box.append(draw.randint(1, max(1, min(48, left))))
            left //= box[-1]
        steps = (1, *(draw.choice([1, 1, 2, 3] if strided else [1]) for _ in range(rank - 1)))
        sizes = [draw.randint(1, 2 * n + 2) for n in box]
        strides, step = [], sizes[0] * each
        for size in sizes[1:]:
            strides.append(-(-step // 16) * 16 + draw.choice([0, 16, 48]))
            step = strides[-1] * size
        tensor = TensorMap(
            address=16 * draw.randint(0, 8),
            element=element,
            sizes=tuple(sizes),
            strides=tuple(strides),
            box=tuple(box),
            element_strides=steps,
            swizzle=swizzle,
            l2_promotion_bytes=draw.choice([0, 128]),
            nan_fill=element.floating and draw.random() < 0.5,
        )
        low = 0 if inside else 1
        start = [draw.randint(-low * (n + 1), max(0, size + low)) for n, size in zip(box, sizes, strict=True)]
        if legal:
            start[0] -= start[0] % (16 // each)
        case = Case(tensor, tuple(start), 128 * draw.randint(0, 32))
        if not problems(tensor) and (off_coordinates(tensor, start) is None) == legal:
            made += 1
            yield case


def contents(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, -(-size // 4096) * 4096, dtype=np.uint8)


def load_job(case: Case, seed: int) -> Any:
    out = np.zeros(kernels.TILE_BYTES + 4, np.uint8)
    return kernels.load(case.map.rank), {"tensor": contents(case.bytes_needed, seed), "out": out}, case.parameters


def store_job(case: Case, seed: int) -> Any:
    """A store, or a reduction; of floats with ordinary numbers."""
    buffers = {"tensor": contents(case.bytes_needed, seed), "out": contents(kernels.TILE_BYTES, 1000 + seed)}
    if case.reduction and case.map.element.floating:
        top = {16: slice(1, None, 2), 32: slice(3, None, 4)}[case.map.element.bits]
        for array in buffers.values():
            array[top] = array[top] & 0xBB | 0x20
    return kernels.store(case.map.rank, case.reduction), buffers, case.parameters


def prefetch_job(case: Case, seed: int) -> Any:
    _, buffers, parameters = store_job(case, seed)
    return kernels.prefetch(case.map.rank), buffers, parameters


def special_job(case: Case, seed: int) -> Any:
    """A load, or a reduction, of a tensor of 32 by 32 elements: all pairs of special values of either sign."""
    values = SPECIAL.get(case.map.element.name, SPECIAL["F32"])
    values = np.concatenate([values, values | values.dtype.type(1 << case.map.element.bits - 1)])
    buffers = {
        "tensor": np.resize(values.repeat(32), 4096 // values.itemsize).view(np.uint8),
        "out": np.resize(np.tile(values, 32), kernels.TILE_BYTES // values.itemsize).view(np.uint8),
    }
    if case.reduction:
        return kernels.store(2, case.reduction), buffers, case.parameters
    buffers["out"] = np.zeros(kernels.TILE_BYTES + 4, np.uint8)
    return kernels.load(2), buffers, case.parameters


def difference(job: Any, outcome: Any) -> str:
    """How the simulator's result of a job differs from the GPU's, in a line; empty if it doesn't."""
    text, buffers, parameters = job
    simulated = run_simulated(text, buffers, [lambda at, p=p: gpu_jobs.bytes_of(p, at) for p in parameters])
    faults = "; ".join(f"{fault.kind.value}: {fault.message}" for fault in simulated.faults)
    if outcome.error or faults:
        if outcome.error and faults:
            return ""
        return f"the GPU fails: {outcome.error}" if outcome.error else f"the GPU works, the simulator says {faults}"
    lines = []
    for name, array in outcome.buffers.items():
        wrong = np.flatnonzero(array != simulated.buffers[name])
        if wrong.size:
            first = int(wrong[0])
            values = f"GPU {array[first : first + 16].tobytes().hex()}"
            values += f", simulator {simulated.buffers[name][first : first + 16].tobytes().hex()}"
            lines.append(f"{name}: {wrong.size} bytes differ, the first at {first:#x}: {values}")
    return "; ".join(lines)


def check(chosen: Iterable[Case], job_of: Callable[[Case, int], Any]) -> list[Any]:
    """Compares every case, and returns the GPU's outcomes."""
    listed = list(chosen)
    jobs = [job_of(case, n) for n, case in enumerate(listed)]
    try:
        outcomes = gpu_jobs.run_all(jobs, MOST_FAILURES)
    except gpu_jobs.NoGpu as error:
        pytest.skip(str(error))
    found = []
    for n, (case, job, outcome) in enumerate(zip(listed, jobs, outcomes, strict=False)):
        different = difference(job, outcome)
        if different:
            found.append(f"{n}: {case}: {different}")
    if len(outcomes) < len(jobs):
        found.insert(0, f"{MOST_FAILURES + 1} failures on the GPU; {len(jobs) - len(outcomes)} cases did not run")
    assert not found, "\n".join([f"{len(found)} of {len(jobs)} differ", *found[:20]])
    return list(outcomes)


def test_loads() -> None:
    check(cases(1, 100), load_job)


def test_loads_with_element_strides() -> None:
    check(cases(2, 60, strided=True), load_job)


def test_stores() -> None:
    check(cases(3, 60, inside=True), store_job)


def test_stores_with_element_strides() -> None:
    check(cases(4, 40, inside=True, strided=True), store_job)


def test_reductions() -> None:
    chosen = [
        dataclasses.replace(case, reduction=operation)
        for n, (operation, names) in enumerate(REDUCTIONS.items())
        for case in cases(50 + n, 8, [Element[name] for name in names.split()], inside=True)
    ]
    check(chosen, store_job)


def special_case(name: str, reduction: str = "") -> Case:
    element = Element[name]
    return Case(TensorMap(0, element, (32, 32), (4 * element.bits,), (32, 32), (1, 1)), (0, 0), 0, reduction)


def test_special_values() -> None:
    """Subnormals, infinities, NaNs and ties of rounding; all pairs in reductions."""
    loads = [special_case(name) for name in ("F16", "BF16", "F32", "F32_FTZ", "TF32", "TF32_FTZ")]
    names = [("add", "F16 BF16 F32 F32_FTZ"), ("min", "F16 BF16"), ("max", "F16 BF16")]
    reductions = [special_case(name, operation) for operation, some in names for name in some.split()]
    check([*loads, *reductions], special_job)


def test_prefetches() -> None:
    check(cases(9, 10), prefetch_job)


def test_prefetches_that_the_simulator_refuses_fail() -> None:
    assert all(outcome.error for outcome in check(cases(10, 2, legal=False), prefetch_job))


def test_what_the_simulator_refuses_fails() -> None:
    """Rows that start off 16 bytes, and rows that the swizzle's span spreads beyond shared memory."""
    spread = TensorMap(16, Element.U16, (17, 21, 7, 4), (64, 1344, 9456), (8, 19, 24, 1), (1,) * 4, Swizzle.B32)
    chosen = [*cases(6, 3, legal=False), Case(spread, (0, 0, 0, 0), 2432), Case(spread, (0, 21, -5, 4), 2432)]
    assert all(outcome.error for outcome in check(chosen, load_job))


def test_stores_that_the_simulator_refuses_fail() -> None:
    stores = [*cases(7, 2, inside=True, legal=False)]
    reductions = cases(8, 1, [Element.U32], inside=True, legal=False)
    stores += [dataclasses.replace(case, reduction="add") for case in reductions]
    tensor = TensorMap(512, Element.U32, (32, 12), (128,), (16, 8), (1, 1))
    stores += [Case(tensor, (0, -3), 0), Case(tensor, (-64, 0), 0, "add")]
    assert all(outcome.error for outcome in check(stores, store_job))
