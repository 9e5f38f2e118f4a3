"""Requests to a trainer or agent: HTTP/1.1 over a unix socket.

A :class:`Wire` belongs to one socket and token. Each thread has a connection of
its own, so that a request that blocks holds up nobody else's; a process that was
forked opens new ones.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from typing import Any, Mapping

from .errors import Refused, Unreachable

# Requests that wait for other ranks or for disks have deadlines on the server's
# side, which names who is missing; this one is for a server that is stuck.
DEADLINE = 3600.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float):
        super().__init__("ckptstore", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Wire:
    """A way to one socket, for all threads of this process."""

    def __init__(self, path: str, token: str):
        self.path, self.token = path, token
        self._local = threading.local()

    def _connection(self) -> tuple[_Connection, bool]:
        """This thread's connection, and whether it was used before."""
        have = getattr(self._local, "connection", None)
        if have is not None and self._local.pid == os.getpid():
            return have, True
        self._local.connection, self._local.pid = _Connection(self.path, DEADLINE), os.getpid()
        return self._local.connection, False

    def close(self) -> None:
        """Close this thread's connection; the next request opens another."""
        have = getattr(self._local, "connection", None)
        if have is not None:
            have.close()
            self._local.connection = None

    def post(self, name: str, body: Any = b"", headers: Mapping[str, str] = {}) -> bytes:
        """Send one request and return the body of its reply.

        body is bytes or a buffer. Raises Refused for a status other than 200, and
        Unreachable when there is no reply.
        """
        head = {"Authorization": "Bearer " + self.token, **headers}
        connection, used = self._connection()
        try:
            try:
                connection.request("POST", "/v1/" + name, body, head)
            except (BrokenPipeError, ConnectionResetError):
                if not used:
                    raise
                # The server has closed an idle connection: it has not seen this.
                self.close()
                connection, _ = self._connection()
                connection.request("POST", "/v1/" + name, body, head)
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"{name}: no answer on {self.path}: {error!r}; the trainer or agent has ended") from error
        except BaseException:
            self.close()  # what is left of the reply would be taken for the next one
            raise
        if reply.status != 200:
            try:
                message = json.loads(data)["error"]
            except (ValueError, KeyError, TypeError):
                message = data.decode(errors="replace").strip() or reply.reason
            raise Refused(name, reply.status, message)
        return data

    def call(self, name: str, /, **request: Any) -> Any:
        """Send one request as JSON; parameters that are None are left out."""
        body = json.dumps({k: v for k, v in request.items() if v is not None}).encode()
        return json.loads(self.post(name, body, {"Content-Type": "application/json"}))
