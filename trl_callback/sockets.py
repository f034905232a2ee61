"""A transport whose connections can be cut from another thread: what a server computes for nobody, it then stops."""

from __future__ import annotations

import socket
import weakref
from contextlib import suppress
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection


class CuttableTransport(HTTPAdapter):
    """Mounted on a requests session; once ``cut`` its requests, also those that wait for an answer, fail."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        self.is_cut = False
        super().__init__()

    def cut(self) -> None:
        """Break every connection, and each that is made from now on."""
        self.is_cut = True
        for connection in list(self._open):
            _break(connection)

    def made(self, connection: HTTPConnection) -> None:
        """A connection stands."""
        self._open.add(connection)
        if self.is_cut:
            _break(connection)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """As requests does, with connections that are known here."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools()

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> PoolManager:
        """Likewise through a proxy."""
        manager: PoolManager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = self._pools()
        return manager

    def _pools(self) -> dict[str, type[HTTPConnectionPool]]:
        transport = self

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                transport.made(self)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                transport.made(self)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        return {"http": PlainPool, "https": SecurePool}


def _break(connection: HTTPConnection) -> None:
    with suppress(OSError, AttributeError):  # closed already; its socket is gone
        connection.sock.shutdown(socket.SHUT_RDWR)
