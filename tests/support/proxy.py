"""A TCP proxy that loses, delays or cuts off requests and replies on demand."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, TypeAlias

__all__ = ["Fate", "Proxy"]

Fate: TypeAlias = Literal["pass", "lose request", "lose reply", "cut reply"] | float
"""The fate of a request; a number is a delay in seconds, after which it is delivered even if its client has left."""


class Proxy:
    """Forward bytes both ways; only requests that contain `matching` (by default EVAL and EVALSHA) are disturbed.

    `rewrite` changes what a server sends.
    """

    def __init__(
        self, target_port: int, matching: bytes = b"EVAL", rewrite: Callable[[bytes], bytes] | None = None
    ) -> None:
        self._target = target_port
        self._rewrite = rewrite or (lambda data: data)
        self._matching = matching
        self._lock = threading.Lock()
        self._fates: list[Fate] = []
        self._choose: Callable[[], Fate] | None = None
        self._closing = threading.Event()
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
        """Lose the next `count` replies: the server runs the request, and the client's connection breaks."""
        self._deal("lose reply", count)

    def drop_requests(self, count: int = 1) -> None:
        """Lose the next `count` requests: the server never gets them, and the client's connection breaks."""
        self._deal("lose request", count)

    def cut_replies(self, count: int = 1) -> None:
        """Break the connection in the middle of the next `count` replies."""
        self._deal("cut reply", count)

    def delay_requests(self, count: int = 1, seconds: float = 1.0) -> None:
        """Deliver the next `count` requests late, even if their client has given up."""
        self._deal(seconds, count)

    def choose(self, choose: Callable[[], Fate] | None) -> None:
        """Call a function for the fate of each request from now on."""
        with self._lock:
            self._choose = choose

    def refuse(self, refusing: bool = True) -> None:
        """Break every connection, including new ones, until `refuse(False)`."""
        with self._lock:
            self._refusing = refusing
            if refusing:
                for end in self._open:
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def switch(self, target_port: int) -> None:
        """Lead new connections to another server; those that are open stay where they are."""
        self._target = target_port

    def hold(self, holding: bool = True) -> None:
        """Hold back every reply until `hold(False)`: the server runs the requests, and their clients wait."""
        (self._flowing.clear if holding else self._flowing.set)()

    def close(self) -> None:
        """Break every connection and stop listening."""
        self._closing.set()
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
            fate: Fate = "pass"
            try:
                while True:
                    for end in select.select([near, far], [], [])[0]:
                        data = end.recv(65536)
                        if not data:
                            return
                        if end is near:
                            if fate not in (
                                "lose reply",
                                "cut reply",
                            ):  # otherwise these bytes are the rest of that request
                                fate = self._fate(data)
                            if fate == "lose request":
                                return
                            if isinstance(fate, float):
                                self._closing.wait(fate)
                            far.sendall(data)
                            continue
                        data = self._rewrite(data)
                        self._flowing.wait()
                        if fate == "lose reply":
                            return
                        if fate == "cut reply":
                            near.sendall(data[: len(data) // 2])
                            return
                        near.sendall(data)
            finally:
                with self._lock:
                    self._open -= {near, far}

    def _deal(self, fate: Fate, count: int) -> None:
        with self._lock:
            self._fates = [fate] * count

    def _fate(self, request: bytes) -> Fate:
        with self._lock:
            if self._matching not in request:
                return "pass"
            if self._fates:
                return self._fates.pop()
            return self._choose() if self._choose else "pass"
