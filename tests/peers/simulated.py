"""Simulate one call of a compiled kernel: ``python simulated.py '{"object": ..., "arguments": DIR, ...}'``.

The arguments are as handover.py wrote them; outputs are left in their files. Prints one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tunekit.arch import parse_arch
from tunekit.simulate.cluster import Cluster
from tunekit.simulate.faults import Faults, Unsupported
from tunekit.simulate.launch.capture import capture_object
from tunekit.simulate.launch.dlpack import DeviceTensor
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.memory import Buffer
from tunekit.simulate.program import Program
from tunekit.simulate.ptx.module import Module
from tunekit.simulate.ptx.read import read_module


def main(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of each launch."""
    directory = Path(job["arguments"])
    memory: list[Buffer] = []

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(argument, value))
        if not isinstance(value, dict):
            return value
        if "address_of" in value:
            return ctypes.c_void_p(argument(value["address_of"]).address)
        if "pointer" in value:
            return ctypes.c_void_p(value["pointer"])
        data = np.memmap(directory / value["file"], np.uint8, "r+")
        buffer = Buffer(f"argument {value['file']}", data.ctypes.data, data, np.full(data.size, not value["output"]))
        memory.append(buffer)
        return DeviceTensor(buffer.address, value["dtype"], tuple(value["shape"]), tuple(value["strides"]))

    arguments = [argument(value) for value in json.loads((directory / "call.json").read_text())]
    module = read_module(Path(job["ptx"]).read_text(), job["ptx"])
    launches = capture_object(Path(job["object"]), job["symbol"], arguments, parse_arch(job["arch"]), module)
    return [simulate(module, launch, memory, job["seed"], job["clusters"]) for launch in launches]


def simulate(module: Module, launch: Launch, memory: list[Buffer], seed: int, clusters: int | None) -> dict[str, Any]:
    """Simulate the first `clusters` clusters of a launch, or all."""
    facts: dict[str, Any] = {"grid": launch.grid, "block": launch.block, "cluster": launch.cluster}
    facts["smem_bytes"] = launch.shared_bytes
    started = time.perf_counter()
    kernel = module.kernels[launch.kernel]
    program = Program.of(module, kernel, launch.shared_bytes)
    facts["decode_s"] = round(time.perf_counter() - started, 2)
    count = math.prod(launch.grid) // math.prod(launch.cluster)
    faults, states, seconds, instructions = Faults(), [], [], 0
    try:
        for number in range(min(count, clusters or count)):
            result = Cluster(program, launch, number, memory, seed=seed).run()
            faults.merge(result.faults)
            states.append(result.state)
            seconds.append(round(result.seconds, 2))
            instructions += result.instructions
    except Unsupported as refusal:
        states.append(f"unsupported: {refusal}")
    return facts | {
        "states": states,
        "seconds": seconds,
        "instructions": instructions,
        "faults": [f"{f.kind.value} x{f.count}: {f.message} ({f.place})" for f in faults.all()],
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
