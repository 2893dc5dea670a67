"""The simulating process: ``tunekit.simulate.worker`` in a new interpreter, which its parent may kill at any time.

It reads a job a line from stdin and writes to its reply pipe (see tunekit.child). Whatever a spec's own functions
print goes to stderr, never into the pipe. It never imports the compiler: launches are recorded in place of the
runtime library that the compiler loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from tunekit.child import die_with_parent
from tunekit.errors import SpecError, TunekitError, UserError, words_of

# Processes are the parallelism, and numpy's BLAS would only fight them. The oracle's threads are done by then.
ONE_THREAD = "OPENBLAS_NUM_THREADS"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tunekit.simulate.worker")
    parser.add_argument("--reply", type=int, required=True, help="file descriptor for replies")
    parser.add_argument("--life", type=int, required=True, help="file descriptor that closes with the parent")
    arguments = parser.parse_args()
    die_with_parent(arguments.life)
    os.dup2(2, 1)
    os.environ.setdefault(ONE_THREAD, "1")
    serve(arguments.reply)


def serve(pipe: int) -> None:
    """Answers jobs until stdin ends."""
    _send(pipe, {"ready": os.getpid()})
    for line in sys.stdin:
        _send(pipe, {"reply": answer(json.loads(line), pipe)})


def answer(request: Mapping[str, Any], pipe: int) -> dict[str, Any]:
    """``{"simulation": ...}``; or ``{"error": {"message", "field", "where", "user"}}``."""
    from tunekit.simulate.job import SimulationJob
    from tunekit.simulate.problem import simulate_job

    job = SimulationJob.from_payload(request["job"])

    def phase(name: str, doing: str) -> None:
        _send(pipe, {"phase": name, "variant": job.variant.id, "doing": doing})

    try:
        return {"simulation": simulate_job(job, phase).to_payload()}
    except SpecError as error:
        return {"error": {"message": error.message, "field": error.field, "where": error.where, "user": True}}
    except TunekitError as error:
        said = {"message": str(error), "field": None, "where": None, "user": isinstance(error, UserError)}
        return {"error": said}
    except (Exception, SystemExit) as error:
        # The child's edge: a spec's inputs and reference may raise anything, or exit.
        return {"error": {"message": words_of(error), "field": "reference", "where": None, "user": True}}


def _send(pipe: int, message: Mapping[str, Any]) -> None:
    data = (json.dumps(message, allow_nan=False) + "\n").encode()
    while data:
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    main()
