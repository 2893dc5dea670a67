"""The measuring child's beginning: ``tunekit.measure.start`` in a new interpreter.

It ties its life to the parent's before it imports anything heavy: torch takes seconds,
and a parent killed meanwhile must not leave it behind.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal


def die_with_parent(life: int) -> None:
    """Have the kernel kill this process's group when the parent's end of the pipe `life` closes.

    It needs no thread and no Python, so it also ends a worker that is stuck in native
    code. (PR_SET_PDEATHSIG would follow the parent's *thread* that started us.)
    """
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined,unused-ignore]
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it had closed before the line above
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tunekit.measure.start")
    parser.add_argument("--device", required=True, help="CUDA device index, or host")
    parser.add_argument("--run-limit-s", type=float, required=True)
    parser.add_argument("--reply", type=int, required=True, help="file descriptor for replies")
    parser.add_argument("--life", type=int, required=True, help="file descriptor that closes with the parent")
    arguments = parser.parse_args()
    die_with_parent(arguments.life)
    from tunekit.measure.worker import serve

    serve(arguments.device, arguments.run_limit_s, arguments.reply)


if __name__ == "__main__":
    main()
