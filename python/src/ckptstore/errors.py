"""What can go wrong. Every exception of this package is an :class:`Error`."""

from __future__ import annotations


class Error(Exception):
    """Something failed; the text says what, on what, and what to do."""


class Refused(Error):
    """The trainer or agent has refused a request.

    Attributes:
        request: name of the request, such as ``save``.
        status: as of HTTP; docs/protocol.md lists them.
    """

    def __init__(self, request: str, status: int, message: str):
        super().__init__(request, status, message)
        self.request, self.status, self.message = request, status, message

    def __str__(self) -> str:
        return f"{self.request}: {self.message}"


class Unreachable(Error):
    """Nobody answers on the socket: the trainer or agent has ended."""


class NoStore(Error):
    """There is neither a trainer nor a store to start an agent for."""


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
