"""Communication within a warp: shfl, vote, match, redux, elect, activemask (PTX ISA 9.7.9 and 9.7.13).

The .sync forms wait for every lane of their membermask that has not exited. Lanes of one fragment may pass other
masks than their neighbours, as two half warps do; each mask is then a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import WARP, Lanes, bits_of
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_LANE = np.arange(WARP, dtype=np.int64)
_CANONICAL_NAN = np.uint32(0x7FFFFFFF)

Collective = Callable[["Warp", Lanes], None]


def _groups(w: Warp, lanes: Lanes, masks: int) -> Iterator[tuple[int, Lanes]]:
    """(membermask, lanes that passed it) for each mask among the active lanes."""
    given = w.u32[masks]
    first = int(given[lanes.first])
    if lanes.count == 1 or (given[lanes.indices] == first).all():
        yield first, lanes
        return
    for mask in np.unique(given[lanes.indices]):
        yield int(mask), Lanes.of_mask(lanes.mask & (given == mask))


def _synchronised(i: ptx.Instruction, masks: int, collective: Collective) -> Step:
    """The step that waits for the members and then runs `collective` on each group's lanes."""

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        groups = list(_groups(w, lanes, masks))
        union = 0
        for mask, group in groups:
            outside = group.bits & ~mask
            if outside:
                w.fault(
                    FaultKind.DIVERGENCE,
                    f"{i.opcode} with membermask {mask:#010x} is executed by lanes {_listed(outside)}, not in it",
                    lanes=Lanes.of(outside),
                )
            union |= mask
        wait = w.converge(i, lanes, union)
        if wait is not None:
            return wait
        for _, group in groups:
            collective(w, group)
        return None

    return step


def _listed(bits: int) -> str:
    return ", ".join(str(lane) for lane in range(WARP) if bits >> lane & 1)


def _results(operand: ptx.Operand) -> tuple[ptx.Operand, ptx.Operand | None]:
    """d and the optional p of d|p."""
    if isinstance(operand, ptx.Pair):
        return operand.first, operand.second
    return operand, None


@instruction("shfl.sync")
def shfl(i: ptx.Instruction, d: Decoder) -> Step:
    """d[|p], a, b, c, membermask: b is a lane or a distance, c holds the clamp (4..0) and the segment mask (12..8)."""
    mode = i.modifiers[1]
    if mode not in ("up", "down", "bfly", "idx") or i.modifiers[2:] != ("b32",):
        raise d.unsupported("a mode that is not modelled")
    target, flag = _results(i.operands[0])
    a, b, c, masks = (d.read(operand, "b32") for operand in i.operands[1:5])
    out = d.write(target, "b32")
    found = None if flag is None else d.write(flag, "pred")

    def exchange(w: Warp, lanes: Lanes) -> None:
        bval = (w.u32[b] & 31).astype(np.int64)
        clamp = w.u32[c].astype(np.int64)
        segment = clamp >> 8 & 31
        lowest = _LANE & segment
        limit = lowest | (clamp & 31 & ~segment)
        if mode == "up":
            source = _LANE - bval
            valid = source >= limit
        else:
            if mode == "down":
                source = _LANE + bval
            elif mode == "bfly":
                source = _LANE ^ bval
            else:
                source = lowest | (bval & ~segment)
            valid = source <= limit
        source = np.where(valid, source, _LANE)
        absent = lanes.mask & ~lanes.mask[source]
        if absent.any():
            lane = int(np.flatnonzero(absent)[0])
            w.fault(
                FaultKind.DIVERGENCE,
                f"lane {lane} reads lane {int(source[lane])}, which takes no part: an unpredictable value",
                lanes=Lanes.of_mask(absent),
            )
        np.copyto(w.u32[out], w.u32[a][source], where=lanes.mask)
        if found is not None:
            np.copyto(w.pred[found], valid, where=lanes.mask)

    return _synchronised(i, masks, exchange)


@instruction("shfl")
def shfl_without_sync(i: ptx.Instruction, d: Decoder) -> Step:
    raise d.unsupported("shfl without .sync does not exist on sm_70 and later (PTX ISA 9.7.9.5)")


@instruction("vote.sync")
def vote(i: ptx.Instruction, d: Decoder) -> Step:
    """d, {!}a, membermask: all, any, uni to a predicate, ballot to a mask."""
    mode = i.modifiers[1]
    a, negated = d.predicate(i.operands[1])
    masks = d.read(i.operands[2], "b32")
    if mode == "ballot":
        out = d.write(i.operands[0], "b32")
    elif mode in ("all", "any", "uni"):
        out = d.write(i.operands[0], "pred")
    else:
        raise d.unsupported("a mode that is not modelled")

    def count(w: Warp, lanes: Lanes) -> None:
        true = bits_of((~w.pred[a] if negated else w.pred[a]) & lanes.mask)
        if mode == "ballot":
            np.copyto(w.u32[out], np.uint32(true), where=lanes.mask)
        else:
            everyone = true == lanes.bits
            answer = everyone if mode == "all" else bool(true) if mode == "any" else everyone or not true
            np.copyto(w.pred[out], answer, where=lanes.mask)

    return _synchronised(i, masks, count)


@instruction("vote")
def vote_without_sync(i: ptx.Instruction, d: Decoder) -> Step:
    raise d.unsupported("vote without .sync does not exist on sm_70 and later (PTX ISA 9.7.13.9)")


@instruction("match.any.sync", "match.all.sync")
def match(i: ptx.Instruction, d: Decoder) -> Step:
    """d[|p], a, membermask: the lanes with an equal value (any), or all of them if all are equal (all)."""
    mode, kind = i.modifiers[0], i.modifiers[2]
    target, flag = _results(i.operands[0])
    a, masks = d.read(i.operands[1], kind), d.read(i.operands[2], "b32")
    out = d.write(target, "b32")
    same = None if flag is None else d.write(flag, "pred")
    wide = kind == "b64"

    def compare(w: Warp, lanes: Lanes) -> None:
        values = w.u64[a] if wide else w.u32[a]
        if mode == "all":
            equal = bool((values[lanes.indices] == values[lanes.first]).all())
            np.copyto(w.u32[out], np.uint32(lanes.bits if equal else 0), where=lanes.mask)
            if same is not None:
                np.copyto(w.pred[same], equal, where=lanes.mask)
            return
        for value in np.unique(values[lanes.indices]):
            group = lanes.mask & (values == value)
            np.copyto(w.u32[out], np.uint32(bits_of(group)), where=group)

    return _synchronised(i, masks, compare)


def _redux_f32(values: NDArray[Any], smallest: bool, absolute: bool, propagate: bool) -> np.uint32:
    """min or max of float32 bit patterns: +0 above -0; NaN dropped, or answered with .NaN."""
    bits = values & np.uint32(0x7FFFFFFF) if absolute else values
    numbers = bits.view(np.float32)
    missing = np.isnan(numbers)
    if missing.all() or (propagate and missing.any()):
        return _CANONICAL_NAN
    # Sign-magnitude bits as ordered integers tell the zeros apart.
    kept = bits[~missing].view(np.int32).astype(np.int64)
    ordered = np.where(kept < 0, -(kept & 0x7FFFFFFF) - 1, kept)
    chosen = int(np.argmin(ordered) if smallest else np.argmax(ordered))
    return np.uint32(bits[~missing][chosen])


@instruction("redux.sync")
def redux(i: ptx.Instruction, d: Decoder) -> Step:
    """dst, src, membermask: one value from all lanes of the mask."""
    operation, kind = i.modifiers[1], i.modifiers[-1]
    extra = i.modifiers[2:-1]
    if kind == "f32":
        if operation not in ("min", "max") or not set(extra) <= {"abs", "NaN"}:
            raise d.unsupported("a form that is not modelled")
    elif extra or operation not in ({"and", "or", "xor"} if kind == "b32" else {"add", "min", "max"}):
        raise d.unsupported("a form that is not modelled")
    a, masks = d.read(i.operands[1], kind), d.read(i.operands[2], "b32")
    out = d.write(i.operands[0], kind)
    reductions: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip

    def reduce(w: Warp, lanes: Lanes) -> None:
        if kind == "f32":
            value = _redux_f32(w.u32[a][lanes.indices], operation == "min", "abs" in extra, "NaN" in extra)
            np.copyto(w.u32[out], value, where=lanes.mask)
            return
        view = w.s32 if kind == "s32" else w.u32
        chosen = view[a][lanes.indices]
        np.copyto(view[out], reductions[operation].reduce(chosen, dtype=chosen.dtype), where=lanes.mask)

    return _synchronised(i, masks, reduce)


@instruction("elect.sync")
def elect(i: ptx.Instruction, d: Decoder) -> Step:
    """d|p, membermask: the lowest lane leads (any fixed choice satisfies the ISA)."""
    target, flag = _results(i.operands[0])
    masks = d.read(i.operands[1], "b32")
    out = d.write(target, "b32")
    leads = d.write(flag, "pred") if flag is not None else None

    def choose(w: Warp, lanes: Lanes) -> None:
        np.copyto(w.u32[out], np.uint32(lanes.first), where=lanes.mask)
        if leads is not None:
            np.copyto(w.pred[leads], lanes.first == _LANE, where=lanes.mask)

    return _synchronised(i, masks, choose)


@instruction("activemask")
def activemask(i: ptx.Instruction, d: Decoder) -> Step:
    """d: the lanes that execute this instruction together."""
    out = d.write(i.operands[0], "b32")

    def step(w: Warp, lanes: Lanes) -> None:
        np.copyto(w.u32[out], np.uint32(lanes.bits), where=lanes.mask)

    return step
