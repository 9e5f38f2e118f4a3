"""Sends requests to a trainer or agent: HTTP/1.1 over a unix socket.

A :class:`Wire` belongs to one socket and token. Each thread has its own connection, so
that a blocking request does not delay other threads. A forked process opens new ones.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import threading
from typing import Any, Callable, Mapping

from .errors import Unreachable, refused

# The server has its own deadlines for requests that wait for ranks or disks, and names
# what is missing. This deadline is for a server that hangs.
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
    """A client of one socket, for all threads of this process.

    Attributes:
        lost: a request had no reply: the server has ended.
    """

    def __init__(self, path: str, token: str, revive: Callable[[], tuple[str, str]] | None = None):
        """Create a client.

        revive restarts a server that has exited on its own, and returns its path and
        token. It is only called if no request was sent.
        """
        self.path, self.token, self.lost = path, token, False
        self._revive = revive
        self._local = threading.local()

    def __reduce__(self) -> Any:
        raise TypeError("a connection belongs to its process: pickle nothing that holds one")

    def _connection(self) -> tuple[_Connection, bool]:
        """Return this thread's connection, and whether it was used before."""
        have: _Connection | None = getattr(self._local, "connection", None)
        if have is not None and self._local.pid == os.getpid() and self._local.path == self.path:
            return have, True
        fresh = _Connection(self.path, DEADLINE)
        self._local.connection, self._local.pid, self._local.path = fresh, os.getpid(), self.path
        return fresh, False

    def close(self) -> None:
        """Close this thread's connection; the next request opens another."""
        have: _Connection | None = getattr(self._local, "connection", None)
        if have is not None:
            have.close()
            self._local.connection = None

    def _send(self, name: str, body: Any, headers: Mapping[str, str]) -> _Connection:
        """Send a request. If it raises, the server has not executed the request."""
        stale, revive = True, self._revive
        while True:
            connection, used = self._connection()
            if connection.sock is None:
                used = False
                try:
                    connection.connect()
                except (FileNotFoundError, ConnectionRefusedError):
                    if revive is None:
                        raise
                    (self.path, self.token), revive = revive(), None
                    continue
            head = {"Authorization": "Bearer " + self.token, **headers}
            try:
                connection.request("POST", "/v1/" + name, body, head)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                    raise
                if used and stale:  # the server had closed an idle connection
                    stale = False
                    self.close()
                    continue
                if revive is not None:  # the server was exiting
                    self.close()
                    (self.path, self.token), revive = revive(), None
                    continue
                # The server may have refused the request before reading all of it.
            return connection

    def post(self, name: str, body: Any = b"", headers: Mapping[str, str] = {}, timeout: float | None = None) -> bytes:
        """Send one request and return the body of its reply.

        body is bytes or a buffer.

        Raises:
            Refused: the status is not 200.
            Unreachable: there is no reply.
            TimeoutError: timeout seconds have passed.
        """
        token = self.token
        try:
            connection = self._send(name, body, headers)
            if connection.sock is not None:
                connection.sock.settimeout(DEADLINE if timeout is None else max(timeout, 0.001))
            reply = connection.getresponse()
            data = reply.read()
            if timeout is not None and connection.sock is not None:
                connection.sock.settimeout(DEADLINE)
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"{name}: no answer within {DEADLINE if timeout is None else timeout:g} s on {self.path}") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            self.lost = True
            raise Unreachable(f"{name}: no answer on {self.path}: {error!r}; the trainer or agent has ended") from error
        except BaseException:
            self.close()  # the next request would read the rest of this reply
            raise
        if reply.status == 401 and self._revive is not None and token == self.token:
            # Another agent, with another token, serves this path now.
            path, fresh = self._revive()
            if fresh != token:
                self.path, self.token = path, fresh
                return self.post(name, body, headers, timeout)
        if reply.status != 200:
            try:
                message = json.loads(data)["error"]
            except (ValueError, KeyError, TypeError):
                message = data.decode(errors="replace").strip() or reply.reason
            raise refused(name, reply.status, message)
        return data

    def call(self, name: str, /, **request: Any) -> Any:
        """Send one request as JSON, without parameters that are None."""
        return self.call_within(None, name, **request)

    def call_within(self, timeout: float | None, name: str, /, **request: Any) -> Any:
        """Do :meth:`call`. Raise TimeoutError after timeout seconds."""
        body = json.dumps({k: v for k, v in request.items() if v is not None}).encode()
        return json.loads(self.post(name, body, {"Content-Type": "application/json"}, timeout))
