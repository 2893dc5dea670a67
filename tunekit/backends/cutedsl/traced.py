"""The footprint as the traced IR tells it: before any back end has run.

Shared memory is laid out as CuTeDSL 4.8.1's own pass does it (checked against what it
launches with, in tests/probe): allocations of partition 0, then 1, ...; each in
program order at its alignment; branches one after another unless the kernel
was launched with merged branch allocations, when alternatives overlap.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tunekit.backends.cutedsl.ir import attribute, attribute_names, bits, constant, is_block_argument, product, walk
from tunekit.model import Footprint

_MEMREF = re.compile(r'memref<(?P<dtype>\w+), smem(?:, align<(?P<align>\d+)>)?.*"(?P<extent>\d+):1">')
_STATIC_POINTER = re.compile(r"ptr<(?P<dtype>\w+), smem(?:, align<(?P<align>\d+)>)?")
# Dynamic shared memory begins here after the static part, wherever CuTeDSL's allocator is used.
DYNAMIC_BASE_ALIGNMENT = 1024
INLINE_ASM = ("llvm.inline_asm", "nvvm.inline_ptx")


@dataclass(frozen=True)
class Allocations:
    """What a kernel's operations allocate: bytes of dynamic and of static shared memory, and TMEM columns.

    None where that can't be read.
    """

    dynamic_smem: int | None
    static_smem: int | None
    tmem_columns: int | None

    @property
    def smem_bytes(self) -> int | None:
        """Of both kinds together."""
        if self.dynamic_smem is None or self.static_smem is None:
            return None
        return self.dynamic_smem + self.static_smem


@dataclass(frozen=True)
class TracedKernel:
    """One kernel of the module; `shortfall` says so if its launch asks for less than it allocates."""

    name: str
    footprint: Footprint
    shortfall: str = ""


def read(module: Any) -> list[TracedKernel]:
    """The kernels of a traced module, in order."""
    parts = [op.operation for op in module.body.operations]
    host = [op for part in parts if part.name != "gpu.module" for op in walk(part)]
    launches = {launch.kernel: launch for launch in _launches(host)}
    kernels = [op for part in parts if part.name == "gpu.module" for op in walk(part) if op.name == "cuda.kernel"]
    return [_kernel(op, launches) for op in kernels]


def combined(kernels: Iterable[TracedKernel]) -> Footprint:
    """The largest need of each kind over several kernels; None where any is unknown."""
    return combine([kernel.footprint for kernel in kernels])


def combine(footprints: list[Footprint]) -> Footprint:
    """Field-wise maximum; None where any is unknown."""
    largest: dict[str, int | None] = {}
    for field in dataclasses.fields(Footprint):
        values = [getattr(footprint, field.name) for footprint in footprints]
        largest[field.name] = None if None in values or not values else max(values)
    return Footprint(**largest)


@dataclass(frozen=True)
class _Launch:
    """What the host code passes; None where it is computed at run time. `smem_inferred`: CuTeDSL computes it."""

    kernel: str
    smem: int | None
    smem_inferred: bool
    threads: int | None
    cluster: int | None


def _kernel(op: Any, launches: dict[str, _Launch]) -> TracedKernel:
    name = _text(op.attributes["sym_name"])
    launch = launches.get(name)
    found = allocations(op)
    needed, shortfall = found.dynamic_smem, ""
    if launch is not None and not launch.smem_inferred:
        found = dataclasses.replace(found, dynamic_smem=launch.smem)
        if needed is not None and launch.smem is not None and launch.smem < needed:
            shortfall = f"{name} is launched with smem {launch.smem} B but allocates {needed} B"
    footprint = Footprint(
        smem_bytes=found.smem_bytes,
        tmem_columns=found.tmem_columns,
        threads=required_threads(op) or (launch.threads if launch else None),
        cluster=launch.cluster if launch else 1,
    )
    return TracedKernel(name, footprint, shortfall)


def allocations(kernel: Any) -> Allocations:
    """Of a ``cuda.kernel`` operation: all of them, or, while it is traced, those that there are so far."""
    inner = list(walk(kernel))
    dynamic, static = _dynamic_smem(kernel, inner), _static_smem(inner)
    if dynamic and static:
        static = _aligned(static, DYNAMIC_BASE_ALIGNMENT)
    return Allocations(dynamic, static, _tmem_columns(inner))


def required_threads(kernel: Any) -> int | None:
    """Threads of a CTA that the kernel itself demands; None if it leaves them to the launch."""
    return product(attribute(kernel, "nvvm.reqntid"))


def _dynamic_smem(kernel: Any, inner: list[Any]) -> int | None:
    merged = attribute(kernel, "smem.merge_branch_allocs") is not None
    top: int | None = 0
    for partition in sorted({_partition(op) for op in inner if _is_smem_alloca(op)}):
        top = _laid_out(kernel, partition, merged, top)
    return top


def _laid_out(op: Any, partition: int, merged: bool, top: int | None) -> int | None:
    """The end of the partition's allocations within `op`, if laid out from `top`."""
    if top is None:
        return None
    if _is_smem_alloca(op):
        if _partition(op) != partition:
            return top
        extent = _extent(op)
        return None if extent is None else _aligned(top, extent[1]) + extent[0]
    ends: list[int] = []
    position = top
    for region in op.regions:
        start = top if merged and op.name == "scf.if" else position
        for block in region.blocks:
            for inner in block.operations:
                end = _laid_out(inner.operation, partition, merged, start)
                if end is None:
                    return None
                start = end
        position = start
        ends.append(start)
    return max(ends, default=top)


def _static_smem(inner: list[Any]) -> int | None:
    top = 0
    for op in inner:
        if op.name == "cute_nvgpu.arch.alloc_smem":
            pointer = _STATIC_POINTER.search(str(op.results[0].type))
            count = _static_count(op)
            if pointer is None or count is None:
                return None
            top = _aligned(top, int(pointer["align"] or 1)) + count * bits(pointer["dtype"]) // 8
    return top


def _static_count(op: Any) -> int | None:
    for name in attribute_names(op):
        value = op.attributes[name]
        if type(value).__name__ == "IntegerAttr":
            return int(value.value)
    return constant(op.operands[0]) if len(op.operands) else None


def _tmem_columns(inner: list[Any]) -> int | None:
    """Columns of all allocations together; None if one can't be read, as in inline PTX."""
    columns = 0
    for op in inner:
        if op.name in INLINE_ASM and "tcgen05.alloc" in str(op.attributes):
            return None
        if op.name.endswith(".alloc_tmem"):
            count = constant(op.operands[0])
            if count is None:
                return None
            columns += count
    return columns


def _launches(host: list[Any]) -> Iterator[_Launch]:
    """Every launch of the host code, with the constants that it passes."""
    for op in host:
        if op.name != "cuda.launch_ex":
            continue
        config = next((operand.owner for operand in op.operands if "launch_cfg" in str(operand.type)), None)
        if config is None:
            continue
        names = [str(op.attributes[name]) for name in attribute_names(op)]
        kernel = next((text.rpartition("@")[2].strip('"') for text in names if "@" in text), "")
        smem = next((operand for operand in config.operands if str(operand.type) == "i64"), None)
        numbers = [constant(operand) for operand in config.operands if str(operand.type) == "i32"]
        inferred = smem is not None and not is_block_argument(smem) and smem.owner.name == "cute.kernel_smem_size"
        yield _Launch(
            kernel,
            smem=None if smem is None else constant(smem),
            smem_inferred=inferred,
            threads=product(numbers[:3]),
            cluster=_cluster(config),
        )


def _cluster(config: Any) -> int | None:
    """CTAs a cluster: what the launch configuration is given after it was made, else 1."""
    for use in config.results[0].uses:
        if use.owner.name == "cuda.launch_cfg.cluster_dim":
            return product([constant(operand) for operand in use.owner.operands if str(operand.type) == "i32"])
    return 1


def _is_smem_alloca(op: Any) -> bool:
    return bool(op.name == "cute.memref.alloca" and ", smem" in str(op.results[0].type))


def _partition(op: Any) -> int:
    partition = attribute(op, "smem.partition_id")
    return 1 if partition is None else int(partition.value)


def _extent(op: Any) -> tuple[int, int] | None:
    """Bytes and alignment of an allocation; None for a layout that isn't a plain run of elements."""
    match = _MEMREF.search(str(op.results[0].type))
    if match is None:
        return None
    return int(match["extent"]) * bits(match["dtype"]) // 8, int(match["align"] or 1)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _text(attribute: Any) -> str:
    return str(attribute).strip('"')
