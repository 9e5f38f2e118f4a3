"""Requests of a filesystem and its files to the server of the store."""

from __future__ import annotations

from typing import Any

from ._connect import deciding, services
from .errors import Refused


class Requests:
    """Sends the requests of one :class:`.filesystem.FileSystem`.

    Attributes:
        store: directory of the store; None for that of the environment.
    """

    def __init__(self, store: str | None):
        self.store = store

    def __call__(self, request: str, /, commits: str | None = None, **fields: Any) -> Any:
        """Send a request and return the reply.

        commits is the path that the request may commit as a checkpoint. The checkpoint
        belongs to the attempt of this process.

        Raises:
            FileNotFoundError: there is no such file.
            Error: any other failure.
        """
        try:
            wire = services(self.store) if commits is None else deciding(self.store, commits.split("/")[0])
            return wire.call("store/fs/" + request, **fields)
        except Refused as refused:
            if refused.status == 404:
                raise FileNotFoundError(refused.message) from refused
            raise
