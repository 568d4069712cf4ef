"""The `ACL SETUSER` lines: what each kind of user may do, and nothing else."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ..core.keys import row_prefix
from ..telemetry.publisher import channel

__all__ = ["ROLES", "Role", "User", "users"]

Role: TypeAlias = Literal["app", "viewer", "operator"]

ROLES: tuple[Role, ...] = ("app", "viewer", "operator")

_APP = (
    "evalsha",
    "eval",
    "ping",
    "hmget",
    "hset",
    "pexpire",
    "pttl",
    "del",
    "wait",
    "client|setinfo",
)
"""What the scripts call, `min_replicas`, and how redis-py introduces itself."""

_VIEWER = (
    "ping",
    "info",
    "dbsize",
    "scan",
    "evalsha",
    "eval",
    "hmget",
    "pttl",
    "hgetall",
    "memory|usage",
    "config|get",
    "client|setinfo",
    "client|id",
    "client|tracking",
    "subscribe",
    "unsubscribe",
    "cluster|slots",
)
"""Looks at everything, changes nothing: EVAL may call no more than the user may. HGETALL is for redis-cli."""

_OPERATOR = (*_VIEWER, "hset", "pexpire", "del", "watch", "unwatch", "multi", "exec")

_CLUSTER = ("cluster|slots", "cluster|info", "command", "asking")
"""How a cluster's client finds its way."""

_COMMANDS = {"app": _APP, "viewer": _VIEWER, "operator": _OPERATOR}

_FOR = {
    "app": "the application: claims, completes, replays",
    "viewer": "a person who looks: ls, show, stats, tail, doctor --read-only",
    "operator": "a person who also settles: release, resolve, forget, doctor",
}


class User(NamedTuple):
    """What a user is for, and the words of its ACL SETUSER."""

    role: Role
    what_for: str
    rules: tuple[str, ...]

    def line(self, password: str = "PASSWORD") -> str:
        """Return the line for redis-cli, quoted for a shell."""
        return f"ACL SETUSER idemredis-{self.role} on '>{password}' {' '.join(map(_quoted, self.rules))}"


def users(namespace: str, cluster: bool = False, setinfo: bool = True) -> list[User]:
    """Return the users of one namespace. Only the app may publish to its channel, only people may listen to it.

    Args:
        namespace: of the rows.
        cluster: add what a cluster's client needs.
        setinfo: False for Redis before 7.2, which has no CLIENT SETINFO and refuses a line that names it.
    """
    made = []
    for role in ROLES:
        channels = [channel(namespace)] if role == "app" else [channel(namespace), "__redis__:invalidate"]
        commands = dict.fromkeys(
            (*_COMMANDS[role], *(("publish",) if role == "app" else ()), *(_CLUSTER if cluster else ()))
        )
        if not setinfo:
            del commands["client|setinfo"]
        rules = (
            "resetkeys",
            f"~{row_prefix(namespace)}*",
            "resetchannels",
            *(f"&{name}" for name in channels),
            "-@all",
        )
        made.append(User(role, _FOR[role], (*rules, *(f"+{command}" for command in commands))))
    return made


def _quoted(rule: str) -> str:
    return f"'{rule}'" if set(rule) & set("*&|~>") else rule
