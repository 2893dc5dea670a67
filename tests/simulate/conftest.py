"""Running small PTX kernels in the simulator."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tunekit.simulate.faults import Fault, Faults
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.machine.cluster import Cluster, ClusterResult
from tunekit.simulate.machine.memory import Buffer
from tunekit.simulate.machine.program import Program
from tunekit.simulate.ptx.read import read_module

PAGE = 4096


@dataclass
class Ran:
    """What a run left: the faults, and the buffers' contents by name."""

    faults: tuple[Fault, ...]
    buffers: dict[str, np.ndarray[Any, Any]]
    results: list[ClusterResult] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        return {fault.kind.value for fault in self.faults}


def kernel_text(
    body: str, parameters: str = "", target: str = "sm_100a", variables: str = "", directives: str = ""
) -> str:
    """A whole PTX module around a kernel's body. Registers %p<64> %rs<64> %r<512> %rd<128> are declared."""
    return f"""
.version 8.8
.target {target}
.address_size 64
{variables}
.visible .entry kernel({parameters})
{directives}
{{
.reg .pred %p<64>;
.reg .b16 %rs<64>;
.reg .b32 %r<512>;
.reg .b64 %rd<128>;
{body}
}}
"""


def run(
    text: str,
    buffers: Mapping[str, np.ndarray[Any, Any]] | None = None,
    parameters: Sequence[str | bytes | Callable[[Mapping[str, int]], bytes]] = (),
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    seed: int = 0,
    unwritten: Sequence[str] = (),
    strict: bool = False,
) -> Ran:
    """Runs the module's first kernel over the whole grid, in this process.

    buffers: name to array (copied in; the results are in Ran.buffers). parameters: in order, a buffer's name for its
    address, the bytes, or a function from the buffers' addresses to the bytes. unwritten: buffers whose contents
    count as uninitialised (outputs).
    """
    memory: list[mmap.mmap] = []
    made: list[Buffer] = []
    for name, array in (buffers or {}).items():
        flat = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        room = mmap.mmap(-1, max(PAGE, -(-flat.size // PAGE) * PAGE))
        memory.append(room)
        data = np.frombuffer(room, dtype=np.uint8)[: flat.size]
        data[:] = flat
        initialised = np.full(flat.size, name not in unwritten)
        made.append(Buffer(name, data.ctypes.data, data, initialised, output=True))
    address = {buffer.name: buffer.address for buffer in made}
    module = read_module(text)
    kernel = next(iter(module.kernels.values()))
    values = tuple(
        p if isinstance(p, bytes) else p(address) if callable(p) else address[p].to_bytes(8, "little")
        for p in parameters
    )
    launch = Launch(kernel.name, grid, block, cluster, shared, {}, values)
    program = Program.of(module, kernel, shared)
    faults = Faults()
    results = []
    ctas = cluster[0] * cluster[1] * cluster[2]
    for number in range(grid[0] * grid[1] * grid[2] // ctas):
        result = Cluster(program, launch, number, made, seed=seed, strict=strict).run()
        faults.merge(result.faults)
        results.append(result)
    out = {
        buffer.name: buffer.data.copy().view(array.dtype).reshape(array.shape)
        for buffer, array in zip(made, (buffers or {}).values(), strict=True)
    }
    return Ran(faults.all(), out, results)


@pytest.fixture
def run_ptx() -> Callable[..., Ran]:
    """run(text, buffers, parameters, ...): see there. Unsupported instructions raise."""
    return run


@pytest.fixture
def ptx_kernel() -> Callable[..., str]:
    return kernel_text
