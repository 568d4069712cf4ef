"""Commands that a person can paste: how to call `idemredis` and `redis-cli` for a client's server."""

from __future__ import annotations

import shlex
from typing import Any

from ..store.clients import Client, address, is_cluster, options, public_url
from ..store.nodes import primaries

__all__ = ["URL_VARIABLE", "command_line", "redis_cli", "where"]

URL_VARIABLE = "IDEMREDIS_URL"
"""Environment variable with the server's URL; suggested commands use it if the URL has a password."""


def command_line(client: Any, namespace: str) -> str:
    """Return the beginning of an `idemredis` command for this ledger, without a password."""
    url = public_url(_server(client))
    option = f'"${URL_VARIABLE}"' if url is None else shlex.quote(url)
    return f"idemredis --url {option} --namespace {shlex.quote(namespace)}"


def redis_cli(node: Any) -> str:
    """Return the beginning of a `redis-cli` command for a client's server; it asks for a password if there is one."""
    known = options(node)
    words = ["redis-cli"]
    if "path" in known:
        words += ["-s", str(known["path"])]
    else:
        words += ["-h", str(known.get("host", "localhost")), "-p", str(known.get("port", 6379))]
    if (public_url(node) or "").startswith("rediss:") or known.get("ssl"):
        words.append("--tls")
    if known.get("db"):
        words += ["-n", str(known["db"])]
    if known.get("username"):
        words += ["--user", str(known["username"])]
    if known.get("password"):
        words.append("--askpass")
    return shlex.join(words)


def where(client: Client) -> str:
    """Return the server and database of a client in words."""
    node = _server(client)
    if is_cluster(client):
        return f"the cluster of {address(node)}"
    return f"database {options(node).get('db') or 0} of {address(node)}"


def _server(client: Any) -> Any:
    return primaries(client)[0] if is_cluster(client) else client
