"""A child process that answers requests: starting it, asking, killing it at its limits; and tying its life to ours."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import TunekitError, UserError
from tunekit.launch import module_command

START_LIMIT_S = 300.0
REAP_LIMIT_S = 60.0
STDERR_BYTES = 2000


@dataclass(frozen=True)
class Progress:
    """Where a child was: its phase, the variant's id and what it was doing, in words."""

    phase: str = "start"
    variant: str = ""
    doing: str = ""

    def __str__(self) -> str:
        return f"{self.phase} ({self.doing})" if self.doing else self.phase


class Stopped(Exception):
    """The child is gone before it answered, `seconds` into its step. `limit_s`: it was killed at that limit."""

    def __init__(self, reason: str, at: Progress, seconds: float, limit_s: float | None = None) -> None:
        super().__init__(reason)
        self.at, self.seconds, self.limit_s = at, seconds, limit_s


class Child:
    """One process that runs `module`; `what` names it in messages ("the measuring process").

    `limits_s` gives a phase's limit in seconds; each phase message starts its own. The module gets
    `arguments` and two file descriptors, ``--reply`` for its messages and ``--life`` for
    `die_with_parent`. It reads requests from stdin, a JSON object a line, and writes messages: once
    ``{"ready": ...}`` or ``{"error": {"message": ...}}``; then for each request any number of
    ``{"phase", "variant", "doing"}`` and one ``{"reply": ...}``. `on_phase` hears phase and doing.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        limits_s: Mapping[str, float],
        what: str,
        on_phase: Callable[[str, str], None] | None = None,
    ) -> None:
        self._limits_s = limits_s
        self._what = what
        self._on_phase = on_phase
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the child; see close()
        self._buffer = b""
        self.at = Progress()
        reply, child_reply = os.pipe()
        child_life, self._life = os.pipe()
        command = module_command(module, *arguments, "--reply", str(child_reply), "--life", str(child_life))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=(child_reply, child_life),
                start_new_session=True,
                env=_environment(),
            )
        except OSError:
            os.close(self._life)
            os.close(reply)
            raise
        finally:
            os.close(child_reply)
            os.close(child_life)
        self._reply = reply
        self._selector = selectors.DefaultSelector()
        self._selector.register(reply, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Wait until it is ready.

        Raises:
            UserError: it refused to start, in its own words.
            TunekitError: the process did not come up; with the end of its stderr.
        """
        try:
            message = self._next(START_LIMIT_S)
        except Stopped as stopped:
            raise TunekitError(f"{self._what} did not start: {stopped}") from stopped
        if "error" in message:
            self.kill()
            raise UserError(message["error"]["message"])

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to `request`.

        Raises:
            Stopped: it died, or was killed at a limit.
        """
        self.at = Progress("prepare")
        if self._process.stdin is None:
            raise TunekitError(f"{self._what} has no stdin")
        with contextlib.suppress(BrokenPipeError):  # reading its replies says how it died
            self._process.stdin.write((json.dumps(request, allow_nan=False) + "\n").encode())
            self._process.stdin.flush()
        while True:
            message = self._next(self._limits_s[self.at.phase])
            if "reply" in message:
                reply: dict[str, Any] = message["reply"]
                return reply
            self.at = Progress(message["phase"], message["variant"], message["doing"])
            if self._on_phase is not None:
                self._on_phase(self.at.phase, self.at.doing)

    def _next(self, limit_s: float) -> dict[str, Any]:
        """The next message, within `limit_s`."""
        begin = time.monotonic()
        deadline = begin + limit_s
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                seconds = time.monotonic() - begin
                self.kill()
                reason = f"took over {limit_s:g} s in {self.at}; killed"
                raise Stopped(reason, self.at, seconds, limit_s)
            data = os.read(self._reply, 65536)
            if not data:
                seconds = time.monotonic() - begin
                raise Stopped(self._obituary(), self.at, seconds)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _obituary(self) -> str:
        """How the process died, with the end of what it wrote to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_LIMIT_S)
        code = self._process.returncode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"signal {-code}, {signal.Signals(-code).name}"
        words = self.stderr_tail()
        self.kill()
        return f"{self._what} died ({how}) in {self.at}" + (f": {words}" if words else "")

    def stderr_tail(self) -> str:
        """The end of what the child wrote, at most 2000 bytes."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """SIGKILL the child's whole process group and reap it; safe to call again."""
        if self._life < 0:
            return
        if self._process.returncode is None:  # not reaped, so its group's number can't be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may be slow to tear a context down
                self._process.wait(REAP_LIMIT_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._selector.close()
        os.close(self._reply)
        os.close(self._life)
        self._life = -1

    def close(self) -> None:
        """End the child and drop what it wrote."""
        self.kill()
        self._stderr.close()


def _environment() -> dict[str, str]:
    """This process's environment, with tunekit importable where it runs from a checkout."""
    root = str(Path(__file__).resolve().parent.parent)
    if "site-packages" in root:
        return dict(os.environ)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


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
