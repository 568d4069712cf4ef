"""A TCP proxy that imposes the restrictions of managed and compatible servers."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, TypeAlias

__all__ = [
    "Refusal",
    "Request",
    "RestrictingProxy",
    "Restriction",
    "forgetful_scripts",
    "frozen_ttl",
    "managed",
    "no_time_in_scripts",
    "no_wait",
    "whole_seconds",
]


@dataclass(frozen=True)
class Request:
    """A command on its way to the server.

    Attributes:
        words: the command and its arguments, as the client sent them.
        script: the text that it runs; None unless it is EVAL or EVALSHA.
        prelude: Lua that runs before the script.
        evalshas: how many EVALSHA commands the proxy has received, this one included.
    """

    words: tuple[bytes, ...]
    script: bytes | None = None
    prelude: bytes = b""
    evalshas: int = 0

    @property
    def command(self) -> bytes:
        return self.words[0].upper()

    def encode(self) -> bytes:
        words = self.words
        if self.script is not None and self.prelude:
            words = (b"EVAL", self.prelude + self.script, *words[2:])
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Refusal(NamedTuple):
    """An error reply of the proxy's own; the server does not receive the command."""

    error: str

    def encode(self) -> bytes:
        return f"-{' '.join(self.error.splitlines())}\r\n".encode("utf-8", "surrogateescape")


Restriction: TypeAlias = Callable[[Request], Request | Refusal]

_NO_SCRIPT = Refusal("NOSCRIPT No matching script. Please use EVAL.")


def no_time_in_scripts(request: Request) -> Request | Refusal:
    """Refuse scripts that call TIME, with the error of ElastiCache Serverless.

    Source: https://github.com/cristipufu/aspnetcore-redis-rate-limiting/issues/154.
    """
    script = request.script or b""
    if call := re.search(rb"call\s*\(\s*(['\"])TIME\1", script, re.IGNORECASE):
        where = f"script: {_sha(script).decode()}, on @user_script:{len(script[: call.start()].splitlines())}."
        return Refusal(f"ERR This Redis command is not allowed from script {where}")
    return request


def managed(request: Request) -> Request | Refusal:
    """Refuse settings, users, diagnostics and CLIENT (except SETNAME), each of which some managed service refuses.

    For ElastiCache, see https://docs.aws.amazon.com/AmazonElastiCache/latest/dg/ClientConfig.RestrictedCommands.html
    and, for its CLIENT, https://github.com/redis/rueidis/issues/612.
    """
    if request.command == b"CLIENT" and len(request.words) > 1 and request.words[1].upper() != b"SETNAME":
        return Refusal(f"ERR unknown subcommand '{_text(request.words[1])}'. Try CLIENT HELP.")
    return _unknown(request) if request.command in _MANAGED else request


def no_wait(request: Request) -> Request | Refusal:
    """Refuse WAIT, as services behind a proxy do (https://github.com/redisson/redisson/issues/6716)."""
    return _unknown(request) if request.command == b"WAIT" else request


def forgetful_scripts(request: Request) -> Request | Refusal:
    """Reply NOSCRIPT to every third EVALSHA, as a server with an empty script cache does."""
    return _NO_SCRIPT if request.command == b"EVALSHA" and request.evalshas % 3 == 0 else request


def whole_seconds(request: Request) -> Request | Refusal:
    """Count TTLs in whole seconds: PEXPIRE rounds down to 1 s at least, and PTTL returns TTL * 1000.

    Redis and Valkey round TTL to the nearest second, so PTTL may be off by half a second either way.
    """
    return _shadowed(request, _WHOLE_SECONDS, b"PEXPIRE", b"PTTL")


def frozen_ttl(request: Request) -> Request | Refusal:
    """Let no time pass: PTTL of an existing key returns its `retention` field, which PEXPIRE set last."""
    return _shadowed(request, _FROZEN_TTL, b"PTTL")


class RestrictingProxy:
    """Forward commands to a server on loopback one by one, applying the restrictions in their order.

    It reads RESP2 and RESP3. Pub/sub, MONITOR and CLIENT REPLY do not work through it.

    Attributes:
        restrictions: the functions that restrict commands.
        port, url: where clients connect.
    """

    def __init__(self, target_port: int, *restrictions: Restriction) -> None:
        self._target = target_port
        self.restrictions = restrictions
        self._lock = threading.Lock()
        self._scripts: dict[bytes, bytes] = {}
        self._evalshas = 0
        self._closing = False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._threads = [threading.Thread(target=self._accept, name="restricting", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Break every connection and stop listening."""
        with self._lock:
            self._closing = True
            for end in (self._listener, *self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:  # the accepting thread is first; no thread is added once it has ended
            thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(near,), name="restricting", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError, EOFError), socket.create_connection(("127.0.0.1", self._target)) as far:
            with self._lock:
                if self._closing:
                    return
                self._open |= {near, far}
            try:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # replies to a pipeline are sent one by one
                with near.makefile("rb") as requests, far.makefile("rb") as replies:
                    while True:
                        outcome = self._restrict(_read_request(requests))
                        if isinstance(outcome, Refusal):
                            near.sendall(outcome.encode())
                        else:
                            far.sendall(outcome.encode())
                            near.sendall(_read_reply(replies))
            finally:
                with self._lock:
                    self._open -= {near, far}

    def _restrict(self, words: tuple[bytes, ...]) -> Request | Refusal:
        outcome: Request | Refusal = self._request(words)
        for restrict in self.restrictions:
            if isinstance(outcome, Request):
                outcome = restrict(outcome)
        if isinstance(outcome, Request) and outcome.command == b"EVALSHA" and outcome.script is None:
            return _NO_SCRIPT  # the server may know the script, but this proxy needs its text
        return outcome

    def _request(self, words: tuple[bytes, ...]) -> Request:
        script = None
        with self._lock:
            match [word.upper() for word in words[:2]]:
                case [b"EVAL", _]:
                    script = self._scripts[_sha(words[1])] = words[1]
                case [b"EVALSHA", sha]:
                    script = self._scripts.get(sha.lower())
                    self._evalshas += 1
                case [b"SCRIPT", b"LOAD"]:
                    self._scripts |= {_sha(text): text for text in words[2:]}
                case [b"SCRIPT", b"FLUSH"]:
                    self._scripts.clear()
            return Request(words, script, evalshas=self._evalshas)


_MANAGED = frozenset(
    b"ACL BGREWRITEAOF BGSAVE CONFIG DEBUG INFO MEMORY MIGRATE REPLICAOF SAVE SHUTDOWN SLAVEOF SYNC".split()
)

_SHADOW = """
local redis = (function(server)
  local function shadow(call)
    return function(...)
      local command, key, ms = ...
      command = string.upper(tostring(command))
      %s
      return call(...)
    end
  end
  return setmetatable({call = shadow(server.call), pcall = shadow(server.pcall)}, {__index = server})
end)(redis)
"""

_WHOLE_SECONDS = """
if command == 'PEXPIRE' and tonumber(ms) then
  return call('EXPIRE', key, math.max(math.floor(ms / 1000), 1), select(4, ...))
elseif command == 'PTTL' then
  local ttl = call('TTL', select(2, ...))
  return type(ttl) == 'number' and ttl > 0 and ttl * 1000 or ttl
end
"""

_FROZEN_TTL = """
if command == 'PTTL' then
  local ttl = call(...)
  local retention = type(ttl) == 'number' and ttl >= 0 and server.pcall('HGET', key, 'retention')
  return type(retention) == 'string' and tonumber(retention) or ttl
end
"""


def _shadowed(request: Request, lua: str, *commands: bytes) -> Request:
    """Run a script, or a plain command as a script, with a `redis` table that runs these commands differently."""
    if request.command in commands and request.script is None and len(request.words) > 1:
        script = b"return redis.call('%b', KEYS[1], unpack(ARGV))" % request.command
        _, key, *rest = request.words
        request = replace(request, words=(b"EVAL", script, b"1", key, *rest), script=script)
    line = " ".join((_SHADOW % lua).split())  # one line, so that line numbers in the script's errors stay right
    return replace(request, prelude=b"%b%b " % (request.prelude, line.encode()))


def _unknown(request: Request) -> Refusal:
    command, *arguments = map(_text, request.words)
    beginning = "".join(f"'{argument}' " for argument in arguments)[:128]
    return Refusal(f"ERR unknown command '{command}', with args beginning with: {beginning}")


def _sha(script: bytes) -> bytes:
    return hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()


def _text(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")


def _read_request(stream: BinaryIO) -> tuple[bytes, ...]:
    return tuple(_read(stream, int(_line(stream)[1:]) + 2)[:-2] for _ in range(int(_line(stream)[1:])))


def _read_reply(stream: BinaryIO) -> bytes:
    parts, left = list[bytes](), 1
    while left:
        parts.append(line := _line(stream))
        left -= 1
        match line[:1]:
            case b"$" | b"=" | b"!" if line[1:2] != b"-":
                parts.append(_read(stream, int(line[1:]) + 2))
            case b"*" | b"~" | b">" | b"%":
                left += max(int(line[1:]), 0) * (2 if line[:1] == b"%" else 1)
    return b"".join(parts)


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
