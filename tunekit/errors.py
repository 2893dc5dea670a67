"""The errors that tunekit raises.

Only a caller's mistake raises. What goes wrong inside a compile, a check or a
measurement is data: an :class:`~tunekit.trials.Outcome` with a status.
"""

from __future__ import annotations

from collections.abc import Iterable

NO_MESSAGE = "(no message)"


def words_of(error: BaseException) -> str:
    """``Kind: message``, for anything that foreign code raises, also where its message can't be had."""
    try:
        words = str(error).strip()
    except Exception as other:  # a user's own __str__ may raise anything
        words = f"(its message fails with {type(other).__name__})"
    return f"{type(error).__name__}: {words or NO_MESSAGE}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` where one of the known names is near, else nothing."""
    from difflib import get_close_matches  # here: it takes 2 ms, and only a mistake needs it

    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


class TunekitError(Exception):
    """Base of everything that tunekit raises."""


class UserError(TunekitError):
    """The caller asked for something that can't be: one line, exit status 2."""


class SpecError(UserError):
    """A kernel spec is malformed. ``str()`` names file, line and field where known."""

    def __init__(self, message: str, *, field: str | None = None, where: str | None = None) -> None:
        self.message = message
        self.field = field
        self.where = where
        parts = [where, f"field '{field}'" if field else None, message]
        super().__init__(": ".join(part for part in parts if part))


class DatabaseError(UserError):
    """A database or artifact store that can't be used as asked."""


class NoKernelError(TunekitError):
    """No kernel can serve a problem; the message names the shape and the constraints."""


class DeviceFaultError(TunekitError):
    """A kernel, or one before it, left this process's CUDA context dead: nothing on the GPU works any more.

    No fallback is tried after it: the only way out is a new process. ``str()`` names the kernel, its variant,
    the device and CUDA's words. What is too late to tell is whose fault it was: CUDA reports a fault at any later
    call, so the kernel named is the one that saw it.
    """
