"""Sites behind every door, for what is said of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import AsyncLedger, Ledger
from tests.support.asgi_site import AsgiSite, Endpoints
from tests.support.site import Door, Site
from tests.support.started import Servers
from tests.support.subject import AnyServer

__all__ = ["MakeAsgiSite", "MakeDoor", "asgi_site", "door", "make_asgi_site", "make_door"]


class MakeDoor(Protocol):
    def __call__(self, server: AnyServer | None = None, **options: Any) -> Door: ...


@pytest.fixture
def make_door(every_key_left_expires: Servers, namespace: str, door_kind: str) -> Iterator[MakeDoor]:
    """Make sites: `make_door(server, principal=…, policy=…, PROTOCOL="ietf", …)`.

    `port=` connects the ledger to another port, such as a proxy's or one that nobody listens on. Its client is what
    `from_url` makes of `url=`. Every claim has the outcome of `outcome=`.
    """
    made: list[Door] = []

    def make(server: AnyServer | None = None, **options: Any) -> Door:
        server = server or every_key_left_expires.get("fakeredis")
        flask = door_kind == "flask"
        port, url, outcome = (options.pop(name, None) for name in ("port", "url", "outcome"))
        client: Any
        if url is not None:
            client = url
        elif port is None:
            client = server.client() if flask else server.async_client()
        elif flask:
            client = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))
        else:
            client = redis.asyncio.Redis(port=port, retry=redis.asyncio.retry.Retry(NoBackoff(), 0))
        if outcome is not None:
            options["ledger"] = _certain(outcome) if flask else _certain_async(outcome)
        if flask:
            made.append(Site(client, server.client(), namespace, **options))
        else:
            made.append(AsgiSite(door_kind, client, server.client(), namespace, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for site in made:
        site.close()


class MakeAsgiSite(Protocol):
    def __call__(self, kind: Endpoints = "async", server: AnyServer | None = None, **options: Any) -> AsgiSite: ...


@pytest.fixture
def make_asgi_site(every_key_left_expires: Servers, namespace: str) -> Iterator[MakeAsgiSite]:
    """Make sites behind the ASGI door: `make_asgi_site("guard", server, app=…, PROTECT_ALL=True, …)`."""
    made: list[AsgiSite] = []

    def make(kind: Endpoints = "async", server: AnyServer | None = None, **options: Any) -> AsgiSite:
        server = server or every_key_left_expires.get("fakeredis")
        client = options.pop("client", None) or server.async_client()
        made.append(AsgiSite(kind, client, server.client(), namespace, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def asgi_site(make_asgi_site: MakeAsgiSite) -> AsgiSite:
    """A site of Starlette with `async def` endpoints, whose `/charges` counts itself and answers 201."""
    made = make_asgi_site()
    made.view()
    return made


@pytest.fixture
def door(make_door: MakeDoor) -> Door:
    """A site whose `/charges` counts itself and answers 201."""
    made = make_door()
    made.view()
    return made


def _certain(outcome: Any) -> type[Ledger]:
    class Certain(Ledger):
        def claim(self, *args: Any, **kwargs: Any) -> Any:
            return outcome

    return Certain


def _certain_async(outcome: Any) -> type[AsyncLedger]:
    class Certain(AsyncLedger):
        async def claim(self, *args: Any, **kwargs: Any) -> Any:
            return outcome

    return Certain
