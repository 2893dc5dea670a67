"""The parent's side of a simulation: asks a process of its own, and outlives whatever becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from tunekit.child import Child, Stopped
from tunekit.errors import SpecError, TunekitError, UserError
from tunekit.model import Values
from tunekit.simulate.job import Simulation, SimulationJob
from tunekit.trials import Status

PREPARE_LIMIT_S = 600.0
# A simulation ends by itself at its time limit; what is over it by this much hangs and is killed.
GRACE_S = 60.0
NO_LIMIT_S = 7 * 24 * 3600.0


class Simulator:
    """Simulates jobs one after another, in a child process that starts with the first and is replaced as needed."""

    def __init__(self, *, prepare_limit_s: float = PREPARE_LIMIT_S) -> None:
        self._limits_s = {"prepare": prepare_limit_s, "check": prepare_limit_s, "run": NO_LIMIT_S}
        self._on_phase: Callable[[str, str], None] | None = None
        self._child: Child | None = None

    def simulate(self, job: SimulationJob, on_phase: Callable[[str, str], None] | None = None) -> Simulation:
        """The simulation of a job, also where the process died or had to be killed.

        on_phase: hears "prepare", "run" or "check", and what is being done, in words.

        Raises:
            UserError: the request, the spec or its reference is at fault.
            TunekitError: the artifact can't be loaded, or the simulator itself failed.
        """
        self._limits_s["run"] = NO_LIMIT_S if job.time_limit_s is None else job.time_limit_s + GRACE_S
        self._on_phase = on_phase
        try:
            reply = self._started().ask({"job": job.to_payload()})
        except Stopped as stopped:
            self.close()
            status = Status.RUN_TIMEOUT if stopped.limit_s is not None else Status.DEVICE_FAULT
            seconds = Values({stopped.at.phase: stopped.seconds})
            return Simulation(None, status=status, failure=str(stopped), seconds=seconds)
        except BaseException:  # Ctrl-C: the reply that is still to come must not answer another job
            self.close()
            raise
        if "error" in reply:
            raise _error(reply["error"])
        return Simulation.from_payload(reply["simulation"])

    def _started(self) -> Child:
        if self._child is None:
            child = Child("tunekit.simulate.worker", (), self._limits_s, "the simulating process", self._tell)
            try:
                child.start()
            except BaseException:  # whatever ends the start, no child stays behind
                child.close()
                raise
            self._child = child
        return self._child

    def _tell(self, phase: str, doing: str) -> None:
        if self._on_phase is not None:
            self._on_phase(phase, doing)

    def close(self) -> None:
        """Ends the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _error(said: Mapping[str, Any]) -> TunekitError:
    if said["field"] or said["where"]:
        return SpecError(said["message"], field=said["field"], where=said["where"])
    return UserError(said["message"]) if said["user"] else TunekitError(said["message"])
