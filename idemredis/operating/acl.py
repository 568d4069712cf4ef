"""The `ACL SETUSER` lines, which allow each kind of user exactly what it needs.

No user may read the server's configuration: CONFIG GET shows `requirepass` and `masterauth`, and who has those has the
server.
"""

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
"""Commands of the scripts, WAIT for `min_replicas`, and CLIENT SETINFO, which redis-py sends on connecting."""

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
    "client|setinfo",
    "client|id",
    "client|tracking",
    "subscribe",
    "unsubscribe",
    "cluster|slots",
)
"""Read-only: a script may call only what its user may. HGETALL is for redis-cli.

SCAN and CLIENT TRACKING show the names of other programs' keys, but not their values: servers check key patterns only
for commands that name keys.
"""

_OPERATOR = (*_VIEWER, "hset", "pexpire", "del", "watch", "unwatch", "multi", "exec")

_CLUSTER = ("cluster|slots", "cluster|info", "command", "asking")
"""Commands that a cluster client needs to find the right server."""

_COMMANDS = {"app": _APP, "viewer": _VIEWER, "operator": _OPERATOR}

_FOR = {
    "app": "the application",
    "viewer": "a person with read access: ls, show, stats, tail, doctor --read-only",
    "operator": "a person who also changes rows: release, resolve, forget, doctor",
}


class User(NamedTuple):
    """A Redis user: its role, its purpose, and the rules of its ACL SETUSER line."""

    role: Role
    what_for: str
    rules: tuple[str, ...]

    def line(self, password: str = "PASSWORD") -> str:
        """Return the ACL SETUSER line for redis-cli, quoted for a shell."""
        return f"ACL SETUSER idemredis-{self.role} on '>{password}' {' '.join(map(_quoted, self.rules))}"


def users(
    namespace: str, cluster: bool = False, setinfo: bool = True, database: int = 0, client_name: str | None = None
) -> list[User]:
    """Return the users for one namespace.

    Only the app may publish on the namespace's channel, and only viewer and operator may subscribe to it.

    Args:
        namespace: first part of the rows' names.
        cluster: add the commands that a cluster client needs.
        setinfo: False for Redis before 7.2, which rejects a line that names CLIENT SETINFO.
        database: number of the clients' database; any but 0 needs SELECT, which then allows every database.
        client_name: the clients' name, if they have one; it needs CLIENT SETNAME.
    """
    connecting = (*(("select",) if database else ()), *(("client|setname",) if client_name else ()))
    made = []
    for role in ROLES:
        channels = [channel(namespace)] if role == "app" else [channel(namespace), "__redis__:invalidate"]
        publishing = ("publish",) if role == "app" else ()
        commands = dict.fromkeys((*_COMMANDS[role], *publishing, *connecting, *(_CLUSTER if cluster else ())))
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
