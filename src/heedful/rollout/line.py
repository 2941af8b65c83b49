"""The line to a server, which another thread can break off."""

from __future__ import annotations

import socket
import threading
import urllib.request
from contextlib import suppress
from typing import Any, final


@final
class Line(threading.Event):
    """Set when nobody waits for the answer any more: what is on the line ends at once, and whoever waits on the event
    wakes up.

    A thread that is still in a request when the process ends would be torn out of it, and CPython 3.11 with torch then
    hangs in its last garbage collection one time in ten.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []
        self._opener: urllib.request.OpenerDirector | None = None

    def open(self, request: urllib.request.Request, *, timeout: float) -> Any:
        """As ``urllib.request.urlopen``; an OSError or http.client.HTTPException where the line was broken off."""
        self._sockets.clear()
        if self._opener is None:  # here: it may read the certificates of the system
            self._opener = urllib.request.build_opener(_handler("http", self), _handler("https", self))
        return self._opener.open(request, timeout=timeout)

    def set(self) -> None:
        """Break off."""
        super().set()
        for connected in list(self._sockets):
            _shut(connected)

    def take(self, connected: socket.socket) -> None:
        """A connection that belongs to this line."""
        self._sockets.append(connected)
        if self.is_set():
            _shut(connected)


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        connected.shutdown(socket.SHUT_RDWR)


def _handler(scheme: str, line: Line) -> urllib.request.BaseHandler:
    """urllib's own handler, whose connections tell the line of their sockets."""
    base: Any = {"http": urllib.request.HTTPHandler, "https": urllib.request.HTTPSHandler}[scheme]

    class Handler(base):  # type: ignore[misc]
        def do_open(self, connection: Any, request: Any, **options: Any) -> Any:
            class Connection(connection):  # type: ignore[misc]
                def connect(self) -> None:
                    super().connect()
                    line.take(self.sock)

            return super().do_open(Connection, request, **options)

    handler: urllib.request.BaseHandler = Handler()
    return handler
