"""What can go wrong between this process, its trainer or agent, and the store.

A caller's own mistake is a ValueError or KeyError.
"""

from __future__ import annotations


class Error(Exception):
    """Something failed; the text says what, on what, and what to do."""


class Refused(Error):
    """The trainer or agent has refused a request.

    Attributes:
        request: name of the request, such as ``save``.
        status: as of HTTP; docs/reference/protocol.md lists them.
    """

    def __init__(self, request: str, status: int, message: str):
        super().__init__(request, status, message)
        self.request, self.status, self.message = request, status, message

    def __str__(self) -> str:
        return f"{self.request}: {self.message}"


class StoreFull(Refused):
    """A disk or shared memory is full, or a bound on it is reached (507)."""


class DeadlinePassed(Refused):
    """Other ranks or a disk took longer than they may (504); the text names whom."""


class Conflict(Refused):
    """It cannot be done any more, or the ranks do not agree (409)."""


_BY_STATUS = {409: Conflict, 504: DeadlinePassed, 507: StoreFull}


def refused(request: str, status: int, message: str) -> Refused:
    """The exception of a reply with a status other than 200."""
    return _BY_STATUS.get(status, Refused)(request, status, message)


class Unreachable(Error):
    """Nobody answers on the socket: the trainer or agent has ended.

    What the call was about to do may or may not have been done. After a trainer's
    end nothing more can be; after an agent's, the next call starts another one.
    """


class NoStore(Error):
    """There is neither a trainer nor a store to start an agent for."""


class NoAgent(Error):
    """The program ``ckptstore`` is not there, or no agent can be started with it."""


class TooOld(Error):
    """This package and the program ``ckptstore`` or ``trainer`` have no protocol in common."""


class SaveAborted(Error):
    """A checkpoint will never exist."""

    def __init__(self, checkpoint: str, reason: str):
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint} was aborted: {self.reason}"


class SaveSkipped(Error):
    """A save was left out, on all ranks, because earlier ones hold all slots."""

    def __init__(self, checkpoint: str, reason: str):
        super().__init__(checkpoint, reason)
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        return f"save of {self.checkpoint} skipped: {self.reason}"


class StopRequested(Error):
    """The training is to end: raised by the reporter of a training function.

    Attributes:
        why: ``preempt``, save now and end; ``stop``, end: what is not saved is lost.
    """

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"a stop was requested ({self.why}): clean up, and return"


class AlreadyDone(Error):
    """A report after one that said ``done``."""
