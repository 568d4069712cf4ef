"""A deadline for each call, whatever the client's own timeouts and retries are.

A thread of the process closes the connections of calls that are overdue, which ends their wait. Connecting has no
connection to close yet, so it runs in a thread of its own, and the call stops waiting for it in time. On an event loop
the task that waits is cancelled.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from ..core.tracebacks import without_frames
from .errors import CLOSED, closed

__all__ = ["TICK", "Attempt", "CallOfTask", "bound", "connect_by", "made_of", "overdue"]

TICK = 0.1
"""Seconds between two looks at the calls under way: how late an overdue one may be ended."""

LATE = 1.0
"""Seconds by which a look on an event loop may be late, because the loop is busy. A later one was lost: the handler of
a signal raised an exception in it, which the loop logged. The next call then has another look made."""

LINGER = 50
"""Looks without a call before the thread waits to be woken: five seconds. Waking it costs as much as a call."""

connect_by: ContextVar[float | None] = ContextVar("idemredis_connect_by", default=None)
"""When the call under way must have its connection, by the local monotonic clock."""

_ONCE: Any = Retry(NoBackoff(), 0)  # whether to try again is the flows' decision


class _Overdue:
    """The calls under way in this process, and the thread that ends those whose time is over."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._process, self._lock = made_of()
        self._calls: dict[Any, float] = {}
        self._used = False
        self._closing = threading.Lock()
        self._starting = threading.Lock()
        self._wanted = threading.Event()
        self._watching = False
        self._thread: threading.Thread | None = None

    def add(self, connection: Any, until: float) -> None:
        """Close the connection at `until`, unless it is removed before."""
        if self._process != os.getpid() or self._lock is not threading.Lock:
            self._reset()
        self._calls[connection] = until
        self._used = True
        if not self._watching:
            self._watch()

    def remove(self, connection: Any) -> bool:
        """Return whether its time was not over; if it was, the connection is closed now."""
        if self._calls.pop(connection, None) is not None:
            return True
        with self._closing:  # it is being closed: not to be given back before that is done
            return False

    def _watch(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="idemredis deadlines", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # too many threads, or the process is ending: the client's own timeouts hold
                    return
                self._thread = thread
            self._watching = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            unused = 0
            while self._calls or unused < LINGER:
                time.sleep(TICK)
                unused = 0 if self._used else unused + 1
                self._used = False
                now = time.monotonic()
                for connection, until in self._calls.copy().items():
                    if until <= now:
                        self._close(connection)
            self._wanted.clear()
            self._watching = False
            if self._calls:
                self._watching = True
                self._wanted.set()

    def _close(self, connection: Any) -> None:
        with self._closing:
            if self._calls.pop(connection, None) is not None:
                with suppress(Exception):  # closed under the eyes of the thread that reads from it
                    connection.disconnect()


def made_of() -> tuple[int, object]:
    """What a thread and its locks are made of: a fork has no threads, and gevent may replace the locks at any time."""
    return os.getpid(), threading.Lock


overdue = _Overdue()


class CallOfTask:
    """A call of the running task, which is cancelled when the time of the call is over, as by `asyncio.timeout`.

    `asyncio.timeout` makes a timer for each call, which costs as much as half a round trip. Here one timer of the event
    loop looks at all calls.

    Args:
        until: the end of its time, by the local monotonic clock.
    """

    __slots__ = ("_before", "_calls", "is_over", "task", "until")

    task: Any

    def __init__(self, until: float) -> None:
        self.until = until
        self.is_over = False
        self.task = asyncio.current_task()
        self._before = self.task.cancelling()
        self._calls = _calls_of_running_loop()
        self._calls.begin(self)

    def end(self) -> bool:
        """Return True if the task was cancelled for this call alone, which takes the cancellation back."""
        self._calls.under_way.discard(self)
        return self.is_over and self.task.uncancel() <= self._before


class _CallsOfLoop:
    """The calls under way on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.under_way: set[CallOfTask] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._lost_at = 0.0  # when the next look is so late that it must have been lost; 0 if there is to be none

    def begin(self, call: CallOfTask) -> None:
        self.under_way.add(call)
        if self._lost_at <= time.monotonic():
            self._look_later()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(TICK, self._look)
        self._lost_at = time.monotonic() + TICK + LATE

    def _look(self) -> None:
        now = time.monotonic()
        for call in [call for call in self.under_way if call.until <= now]:
            self.under_way.remove(call)
            call.is_over = True
            call.task.cancel()
        if self.under_way:
            self._look_later()
        else:
            self._timer, self._lost_at = None, 0.0


class _OfThread(threading.local):
    calls: _CallsOfLoop | None = None


_of_thread = _OfThread()


def _calls_of_running_loop() -> _CallsOfLoop:
    loop = asyncio.get_running_loop()
    calls = _of_thread.calls
    if calls is None or calls.loop is not loop:
        calls = _of_thread.calls = _CallsOfLoop(loop)
    return calls


class Attempt:
    """Something that takes long, in a thread of its own."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._once = threading.Lock()
        self._started = False
        self._done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin, unless that was done. A signal may interrupt it anywhere; beginning twice does no harm.

        Raises:
            RuntimeError: no thread can be started.
        """
        if not self._started:
            _thread.start_new_thread(self._in_thread, ())  # `Thread.start` does not survive an interruption
            self._started = True

    def wait(self, until: float | None) -> bool:
        """Return whether it is done; None waits as long as it takes."""
        return self._done.wait(None if until is None else max(until - time.monotonic(), 0.0))

    def _in_thread(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = without_frames(error)
        finally:
            self._done.set()


class _Bounded:
    """What a pool's connections have beside redis-py's own: while `connect_by` is set, connecting ends in time."""

    _connecting: Attempt | None = None
    _is_up = False
    connected_at = 0.0  # by the local monotonic clock
    _closures = 0

    def connect(self) -> None:
        if self._is_up:
            return
        until = connect_by.get()
        inherited = self._connecting  # begun by a call that did not wait for its end
        if inherited is not None:
            self._await(inherited, until)
        if not self._is_up:
            self.disconnect()  # what was interrupted in the middle may have left half a connection
            if until is not None and (inherited is None or inherited.error is not None):
                self._connecting = attempt = Attempt(lambda: self._connect_once(until))
                self._await(attempt, until)
                if attempt.error is not None:
                    raise attempt.error
        if not self._is_up:
            self._establish()
            self._is_up = True
        self.connected_at = time.monotonic()

    def _await(self, attempt: Attempt, until: float | None) -> None:
        try:
            attempt.start()
        except RuntimeError:  # no thread can be started: the client's own timeouts hold
            self._connecting = None
            return
        if not attempt.wait(until):
            self.disconnect()  # ends a handshake; without a socket yet, its own timeout does
            raise RedisTimeoutError("Timeout connecting to server")
        self._connecting = None
        self._is_up = attempt.error is None

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        self._is_up = False
        self._closures += 1
        super().disconnect(*args, **kwargs)  # type: ignore[misc]

    def _connect_once(self, until: float) -> None:
        this: Any = self
        kept = this.retry, this.socket_connect_timeout
        this.retry = _ONCE
        this.socket_connect_timeout = min(kept[1] or until, max(until - time.monotonic(), TICK))
        try:
            self._establish()
        finally:
            this.retry, this.socket_connect_timeout = kept

    def _establish(self) -> None:
        closures = self._closures
        try:
            super().connect()  # type: ignore[misc]
        except CLOSED as error:
            if self._closures == closures:
                raise
            raise closed(error) from error


@cache
def _bounded(connection_class: type) -> type:
    return type(connection_class.__name__, (_Bounded, connection_class), {"__module__": connection_class.__module__})


def bound(pool: Any) -> None:
    """Have the pool's next connections respect `connect_by`. Outside calls of ours nothing changes."""
    if not issubclass(pool.connection_class, _Bounded):
        pool.connection_class = _bounded(pool.connection_class)
