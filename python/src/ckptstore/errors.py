"""Exceptions of the package.

All derive from :class:`Error`. Wrong arguments raise ValueError, TypeError or KeyError.
"""

from __future__ import annotations

import re


class Error(Exception):
    """Base class. The text names the operation, its subject, the cause and the next step."""


class Refused(Error):
    """The trainer or agent refused a request.

    Attributes:
        request: name of the request, such as ``save``.
        status: HTTP status; docs/reference/protocol.md lists them.
        message: the server's text.
    """

    def __init__(self, request: str, status: int, message: str):
        super().__init__(request, status, message)
        self.request, self.status, self.message = request, status, message

    def __str__(self) -> str:
        return f"{self.request}: {self.message}"


class StoreFull(Refused):
    """A disk or shared memory is full, or has reached its configured limit (507)."""


class DeadlinePassed(Refused):
    """Other ranks or a disk exceeded a deadline (504). The text names them."""


class Conflict(Refused):
    """The operation is no longer possible, or the ranks disagree (409)."""


_BY_STATUS = {409: Conflict, 504: DeadlinePassed, 507: StoreFull}


def refused(request: str, status: int, message: str) -> Refused:
    """Return the exception for a reply whose status is not 200."""
    return _BY_STATUS.get(status, Refused)(request, status, message)


class Unreachable(Error):
    """The trainer or agent has ended: its socket does not answer.

    The request may or may not have taken effect. If the trainer has ended, every later
    call fails too; if an agent has ended, the next call starts another one.
    """


class NoStore(Error):
    """This process has no trainer, and no store to start an agent for."""


class NoAgent(Error):
    """The program ``ckptstore`` is missing, or cannot start an agent."""


class TooOld(Error):
    """This package and the program ``ckptstore`` or ``trainer`` share no protocol version."""


class SaveAborted(Error):
    """A save failed: its checkpoint will never exist.

    Attributes:
        checkpoint: its full ID, or its name if it has no ID yet.
        reason: why the save failed.
    """

    def __init__(self, checkpoint: str, reason: str):
        if named := re.match(r"checkpoint (\S+) was aborted: ", reason):  # a refusal, with the full ID
            checkpoint, reason = named[1], reason[named.end() :]
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} was aborted: {self.reason}"


class SaveSkipped(Error):
    """A save was skipped on all ranks because earlier saves hold all staging slots.

    Attributes:
        checkpoint: the name or ID of the skipped checkpoint.
        reason: why it was skipped.
    """

    def __init__(self, checkpoint: str, reason: str):
        if named := re.match(r"checkpoint (\S+) was aborted: ", reason):  # a refusal, with the full ID
            checkpoint, reason = named[1], reason[named.end() :]
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"save of {self.checkpoint} skipped: {self.reason}"


class StopRequested(Error):
    """The trainer asked the training to end. A training function's reporter raises it.

    Attributes:
        why: ``preempt``: save now and end; ``stop``: end, unsaved state is lost.
    """

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"a stop was requested ({self.why}): clean up, and return"


class AlreadyDone(Error):
    """This rank reported again after a report with ``done``."""
