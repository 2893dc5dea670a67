"""Bulk copies (PTX ISA 9.7.9): cp.async.bulk, cp.reduce.async.bulk, bulk groups, prefetch.

They act through the async proxy: what ordinary stores wrote before is seen only behind a fence.proxy.async. Copies
to shared memory complete on an mbarrier, copies to global memory in the bulk groups of the thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import FENCED_GLOBAL, FENCED_SHARED, Access
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.memory import RANK_BYTES, RANK_SHIFT, SHARED_BASE
from tunekit.simulate.machine.reach import Place, reach
from tunekit.simulate.machine.transfer import Bytes
from tunekit.simulate.numbers.reduction import supports
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.completion import Signal, completed
from tunekit.simulate.sync.groups import BulkGroups, pending_groups
from tunekit.simulate.units.atomic import Update, updater

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp

UNIT_BYTES = 16
_SPACES = ("global", "shared::cta", "shared::cluster")
_REDUCTIONS = frozenset(("and", "or", "xor", "add", "inc", "dec", "min", "max"))
_TYPES = frozenset(("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"))


@dataclass(frozen=True)
class _Form:
    """What the modifiers and operands say. Slots are -1 where there is no such operand."""

    target_space: str
    source_space: str
    mbarrier: bool
    mask: int
    multicast: int
    update: Update | None


def _form(i: ptx.Instruction, d: Decoder) -> _Form:
    words = i.modifiers
    spaces = [word for word in words if word in _SPACES]
    if len(spaces) != 2:
        raise d.unsupported("without both state spaces")
    known = {"async", "bulk", "reduce", "mbarrier::complete_tx::bytes", "bulk_group", "noftz", "L2::cache_hint"}
    operation = type_ = ""
    for word in words:
        if word in _REDUCTIONS and i.modifiers[0] == "reduce":
            operation = word
        elif word in _TYPES and i.modifiers[0] == "reduce":
            type_ = word
        elif word not in known and word not in _SPACES and word not in ("multicast::cluster", "cp_mask"):
            raise d.unsupported(f".{word}")
    update = None
    if operation:
        if not supports(operation, type_):
            raise d.unsupported(f".{operation} on .{type_}")
        update = updater(operation, type_, flush=False)
    rest = list(i.operands[4 if "mbarrier::complete_tx::bytes" in words else 3 :])
    multicast = d.read(rest.pop(0), "b16") if "multicast::cluster" in words else -1
    if "L2::cache_hint" in words:
        d.read(rest.pop(0), "b64")
    mask = d.read(rest.pop(0), "b16") if "cp_mask" in words else -1
    return _Form(spaces[0], spaces[1], "mbarrier::complete_tx::bytes" in words, mask, multicast, update)


@instruction("cp.async.bulk", "cp.reduce.async.bulk")
def bulk(i: ptx.Instruction, d: Decoder) -> Step:
    form = _form(i, d)
    target, source = d.address(i.operands[0]), d.address(i.operands[1])
    size = d.read(i.operands[2], "b32")
    mbarrier = d.address(i.operands[3]) if form.mbarrier else None
    what = f"{i.dotted} at PTX line {i.line}"

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in lanes.indices:
            one = Lanes.of(1 << int(lane))
            to, at = int(target.of(w, one)[0]), int(source.of(w, one)[0])
            length = int(w.u32[size][lane])
            if not _aligned(w, one, to, at, length) or not length:
                continue
            read_from = reach(w, form.source_space, np.array([at]), length, one, align=UNIT_BYTES)
            if not read_from:
                continue
            if mbarrier is None:
                mask = int(w.u16[form.mask][lane]) if form.mask >= 0 else 0xFFFF
                _to_global(w, one, form, read_from[0], to, length, mask, what)
                continue
            signal = Signal.of(w, "shared::cluster", int(mbarrier.of(w, one)[0]))
            if signal is not None:
                ctas = int(w.u16[form.multicast][lane]) if form.multicast >= 0 else None
                _to_shared(w, one, form, read_from[0], to, length, signal, ctas, what)
        w.cta.cluster.changes += 1
        return None

    return step


def _aligned(w: Warp, one: Lanes, to: int, at: int, length: int) -> bool:
    """Addresses and the size are multiples of 16."""
    for value, name in ((to, "destination"), (at, "source")):
        if value % UNIT_BYTES:
            w.fault(FaultKind.MISALIGNED, f"a bulk copy's {name} {value:#x} is not aligned to {UNIT_BYTES} bytes", one)
            return False
    if length % UNIT_BYTES:
        w.fault(FaultKind.MISALIGNED, f"a bulk copy of {length} bytes: not a multiple of {UNIT_BYTES}", one)
        return False
    return True


def _to_global(w: Warp, one: Lanes, form: _Form, source: Place, to: int, length: int, mask: int, what: str) -> None:
    """Shared to global memory, in the thread's bulk group. mask: which bytes of each 16 are copied (.cp_mask)."""
    targets = reach(w, "global", np.array([to]), length, one, align=UNIT_BYTES)
    if not targets:
        return
    target = targets[0]
    cluster = w.cta.cluster
    operation, reading, writing = w.part(BulkGroups).begin(one.bits, what)
    writing.strong = form.update is not None
    kept = np.array([k for k in range(length) if mask >> (k % UNIT_BYTES) & 1], dtype=np.int64)

    def read() -> None:
        data = source.region.read(source.offsets, length, reading)
        operation.read = True

        def write() -> None:
            if form.update is not None:
                with cluster.lock:
                    _reduce(form.update, target, data, writing)
            elif kept.size == length:
                target.region.write(target.offsets, data, writing)
            else:
                target.region.write(target.offsets[:, None] + kept, data[:, kept, None], writing)
            operation.done = True

        cluster.engine.submit(write, None, what)

    cluster.engine.submit(read, None, what)


def _to_shared(
    w: Warp,
    one: Lanes,
    form: _Form,
    source: Place,
    to: int,
    length: int,
    signal: Signal,
    ctas: int | None,
    what: str,
) -> None:
    """Global or shared memory to the shared memory of this or other CTAs, completing on an mbarrier in each."""
    cluster = w.cta.cluster
    for number, (address, there) in enumerate(_receivers(w, one, to, signal, ctas)):
        targets = reach(w, "shared::cluster", np.array([address]), length, one, align=UNIT_BYTES)
        if targets:
            fenced = FENCED_GLOBAL if form.source_space == "global" else FENCED_SHARED
            cluster.engine.submit(_copy(w, form, source, targets[0], length, there, fenced), None, f"{what} #{number}")


def _copy(
    w: Warp, form: _Form, source: Place, target: Place, length: int, signal: Signal, fenced: int
) -> Callable[[], None]:
    agent = signal.agent()
    agent.epoch += 1
    reading = w.async_access(agent, fenced)
    writing = w.async_access(agent, FENCED_SHARED)
    writing.strong = form.update is not None
    order = w.cta.cluster.order

    def act() -> None:
        data = source.region.read(source.offsets, length, reading)
        if form.update is not None:
            _reduce(form.update, target, data, writing)
        else:
            target.region.write(target.offsets, data, writing)
        signal.complete_tx(length, completed(order, reading, writing))

    return act


def _receivers(w: Warp, one: Lanes, to: int, signal: Signal, mask: int | None) -> list[tuple[int, Signal]]:
    """The addresses and mbarriers that receive a copy: one, or with .multicast the same offsets in each CTA."""
    if to >= SHARED_BASE:
        to -= SHARED_BASE
    if mask is None:
        return [(to, signal)]
    cluster = w.cta.cluster
    if mask >> cluster.size:
        w.fault(FaultKind.OUT_OF_BOUNDS, f"a multicast to CTAs {mask:#x} in a cluster of {cluster.size}", one)
    chosen: list[Cta] = [cta for cta in cluster.ctas if mask >> cta.rank & 1]
    return [(to % RANK_BYTES | cta.rank << RANK_SHIFT, signal.at(cta)) for cta in chosen]


def _reduce(update: Update, target: Place, data: Bytes, access: Access) -> None:
    """Each element of the target is combined with its own of the source."""
    old = target.region.read(target.offsets, data.shape[-1], access)
    target.region.write(target.offsets, update(old, data), access)


@instruction("cp.async.bulk.commit_group", words="")
def commit_group(i: ptx.Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        w.part(BulkGroups).commit(lanes.bits)
        return None

    return step


@instruction("cp.async.bulk.wait_group", words="read")
def wait_group(i: ptx.Instruction, d: Decoder) -> Step:
    """Waits for the groups; with .read only until their sources have been read."""
    pending = pending_groups(i, d)
    reads_only = "read" in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        groups = w.part(BulkGroups)
        return groups.wait(groups.before(lanes.bits, pending), i.dotted, reads_only=reads_only)

    return step


@instruction("cp.async.bulk.prefetch.L2", words="global L2::cache_hint")
def prefetch(i: ptx.Instruction, d: Decoder) -> Step:
    """A hint: the addresses are checked, nothing is copied."""
    source = d.address(i.operands[0])
    size = d.read(i.operands[1], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in lanes.indices:
            one = Lanes.of(1 << int(lane))
            at, length = int(source.of(w, one)[0]), int(w.u32[size][lane])
            if _aligned(w, one, at, at, length) and length:
                reach(w, "global", np.array([at]), length, one, align=UNIT_BYTES)
        return None

    return step
