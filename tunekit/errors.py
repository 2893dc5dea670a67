"""The errors that tunekit raises.

Only a caller's mistake raises. What goes wrong inside a compile, a check or a
measurement is data: an :class:`~tunekit.model.Outcome` with a status.
"""

from __future__ import annotations


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
