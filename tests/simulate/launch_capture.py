"""Run in a process of its own: records the launches that it is asked for.

The jobs come as JSON by name; names that end in "beside the real runtime" have that loaded first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tunekit.arch import parse_arch
from tunekit.backends.load import preload_runtime
from tunekit.errors import TunekitError
from tunekit.simulate.launch.arguments import Buffers, Wanted, arguments_of
from tunekit.simulate.launch.capture import capture, capture_object
from tunekit.simulate.machine.symbols import parameter_offsets
from tunekit.simulate.ptx.read import read_module
from tunekit.spec import load_spec


def answer(job):
    """The launches and buffers of a job's call, or its error."""
    facts = {}
    if "spec" in job:
        spec = load_spec(job["spec"])
        arguments = arguments_of(spec, spec.problem(job["problem"]), seed=1)
        buffers, call = arguments.buffers, arguments.call
        drawn = {name: bool((view == arguments.drawn[name]).all()) for name, view in arguments.inputs().items()}
        poisoned = {name: bool(view.isnan().all()) for name, view in arguments.outputs().items()}
        facts = {"drawn": drawn, "poisoned": poisoned}
    else:
        wanted = []
        for name, dtype, shape in job["tensors"]:
            data = None if name == "y" else np.zeros(shape, dtype)
            wanted.append(Wanted(name, dtype, tuple(shape), data=data))
        buffers = Buffers(wanted)
        call = (*buffers.buffers, *job["numbers"])
    module = read_module(job["ptx"] if job["ptx"].startswith(".") else Path(job["ptx"]).read_text())
    record = capture_object if job["library"].endswith(".o") else capture
    try:
        launches = record(Path(job["library"]), job["symbol"], call, parse_arch(job["arch"]), module)
    except TunekitError as error:
        return {"error": type(error).__name__, "words": str(error)}
    return {
        **facts,
        "addresses": {buffer.name: buffer.address for buffer in buffers.buffers},
        "launches": [
            {
                "kernel": launch.kernel,
                "grid": launch.grid,
                "block": launch.block,
                "cluster": launch.cluster,
                "shared_bytes": launch.shared_bytes,
                "attributes": {k: v.hex() if isinstance(v, bytes) else v for k, v in launch.attributes.items()},
                "parameters": [parameter.hex() for parameter in launch.parameters],
                "offsets": parameter_offsets(module.kernels[launch.kernel]),
            }
            for launch in launches
        ],
    }


if __name__ == "__main__":
    jobs = json.loads(sys.argv[1])
    if any(name.endswith("beside the real runtime") for name in jobs):
        preload_runtime()
    print(json.dumps({name: answer(job) for name, job in jobs.items()}))
