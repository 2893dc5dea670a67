"""JSON messages over a socket or a pipe, one a line, without ever blocking on the reader."""

from __future__ import annotations

import json
import os
from typing import Any

CHUNK = 1 << 16


class Reader:
    """Puts lines together from a file descriptor. `closed` once the other side is."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.closed = False

    def messages(self) -> list[dict[str, Any]]:
        """What has arrived since the last call; on a blocking descriptor, waits for some of it."""
        while not self.closed:
            try:
                chunk = os.read(self._fd, CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            self.closed = not chunk
            self._rest += chunk
            if os.get_blocking(self._fd):
                break
        *lines, self._rest = self._rest.split(b"\n")
        return [message for line in lines if (message := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A message, or None for what is none: a killed writer leaves half a line, a stray one NaN."""
    try:
        message = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class Writer:
    """Writes messages to a non-blocking file descriptor, keeping what does not fit for later."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending = b""
        self.closed = False

    def send(self, message: dict[str, Any]) -> None:
        self._pending += encoded(message)
        self.flush()

    def flush(self) -> None:
        while self._pending and not self.closed:
            try:
                written = os.write(self._fd, self._pending)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self.closed = True
                return
            self._pending = self._pending[written:]

    @property
    def waiting(self) -> bool:
        return bool(self._pending) and not self.closed


def encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
