"""Kernels on a GPU in child processes: after a kernel's fault no call of its process works, whatever it resets.

As a program, `python gpu_jobs.py jobs results first`: runs the pickled jobs from number `first` on and appends the
outcome of each to `results`. It ends after the first that fails.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunekit.simulate.tma.descriptor import encode
from tunekit.simulate.tma.tensor_map import TensorMap

ROOT = Path(__file__).resolve().parent.parent.parent
HANGS_S = 60  # one process
UNAVAILABLE = 77  # the child's exit status where there is no GPU

# One launch of one warp: (PTX text, buffers by name, parameters). A parameter is its bytes, a buffer's name for its
# address, or (tensor map, buffer's name) with an address that counts from the start of the buffer.
Parameter = bytes | str | tuple[TensorMap, str]
Job = tuple[str, dict[str, np.ndarray[Any, Any]], list[Parameter]]


@dataclass(frozen=True)
class Outcome:
    """What one job left: the buffers, or the driver's error."""

    buffers: dict[str, np.ndarray[Any, Any]]
    error: str = ""


class NoGpu(Exception):
    """There is no GPU that can run the jobs."""


def bytes_of(parameter: Parameter, addresses: dict[str, int]) -> bytes:
    if isinstance(parameter, bytes):
        return parameter
    if isinstance(parameter, str):
        return addresses[parameter].to_bytes(8, "little")
    tensor, buffer = parameter
    return encode(dataclasses.replace(tensor, address=tensor.address + addresses[buffer]))


def run_all(jobs: Sequence[Job], most_failures: int) -> list[Outcome]:
    """The outcome of each job, in order; fewer if more than `most_failures` of them fail.

    Raises:
        NoGpu: with the reason.
    """
    outcomes: list[Outcome] = []
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        given, results = Path(directory) / "jobs", Path(directory) / "results"
        given.write_bytes(pickle.dumps(list(jobs)))
        while len(outcomes) < len(jobs) and failures <= most_failures:
            results.write_bytes(b"")
            command = [sys.executable, __file__, str(given), str(results), str(len(outcomes))]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            try:
                child = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False
                )
                status, said = child.returncode, child.stdout[-2000:] + child.stderr[-2000:]
            except subprocess.TimeoutExpired:
                status, said = -1, f"no end within {HANGS_S} s"
            if status == UNAVAILABLE:
                raise NoGpu(said)
            new = _outcomes(results)
            outcomes += new
            if status and not (new and new[-1].error):  # it died, or had to be ended, in the job after the last
                outcomes.append(Outcome({}, f"exit status {status}: {said}"))
            failures += bool(status)
    return outcomes


def _outcomes(path: Path) -> list[Outcome]:
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append(Outcome(*pickle.load(file)))
            except (EOFError, pickle.UnpicklingError):
                return found


class DriverError(Exception):
    """A call of the driver failed."""


class Gpu:
    """Runs jobs by the driver API, as the simulator's fixture runs kernels."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoGpu(f"needs cuda-python: {error}") from error
        self.driver: Any = driver
        try:
            self.ok(driver.cuInit(0))
        except (DriverError, RuntimeError) as missing:  # RuntimeError: no driver library
            raise NoGpu(f"needs a CUDA GPU: {missing}") from missing
        device = self.ok(driver.cuDeviceGet(0))
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        major = self.ok(driver.cuDeviceGetAttribute(attribute, device))
        if major < 9:
            raise NoGpu(f"needs compute capability 9 or higher for tensor copies, not {major}")
        self.ok(driver.cuCtxSetCurrent(self.ok(driver.cuDevicePrimaryCtxRetain(device))))
        self._kernels: dict[str, Any] = {}

    def ok(self, returned: tuple[Any, ...]) -> Any:
        error, *values = returned
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise DriverError(error.name)
        return values[0] if values else None

    def run(self, job: Job) -> dict[str, np.ndarray[Any, Any]]:
        text, buffers, parameters = job
        d = self.driver
        if text not in self._kernels:
            module = self.ok(d.cuModuleLoadData(text.encode() + b"\0"))
            self._kernels[text] = self.ok(d.cuModuleGetFunction(module, b"kernel"))
        places = {name: self.ok(d.cuMemAlloc(array.nbytes)) for name, array in buffers.items()}
        for name, array in buffers.items():
            self.ok(d.cuMemcpyHtoD(places[name], array.ctypes.data, array.nbytes))
        addresses = {name: int(place) for name, place in places.items()}
        values = [bytes_of(parameter, addresses) for parameter in parameters]
        room = [ctypes.create_string_buffer(len(value) + 64) for value in values]
        pointers = (ctypes.c_void_p * len(values))()
        for n, (value, place) in enumerate(zip(values, room, strict=True)):
            pointers[n] = -(-ctypes.addressof(place) // 64) * 64
            ctypes.memmove(pointers[n], value, len(value))
        self.ok(d.cuLaunchKernel(self._kernels[text], 1, 1, 1, 32, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
        self.ok(d.cuCtxSynchronize())
        after = {}
        for name, array in buffers.items():
            after[name] = np.empty_like(array)
            self.ok(d.cuMemcpyDtoH(after[name].ctypes.data, places[name], array.nbytes))
            self.ok(d.cuMemFree(places[name]))
        return after


def main(given: str, results: str, first: str) -> int:
    jobs: list[Job] = pickle.loads(Path(given).read_bytes())
    try:
        gpu = Gpu()
    except NoGpu as error:
        print(error)
        return UNAVAILABLE
    with Path(results).open("ab") as file:
        for job in jobs[int(first) :]:
            try:
                outcome = (gpu.run(job), "")
            except DriverError as error:
                outcome = ({}, str(error))
            pickle.dump(outcome, file)
            file.flush()
            if outcome[1]:
                return 1
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a broken context's destructors have nothing to say
