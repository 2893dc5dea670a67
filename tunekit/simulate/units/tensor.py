"""Tensor copies (PTX ISA 9.7.9.27): cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, and their prefetches.

The tensor map and what may be relied on are taken when the instruction is issued. The bytes are read and written
later, when the schedule lets the copy go on: into shared memory in one step for each destination CTA, followed by
the transaction on the mbarrier there; out of shared memory in two, for cp.async.bulk.wait_group tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind, Unsupported
from tunekit.simulate.history.order import FENCED_GLOBAL, Access
from tunekit.simulate.machine.decode import AddressOf, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import WARP, Lanes
from tunekit.simulate.machine.memory import Memory
from tunekit.simulate.numbers.reduction import STORAGE, combine
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.completion import Signal, completed, locate
from tunekit.simulate.sync.groups import BulkGroups
from tunekit.simulate.tma import box as boxes
from tunekit.simulate.tma.box import Box, Place
from tunekit.simulate.tma.descriptor import decode
from tunekit.simulate.tma.rules import misplaced, off_coordinates, problems
from tunekit.simulate.tma.swizzle import Swizzle
from tunekit.simulate.tma.tensor_map import Element, NotModelled, TensorMap, TensorMapError

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp

MAP_ALIGNMENT = 64
MAP_BYTES = 64  # the other half of a map says nothing
_DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
_SPACES = ("shared::cta", "shared::cluster", "global", "L2")
_MODES = ("tile", "tile::gather4", "tile::scatter4")
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_OTHER_WORDS = (
    *("mbarrier::complete_tx::bytes", "bulk_group", "multicast::cluster", "cta_group::1", "cta_group::2"),
    "L2::cache_hint",
)
# Element types of the map that each operation takes (9.7.9.27.1.3); bitwise operations do not care about signs.
_REDUCED = {
    **dict.fromkeys(("add",), "u32 s32 u64 f16 bf16 f32 f32_ftz"),
    **dict.fromkeys(("min", "max"), "u32 s32 u64 s64 f16 bf16"),
    **dict.fromkeys(("inc", "dec"), "u32"),
    **dict.fromkeys(("and", "or", "xor"), "u32 s32 u64 s64"),
}


@dataclass(frozen=True)
class Tensor:
    """The operand [map, {coordinates}]: slots."""

    map: int
    coordinates: tuple[int, ...]
    gathered: bool

    def box(self, w: Warp, lane: Lanes, access: Access | None) -> Box:
        """The box that one lane names. Raises Stop for what no copy can do. access: reads the map; None: unchecked."""
        tensor = _fetch(w, lane, int(w.u64[self.map][lane.first]), access)
        coordinates = tuple(int(w.s32[slot][lane.first]) for slot in self.coordinates)
        wrong = off_coordinates(tensor, coordinates)
        if wrong:
            raise w.stop(FaultKind.TENSOR_MAP, f"{wrong}: {tensor}", lane)
        try:
            return (boxes.gather4 if self.gathered else boxes.tile)(tensor, coordinates)
        except NotModelled as error:
            raise Unsupported(w.instruction, str(error)) from error
        except TensorMapError as error:
            raise w.stop(FaultKind.TENSOR_MAP, str(error), lane) from error


def _tensor(d: Decoder, operand: ptx.Operand, modifiers: tuple[str, ...]) -> Tensor:
    if not isinstance(operand, ptx.TensorAddress):
        raise d.unsupported(f"an operand {operand} where [tensor map, coordinates] must stand")
    gathered = "tile::gather4" in modifiers or "tile::scatter4" in modifiers
    rank = next(n for n, word in enumerate(_DIMENSIONS, start=1) if word in modifiers)
    expected = 1 + boxes.GATHERED_ROWS if gathered else rank
    if len(operand.coordinates) != expected:
        raise d.unsupported(f"{len(operand.coordinates)} coordinates, not {expected}")
    slots = tuple(d.read(coordinate, "s32") for coordinate in operand.coordinates)
    return Tensor(d.read(operand.map, "u64"), slots, gathered)


def _check_words(i: ptx.Instruction, d: Decoder, known: tuple[str, ...]) -> None:
    for word in i.modifiers:
        if word.startswith("im2col"):
            raise d.unsupported(f"the mode .{word}")
        if word not in known:
            raise d.unsupported(f".{word}")


@lru_cache(maxsize=256)
def _decoded(data: bytes) -> TensorMap:
    """The map in `data`. Raises TensorMapError for what is none, and for one that breaks a rule."""
    tensor = decode(data)
    wrong = problems(tensor)
    if wrong:
        raise TensorMapError(f"{'; '.join(wrong)}: {tensor}")
    return tensor


def _fetch(w: Warp, lane: Lanes, address: int, access: Access | None) -> TensorMap:
    region, offsets, _ = w.resolve("generic", np.array([address], dtype=np.int64), lane)[0]
    name = f"the tensor map at {region.where(int(offsets[0]))}"
    if isinstance(region, Memory) and region.name.startswith(("shared", "local")):
        raise w.stop(FaultKind.TENSOR_MAP, f"{name}: it must be in param, const or global space", lane)
    if address % MAP_ALIGNMENT:
        raise w.stop(FaultKind.MISALIGNED, f"{name} is not aligned to {MAP_ALIGNMENT} bytes", lane)
    if not region.within(offsets, MAP_BYTES).all():
        raise w.stop(FaultKind.OUT_OF_BOUNDS, f"{name} is outside every allocation", lane)
    try:
        return _decoded(region.read(offsets, MAP_BYTES, access).tobytes())
    except TensorMapError as error:
        raise w.stop(FaultKind.TENSOR_MAP, f"{name}: {error}", lane) from error


def _each(lanes: Lanes) -> Iterator[Lanes]:
    if lanes.count == 1:
        yield lanes
    else:
        for lane in lanes.indices:
            yield Lanes.of(1 << int(lane))


def _alike(w: Warp, lanes: Lanes, operand: Tensor, source: AddressOf) -> Iterator[Lanes]:
    """Lanes that name the same box and the same source: their copies leave what one leaves, and run as one.

    CuTeDSL lets a whole warp execute such a store.
    """
    if lanes.count == 1:
        yield lanes
        return
    columns = [w.u64[operand.map][lanes.indices], source.of(w, lanes).astype(np.uint64)]
    columns.extend(w.u32[slot][lanes.indices].astype(np.uint64) for slot in operand.coordinates)
    _, group = np.unique(np.stack(columns), axis=1, return_inverse=True)
    for number in range(int(group.max()) + 1):
        chosen = np.zeros(WARP, dtype=np.bool_)
        chosen[lanes.indices[group == number]] = True
        yield Lanes.of_mask(chosen)


def _placed(w: Warp, lane: Lanes, cta: Cta, offset: int, placed: Place, tensor: TensorMap) -> Place:
    """`placed`, after the checks of where a box lies in shared memory.

    The hardware lets a box lie in what it rounds a CTA's shared memory up to; here that is outside.
    """
    wrong = misplaced(tensor, offset)
    if wrong:
        raise w.stop(FaultKind.MISALIGNED, f"{wrong}: {tensor}", lane)
    if not cta.shared.within(placed.addresses, placed.piece_bytes).all():
        end = offset + placed.total_bytes
        text = f"a box at {cta.shared.where(offset)} to {end:#x}, outside the {cta.shared.data.size:#x} bytes there"
        raise w.stop(FaultKind.OUT_OF_BOUNDS, f"{text}: {tensor}", lane)
    return placed


def _reachable(w: Warp, lane: Lanes, box: Box) -> NDArray[np.bool_]:
    """Which of the rows inside the tensor lie in device memory; the others are a fault."""
    memory = w.cta.cluster.global_memory
    good = memory.within(box.addresses, box.inner_bytes)
    if box.inner_bytes and not good.all():
        bad = int(box.addresses[~good][0])
        text = f"{box.inner_bytes} bytes at {memory.where(bad)}, inside the tensor but outside every allocation"
        w.fault(FaultKind.OUT_OF_BOUNDS, f"{text} ({int((~good).sum())} rows): {box.tensor}", lane)
    return good


@instruction("cp.async.bulk.tensor")
def copy(i: ptx.Instruction, d: Decoder) -> Step:
    """Copies a box between global and shared memory."""
    _check_words(i, d, ("async", "bulk", "tensor", *_DIMENSIONS, *_SPACES, *_MODES, *_OTHER_WORDS))
    spaces = [word for word in i.modifiers if word in _SPACES]
    if spaces == ["global", "shared::cta"]:
        return _store(i, d, "")
    if spaces not in (["shared::cta", "global"], ["shared::cluster", "global"]):
        raise d.unsupported(f"a copy {spaces}")
    return _load(i, d, spaces[0])


def _load(i: ptx.Instruction, d: Decoder, space: str) -> Step:
    target, barrier = d.address(i.operands[0]), d.address(i.operands[2])
    tensor = _tensor(d, i.operands[1], i.modifiers)
    mask = d.read(i.operands[3], "b16") if "multicast::cluster" in i.modifiers else -1
    if "L2::cache_hint" in i.modifiers:
        d.read(i.operands[-1], "b64")
    pair = "cta_group::2" in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in _each(lanes):
            destination = locate(w, space, target.first(w, lane), "the destination of a tensor copy")
            # The mbarrier may lie in the other CTA of a pair, whatever the space of the destination.
            signal = Signal.of(w, "shared::cluster", barrier.first(w, lane))
            if destination is None or signal is None:
                continue
            if signal.cta is not destination[0] and not pair:
                text = f"the mbarrier is in cta {signal.cta.rank}, the destination in cta {destination[0].rank}"
                w.fault(FaultKind.MBARRIER, f"{text}: only .cta_group::2 allows that", lane)
                continue
            chosen = None if mask < 0 else int(w.u16[mask][lane.first])
            _issue_load(w, lane, tensor, destination, _targets(w, lane, destination[0], signal, chosen, pair))
        return None

    return step


def _targets(w: Warp, lane: Lanes, cta: Cta, signal: Signal, mask: int | None, pair: bool) -> list[tuple[Cta, Signal]]:
    """The CTAs that receive a copy, each with the mbarrier that learns of it.

    With .cta_group::2 that is the destination's own or its peer's, whichever has the parity of the named one's CTA.
    """
    if mask is None:
        return [(cta, signal)]
    ctas = w.cta.cluster.ctas
    if mask >> len(ctas):
        w.fault(FaultKind.OUT_OF_BOUNDS, f"multicast to {mask:#x}, in a cluster of {len(ctas)} CTAs", lane)
    found = []
    for rank, destination in enumerate(ctas):
        if mask >> rank & 1:
            at = (rank & ~1 | signal.cta.rank & 1) if pair else rank
            found.append((destination, signal.at(ctas[at])))
    return found


def _issue_load(
    w: Warp, lane: Lanes, operand: Tensor, destination: tuple[Cta, int], targets: list[tuple[Cta, Signal]]
) -> None:
    cluster = w.cta.cluster
    memory = cluster.global_memory
    for cta, signal in targets:
        agent = signal.agent("async")
        agent.epoch += 1
        reading, writing = w.async_access(agent, FENCED_GLOBAL), w.async_access(agent)
        box = operand.box(w, lane, reading)
        placed = boxes.place(box.tensor, len(box.rows), destination[1])
        placed = _placed(w, lane, cta, destination[1], placed, box.tensor)
        good = _reachable(w, lane, box)

        def complete(
            cta: Cta = cta,
            signal: Signal = signal,
            box: Box = box,
            placed: Place = placed,
            good: NDArray[np.bool_] = good,
            reading: Access = reading,
            writing: Access = writing,
        ) -> None:
            data = np.zeros((good.size, box.inner_bytes), dtype=np.uint8)
            if not box.empty:
                data[good] = memory.read(box.addresses[good], box.inner_bytes, reading)
            cta.shared.write(placed.addresses, boxes.pieces(box.image(data), placed), writing)
            signal.complete_tx(box.transaction_bytes, completed(cluster.order, writing))

        cluster.engine.submit(complete, None, _what(w))


@instruction("cp.reduce.async.bulk.tensor")
def reduce(i: ptx.Instruction, d: Decoder) -> Step:
    """Combines a box in shared memory with one in global memory, element by element."""
    _check_words(
        i, d, ("reduce", "async", "bulk", "tensor", *_DIMENSIONS, *_SPACES, "tile", *_OTHER_WORDS, *_OPERATIONS)
    )
    operation = next((word for word in i.modifiers if word in _OPERATIONS), "")
    if not operation or [word for word in i.modifiers if word in _SPACES] != ["global", "shared::cta"]:
        raise d.unsupported("a reduction other than of shared::cta into global memory")
    return _store(i, d, operation)


def _store(i: ptx.Instruction, d: Decoder, operation: str) -> Step:
    tensor, source = _tensor(d, i.operands[0], i.modifiers), d.address(i.operands[1])
    if "L2::cache_hint" in i.modifiers:
        d.read(i.operands[-1], "b64")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in _each(lanes) if operation else _alike(w, lanes, tensor, source):
            _issue_store(w, lane, i, tensor, source, operation)
        return None

    return step


def _issue_store(w: Warp, lane: Lanes, i: ptx.Instruction, operand: Tensor, source: AddressOf, operation: str) -> None:
    place = locate(w, "shared::cta", source.first(w, lane), "the source of a tensor copy")
    if place is None:
        return
    cta, offset = place
    done, reading, writing = w.part(BulkGroups).begin(lane.bits, _what(w))
    writing.strong = bool(operation)
    box = operand.box(w, lane, writing)
    tensor = box.tensor
    first = min(int(w.s32[slot][lane.first]) for slot in operand.coordinates)
    if first < 0:  # not in the ISA: on an H200 each ended in an illegal instruction, also where no part was inside
        raise w.stop(FaultKind.TENSOR_MAP, f"a copy out of shared memory to the coordinate {first}: {tensor}", lane)
    if tensor.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        raise w.stop(FaultKind.TENSOR_MAP, f"a copy out of shared memory with a flipping swizzle: {tensor}", lane)
    merge = _merging(i, operation, tensor) if operation else None
    try:
        placed = boxes.store_place(tensor, len(box.rows), offset)
    except TensorMapError as error:
        raise w.stop(FaultKind.TENSOR_MAP, str(error), lane) from error
    placed = _placed(w, lane, cta, offset, placed, tensor)
    good = _reachable(w, lane, box)
    cluster = w.cta.cluster

    def read() -> None:
        data = cta.shared.read(placed.addresses, placed.piece_bytes, reading)
        done.read = True
        image = boxes.packed(tensor, len(box.rows), data)

        def write() -> None:
            if not box.empty:
                put(box.addresses[good], box.cut(image)[good], writing)
            if box.margin_bytes:
                # CUDA's allocations start and so end at more than 16 bytes: what is behind an end belongs to nobody.
                addresses, data = box.margin(image)
                real = cluster.global_memory.within(addresses, data.shape[1])
                put(addresses[real], data[real], None)  # that what lies there has no value yet is no fault
            done.done = True

        cluster.engine.submit(write, None, done.what)

    def put(addresses: NDArray[np.int64], data: NDArray[np.uint8], reading_old: Access | None) -> None:
        memory = cluster.global_memory
        if merge is None:
            memory.write(addresses, data, writing)
            return
        with cluster.lock:
            old = memory.read(addresses, data.shape[1], reading_old)
            memory.write(addresses, merge(old, data), writing)

    cluster.engine.submit(read, None, done.what)


def _merging(
    i: ptx.Instruction, operation: str, tensor: TensorMap
) -> Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.uint8]]:
    """What a reduction makes of the bytes of two equal boxes, old and new."""
    element = tensor.element.name.lower()
    if element not in _REDUCED[operation].split():
        raise Unsupported(i, f".{operation} on elements of {element}")
    type_ = f"b{tensor.element.bits}" if operation in ("and", "or", "xor") else element.removesuffix("_ftz")
    storage = STORAGE[type_]

    def merge(old: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8]:
        values = (np.ascontiguousarray(part).view(storage) for part in (old, new))
        result = combine(operation, type_, *values, flush=tensor.element is Element.F32_FTZ)
        return np.ascontiguousarray(result.astype(storage, copy=False)).view(np.uint8)

    return merge


@instruction("cp.async.bulk.prefetch.tensor")
def prefetch(i: ptx.Instruction, d: Decoder) -> Step:
    """A hint to the L2 cache, which is not modelled. Only the map and the coordinates are checked.

    That the first coordinate must be a multiple of 16 bytes, as for copies, was found on an H200.
    """
    _check_words(
        i, d, ("async", "bulk", "prefetch", "tensor", *_DIMENSIONS, *_SPACES, "tile", "tile::gather4", "L2::cache_hint")
    )
    tensor = _tensor(d, i.operands[0], i.modifiers)

    def step(w: Warp, lanes: Lanes) -> None:
        for lane in _each(lanes):
            tensor.box(w, lane, None)

    return step


def _what(w: Warp) -> str:
    return f"{w.instruction.dotted} at PTX line {w.instruction.line}"
