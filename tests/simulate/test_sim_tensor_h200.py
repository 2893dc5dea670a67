"""Tensor copies against what an H200 (driver 13.0) made of the same kernels: tensor_copies_h200.jsonl.

reduction: all pairs (old, new) of `values`, row by row, as far as they were recorded. copy: 16 words loaded or stored.
nan_fill: 64 bytes of shared memory after a load of a box of two rows of 32 bytes, of which 16 lie in the tensor.
store: a random box from tests/gpu/test_gpu_sim_tensor.py, its buffers drawn from `seed`; `differ` bytes of the tensor's
buffer outside the tensor had changed, the first of them at `first`, where `bytes` were found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import module_of

from tunekit.simulate.tma.rules import problems
from tunekit.simulate.tma.swizzle import Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

Run = Callable[..., Any]
TESTS = Path(__file__).resolve().parent.parent
BYTES = 4096  # of a tensor's buffer, in the small cases here


kernels = module_of(TESTS / "specs" / "tensor_copy_kernels.py")
gpu_jobs = module_of(TESTS / "specs" / "gpu_jobs.py")


def rows(kind: str) -> list[dict[str, Any]]:
    lines = (Path(__file__).parent / "tensor_copies_h200.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if kind in row]


def named(row: dict[str, Any]) -> str:
    if "map" in row:
        return f"{row['store'] or 'store'} {row['map']['element']} {row['seed']}"
    return f"{row.get('reduction') or row.get('copy') or ''} {row.get('element') or row['nan_fill']}"


def ran(
    run_ptx: Run,
    text: str,
    tensor: TensorMap,
    at: tuple[int, ...],
    start: int,
    data: np.ndarray[Any, Any],
    out: np.ndarray[Any, Any],
) -> Any:
    words = [tensor.transaction_bytes, start, *at, *(0,) * (5 - tensor.rank)]
    parameters = [(tensor, "tensor"), "out", *((word & 0xFFFFFFFF).to_bytes(4, "little") for word in words)]
    known = [lambda addresses, p=p: gpu_jobs.bytes_of(p, addresses) for p in parameters]
    return run_ptx(text, {"tensor": data, "out": out}, known)


@pytest.mark.parametrize("row", rows("reduction"), ids=named)
def test_reductions_of_special_values(run_ptx: Run, row: dict[str, Any]) -> None:
    width = len(row["values"][0])
    kind = np.dtype({4: np.uint16, 8: np.uint32}[width])
    values = np.array([int(value, 16) for value in row["values"]], kind)
    results = [int(row["results"][n : n + width], 16) for n in range(0, len(row["results"]), width)]
    each, count = kind.itemsize, values.size
    tensor = TensorMap(0, Element[row["element"]], (count, count), (count * each,), (count, count), (1, 1))
    data = np.resize(values.repeat(count), BYTES // each)
    out = np.resize(np.tile(values, count), kernels.TILE_BYTES // each)
    after = ran(run_ptx, kernels.store(2, row["reduction"]), tensor, (0, 0), 0, data, out)
    assert after.faults == ()
    found = after.buffers["tensor"]
    wrong = np.flatnonzero(found[: len(results)] != np.array(results, kind))
    pairs = [(row["values"][n // count], row["values"][n % count], f"{found[n]:x}") for n in wrong]
    assert pairs == []
    assert len(results) > 400


@pytest.mark.parametrize("row", rows("copy"), ids=named)
def test_copies_of_special_values(run_ptx: Run, row: dict[str, Any]) -> None:
    tensor = TensorMap(0, Element[row["element"]], (16,), (), (16,), (1,))
    given = np.array([int(word, 16) for word in row["given"]], np.uint32)
    data, out = np.zeros(BYTES // 4, np.uint32), np.zeros(kernels.TILE_BYTES // 4 + 1, np.uint32)
    if row["copy"] == "load":
        data[:16] = given
        found = ran(run_ptx, kernels.load(1), tensor, (0,), 0, data, out).buffers["out"]
    else:
        out[:16] = given
        found = ran(run_ptx, kernels.store(1), tensor, (0,), 0, data, out).buffers["tensor"]
    assert [f"{word:08x}" for word in found[:16]] == row["got"]


@pytest.mark.parametrize("row", rows("nan_fill"), ids=named)
def test_nan_outside_the_tensor(run_ptx: Run, row: dict[str, Any]) -> None:
    element = Element[row["nan_fill"]]
    each = element.bits // 8
    tensor = TensorMap(0, element, (16 // each, 1), (16,), (32 // each, 2), (1, 1), nan_fill=True)
    data = np.arange(1, BYTES // 2 + 1, dtype=np.uint16)
    found = ran(run_ptx, kernels.load(2), tensor, (0, 0), 0, data, np.zeros(kernels.TILE_BYTES + 4, np.uint8))
    assert found.faults == ()
    assert found.buffers["out"][:64].tobytes().hex() == row["got"]


def drawn(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, -(-size // BYTES) * BYTES, dtype=np.uint8)


def bytes_inside(tensor: TensorMap, size: int) -> np.ndarray[Any, Any]:
    """bool[size]: which bytes of its buffer are the tensor's."""
    mask = np.zeros(size, np.bool_)
    starts = np.array([tensor.address])
    for length, stride in zip(tensor.sizes[1:], tensor.strides, strict=True):
        starts = (starts[:, None] + stride * np.arange(length)).reshape(-1)
    mask[(starts[:, None] + np.arange(tensor.sizes[0] * tensor.element.bits // 8)).reshape(-1)] = True
    return mask


@pytest.mark.parametrize("row", rows("store"), ids=named)
def test_stores_and_reductions_write_whole_pieces_of_16_bytes(run_ptx: Run, row: dict[str, Any]) -> None:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in row["map"].items()}
    tensor = TensorMap(**(fields | {"element": Element[fields["element"]], "swizzle": Swizzle[fields["swizzle"]]}))
    assert problems(tensor) == []
    data, out = drawn(tensor.address + tensor.span_bytes, row["seed"]), drawn(kernels.TILE_BYTES, 1000 + row["seed"])
    if row["store"] and tensor.element.floating:  # ordinary numbers
        top = {16: slice(1, None, 2), 32: slice(3, None, 4)}[tensor.element.bits]
        for array in (data, out):
            array[top] = array[top] & 0xBB | 0x20
    found = ran(run_ptx, kernels.store(tensor.rank, row["store"]), tensor, tuple(row["at"]), row["start"], data, out)
    assert found.faults == ()
    after = found.buffers["tensor"]
    changed = np.flatnonzero((after != data) & ~bytes_inside(tensor, data.size))
    assert (changed.size, changed[0]) == (row["differ"], row["first"])
    assert after[row["first"] : row["first"] + 16].tobytes().hex() == row["bytes"]


@pytest.mark.parametrize("operation", ["", "add"])
@pytest.mark.parametrize("length", [20, 26, 32], ids=["none of it", "a part", "all"])
def test_what_a_store_writes_behind_an_allocation_is_nobodys(run_ptx: Run, operation: str, length: int) -> None:
    """Five words of a row of eight; `length` bytes of the buffer exist."""
    tensor = TensorMap(0, Element.U32, (5,), (), (8,), (1,))
    out = np.arange(1, kernels.TILE_BYTES // 4 + 1, dtype=np.uint32)
    data = np.full(length, 255, np.uint8)
    found = ran(run_ptx, kernels.store(1, operation), tensor, (0,), 0, data, out)
    assert found.faults == ()
    expected = np.full(length, 255, np.uint8)
    whole = length - length % 4  # elements that exist in part are left alone
    expected[:whole] = (out[:8] - 1 if operation else out[:8]).view(np.uint8)[:whole]
    assert np.array_equal(found.buffers["tensor"], expected)


@pytest.mark.parametrize("operation", ["", "add"])
@pytest.mark.parametrize("at", [(0, -3), (-8, 0), (-8, -3), (-64, 0)])
def test_negative_coordinates_of_stores_end_the_kernel(run_ptx: Run, operation: str, at: tuple[int, int]) -> None:
    tensor = TensorMap(512, Element.F16, (32, 12), (64,), (16, 8), (1, 1))
    data, out = np.zeros(BYTES, np.uint8), np.full(kernels.TILE_BYTES, 0x11, np.uint8)
    found = ran(run_ptx, kernels.store(2, operation), tensor, at, 0, data, out)
    (fault,) = found.faults
    assert f"to the coordinate {min(at)}" in fault.message
    assert not found.buffers["tensor"].any()


@pytest.mark.parametrize("operation", ["", "add"])
@pytest.mark.parametrize("at", [(64, 0), (0, 20)])
def test_stores_beyond_the_tensor_do_nothing(run_ptx: Run, operation: str, at: tuple[int, int]) -> None:
    tensor = TensorMap(512, Element.F16, (32, 12), (64,), (16, 8), (1, 1))
    data, out = np.zeros(BYTES, np.uint8), np.full(kernels.TILE_BYTES, 0x11, np.uint8)
    found = ran(run_ptx, kernels.store(2, operation), tensor, at, 0, data, out)
    assert found.faults == ()
    assert not found.buffers["tensor"].any()


@pytest.mark.parametrize(
    ("at", "good"), [((0, 0), True), ((3, 0), False), ((-1, 0), False), ((16, 0), True), ((-8, -1), True)]
)
def test_prefetches_start_at_multiples_of_16_bytes(run_ptx: Run, at: tuple[int, int], good: bool) -> None:
    tensor = TensorMap(0, Element.U16, (32, 12), (64,), (16, 8), (1, 1))
    out = np.zeros(kernels.TILE_BYTES, np.uint8)
    found = ran(run_ptx, kernels.prefetch(2), tensor, at, 0, np.zeros(BYTES, np.uint8), out)
    assert (found.faults == ()) == good
    if not good:
        assert "is no multiple of 16 bytes" in found.faults[0].message
