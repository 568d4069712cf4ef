"""A TCP proxy in front of a server that loses a request, or a reply, when told to."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

__all__ = ["Proxy"]


class Proxy:
    """Forwards bytes both ways. Only a request that has `matching` in it (EVAL and EVALSHA) is ever lost."""

    def __init__(self, target_port: int, matching: bytes = b"EVAL") -> None:
        self._target = target_port
        self._matching = matching
        self._lock = threading.Lock()
        self._requests = self._replies = 0
        self._refusing = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def drop_replies(self, count: int = 1) -> None:
        """Lose the next `count` replies: the server has run the request, its client sees the connection break."""
        with self._lock:
            self._replies = count

    def drop_requests(self, count: int = 1) -> None:
        """Lose the next `count` requests: the server never sees them, their client sees the connection break."""
        with self._lock:
            self._requests = count

    def refuse(self, refusing: bool = True) -> None:
        """Break every connection, and each new one, until told `refuse(False)`."""
        with self._lock:
            self._refusing = refusing
            if refusing:
                for end in self._open:
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def hold(self, holding: bool = True) -> None:
        """Keep every reply back, until told `hold(False)`: the server has run the request, its client waits."""
        (self._flowing.clear if holding else self._flowing.set)()

    def close(self) -> None:
        """Break every connection and listen no more."""
        self.refuse()
        self.hold(False)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        threads = []
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threads.append(threading.Thread(target=self._carry, args=(near,), name="proxy", daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(5.0)

    def _carry(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far:
            with self._lock:
                if self._refusing:
                    return
                self._open |= {near, far}
            losing = False
            try:
                while True:
                    for end in select.select([near, far], [], [])[0]:
                        data = end.recv(65536)
                        if not data or (end is far and losing) or (end is near and self._lost(data, "_requests")):
                            return
                        if end is far:
                            self._flowing.wait()
                        losing = losing or (end is near and self._lost(data, "_replies"))
                        (far if end is near else near).sendall(data)
            finally:
                with self._lock:
                    self._open -= {near, far}

    def _lost(self, request: bytes, count: str) -> bool:
        with self._lock:
            left: int = getattr(self, count)
            if not left or self._matching not in request:
                return False
            setattr(self, count, left - 1)
            return True
