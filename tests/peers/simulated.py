"""Simulate one call of a compiled kernel: ``python simulated.py '{"object": ..., "arguments": DIR, ...}'``.

The arguments are as handover.py wrote them; outputs are left in their files. Prints the report as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tunekit.arch import parse_arch
from tunekit.simulate.launch.arguments import Buffers, Wanted
from tunekit.simulate.launch.capture import capture_object
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.run import simulate


def main(job: dict[str, Any]) -> dict[str, Any]:
    directory = Path(job["arguments"])
    call = json.loads((directory / "call.json").read_text())
    buffers = Buffers([wanted(value, directory) for value in tensors(call)])

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(argument, value))
        if not isinstance(value, dict):
            return value
        if "address_of" in value:
            return ctypes.c_void_p(buffers[value["address_of"]["file"]].address)
        return ctypes.c_void_p(value["pointer"]) if "pointer" in value else buffers[value["file"]]

    module = read_module(Path(job["ptx"]).read_text(), job["ptx"])
    arch = parse_arch(job["arch"])
    launches = capture_object(Path(job["object"]), job["symbol"], list(map(argument, call)), arch, module)
    chosen = {name: job[name] for name in ("schedules", "seed", "ctas", "jobs")}
    report = simulate(launches, module, buffers, **chosen)
    for buffer in buffers.buffers:
        if buffer.output:
            buffers.bytes_of(buffer).tofile(directory / buffer.name)
    return report.to_payload()


def tensors(value: Any) -> list[dict[str, Any]]:
    """The descriptions of the tensors within a call."""
    if isinstance(value, list):
        return [found for item in value for found in tensors(item)]
    if not isinstance(value, dict) or "pointer" in value:
        return []
    return [value.get("address_of", value)]


def wanted(value: dict[str, Any], directory: Path) -> Wanted:
    data = None if value["output"] else np.fromfile(directory / value["file"], np.uint8)
    return Wanted(value["file"], value["dtype"], tuple(value["shape"]), tuple(value["strides"]), data, value["output"])


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
