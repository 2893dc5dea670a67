"""The footprint as the machine code tells it: cubin, PTX, ptxas's log, and the compiled host code."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from typing import Any

from elftools.elf.elffile import ELFFile

from tunekit.arch import Arch
from tunekit.backends.cutedsl.ir import constant, walk
from tunekit.model import Footprint, Values

# Shared memory that the system keeps for itself in every CTA from compute capability 9.0
# on; ptxas counts it in the section of the kernel (CUDA C++ Programming Guide 13.0).
RESERVED_SMEM_BYTES = 1024
# Attributes of .nv.info sections, as `cuobjdump --dump-elf` names them.
EIATTR_FRAME_SIZE = 0x11
EIATTR_REGCOUNT = 0x2F
EIATTR_REQNTID = 0x10
EIATTR_MAX_THREADS = 0x05
EIFMT_SVAL = 0x04
# cudaLaunchConfig_t as LLVM sees it, and cudaLaunchAttributeClusterDimension.
LAUNCH_CONFIG = "array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32"
CLUSTER_DIMENSION = "struct<(i32, i32, i32)>"
# PTX's name of a chip where it isn't CuTeDSL's: 4.8.1 assembles sm_110a as sm_101a, its earlier name.
OTHER_CHIP_NUMBERS = {110: 101}

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_MS = re.compile(r"Compile time = ([\d.]+) ms")
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized due to (.+?) (?:in|for) the function")
_CUDA_TOOLS = re.compile(r"Cuda compilation tools, release [\d.]+, V([\d.]+)")
_TARGET = re.compile(r"^\.target\s+sm_(\d+)([af]?)", re.MULTILINE)
_ALLOC = re.compile(r"tcgen05\.alloc\.[^;]*\],\s*([%\w]+)\s*;")


def read(host: Any, ptx: str, cubin: bytes, log: str) -> tuple[Footprint, Values]:
    """Footprint and facts of a compiled module.

    `host` is the MLIR module after all passes; `log` what ``ptxas -v`` said. Of
    several kernels the largest need of each kind counts.
    """
    elf = ELFFile(io.BytesIO(cubin))
    dynamic = [_launch_smem(op) for op in _launch_configs(host)]
    static = _static_smem(elf)
    info = dict(_kernel_info(elf))
    registers = [value for name, value in info.items() if name[0] == EIATTR_REGCOUNT]
    frames = [value for name, value in info.items() if name[0] == EIATTR_FRAME_SIZE]
    threads = [value for name, value in info.items() if name[0] in (EIATTR_REQNTID, EIATTR_MAX_THREADS)]
    spills = [(int(stores), int(loads)) for _, stores, loads in _SPILLS.findall(log)]
    known_smem = [smem for smem in dynamic if smem is not None]
    smem = max(known_smem) + static if known_smem and len(known_smem) == len(dynamic) else None
    footprint = Footprint(
        smem_bytes=smem,
        tmem_columns=tmem_columns(ptx),
        threads=max(threads, default=None),
        cluster=_cluster(host),
        registers=max(registers, default=None),
        spill_bytes=max((stores for stores, _ in spills), default=None),
        local_bytes=max(frames, default=None),
    )
    facts: dict[str, Any] = {"smem_static": static, "cubin_bytes": len(cubin), "ptx_lines": ptx.count("\n")}
    if smem is not None:
        facts["smem_dynamic"] = smem - static
    if spills:
        facts["spill_loads"] = max(loads for _, loads in spills)
    if because := wgmma_serialized(log):
        facts["wgmma_serialized"] = because
    tools = _CUDA_TOOLS.search(ptx)
    if tools:
        facts["cuda_tools"] = tools.group(1)  # the release whose back end and ptxas made this code
    times = [float(ms) for ms in _PTXAS_MS.findall(log)]
    if times:
        facts["ptxas_s"] = sum(times) / 1000
    return footprint, Values(facts)


def wrong_arch(cubin: bytes, ptx: str, arch: Arch) -> str | None:
    """Why the code is not for `arch`, in a sentence, or None.

    The number is the machine code's; that it may use the chip's own features (the
    ``a`` of sm_90a) is read from the PTX, for toolkits disagree on where the machine
    code says so (CUDA 12.9 and 13.0 differ for sm_90a).
    """
    number = chip_number(cubin)
    target = _TARGET.search(ptx)
    suffix = target.group(2) if target else ""
    asked = arch.compute_capability[0] * 10 + arch.compute_capability[1]
    if suffix == "a" and number in (asked, OTHER_CHIP_NUMBERS.get(asked)):
        return None
    return f"asked for {arch.name}, but the machine code is for sm_{number}{suffix}"


def wgmma_serialized(log: str) -> str | None:
    """Why ptxas waits for each wgmma before the next, if it does: a kernel is then slow without a spill to show for it.

    The words of the warning are ptxas's; the log wraps its lines.
    """
    found = _SERIALIZED.search(" ".join(log.split()))
    return found.group(1) if found else None


def chip_number(cubin: bytes) -> int:
    """The SM number that a cubin is for: its place in the ELF flags depends on the ABI version."""
    header = ELFFile(io.BytesIO(cubin)).header
    flags = header["e_flags"]
    return int(flags >> 8 & 0xFF if header["e_ident"]["EI_ABIVERSION"] >= 8 else flags & 0xFF)


def tmem_columns(ptx: str) -> int | None:
    """TMEM columns that the PTX allocates, all allocations together; None if one isn't a constant."""
    total = 0
    for operand in _ALLOC.findall(ptx):
        value = operand if operand.isdigit() else _moved(ptx, operand)
        if value is None:
            return None
        total += int(value)
    return total


def _moved(ptx: str, register: str) -> str | None:
    """The constant that is moved into a register, where that is all that ever is."""
    written = re.findall(rf"^\s*[\w.]+\s+{re.escape(register)},\s*([^;]+);", ptx, re.MULTILINE)
    return written[0] if len(written) == 1 and written[0].isdigit() else None


def _static_smem(elf: Any) -> int:
    sizes = [s["sh_size"] for s in elf.iter_sections() if s.name.startswith(".nv.shared.") and "reserved" not in s.name]
    return max((max(0, size - RESERVED_SMEM_BYTES) for size in sizes), default=0)


def _kernel_info(elf: Any) -> Iterator[tuple[tuple[int, str], int]]:
    """((attribute, which kernel), value) of the .nv.info sections: records of format, attribute, size, value."""
    for section in elf.iter_sections():
        if not section.name.startswith(".nv.info"):
            continue
        data, offset = section.data(), 0
        while offset + 4 <= len(data):
            kind, attribute, size = struct.unpack_from("<BBH", data, offset)
            offset += 4
            if kind != EIFMT_SVAL:
                continue  # two bytes of value, already read as `size`
            words = struct.unpack_from(f"<{size // 4}I", data, offset)
            offset += size
            if attribute in (EIATTR_REGCOUNT, EIATTR_FRAME_SIZE) and len(words) == 2:
                yield (attribute, str(words[0])), words[1]
            elif attribute in (EIATTR_REQNTID, EIATTR_MAX_THREADS) and len(words) == 3:
                yield (attribute, section.name), words[0] * words[1] * words[2]


def _launch_configs(host: Any) -> Iterator[Any]:
    """The address of ``dynamicSmemBytes`` in every launch configuration of the host code."""
    for op in walk(host.operation):
        if op.name != "llvm.getelementptr" or LAUNCH_CONFIG not in str(op.attributes["elem_type"]):
            continue
        if list(op.attributes["rawConstantIndices"]) == [0, 2]:
            yield op


def _launch_smem(address: Any) -> int | None:
    stored = [use.owner.operands[0] for use in address.results[0].uses if use.owner.name == "llvm.store"]
    return constant(stored[0]) if len(stored) == 1 else None


def _cluster(host: Any) -> int | None:
    """CTAs a cluster, from the launch attributes' one triple of ints; 1 where there is none."""
    sizes: dict[str, int] = {}
    for op in walk(host.operation):
        if op.name != "llvm.getelementptr" or CLUSTER_DIMENSION not in str(op.attributes["elem_type"]):
            continue
        base = str(op.operands[0].get_name())
        for use in op.results[0].uses:
            if use.owner.name == "llvm.store":
                value = constant(use.owner.operands[0])
                if value is None:
                    return None
                sizes[base] = sizes.get(base, 1) * value
    return max(sizes.values(), default=1)
