"""Django, as its asgi.py has it."""

from __future__ import annotations

from typing import Any

import django
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import clear_url_caches, path

from idemredis.asgi import Idempotency
from tests.support.frameworks import Charge, pieces

__all__ = ["build", "serve"]

urlpatterns: list[Any] = []


def build(idempotency: Idempotency, charge: Charge, sync: bool) -> Any:
    async def up(request: HttpRequest) -> HttpResponse:
        return HttpResponse("up")

    def charged(request: HttpRequest, order: str) -> HttpResponse:
        return JsonResponse(charge())

    async def charged_async(request: HttpRequest, order: str) -> HttpResponse:
        return JsonResponse({**charge(), "body": request.body.decode()})

    async def streamed(request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(pieces(charge))

    protect = idempotency.protect
    return serve(
        [
            path("up", up),
            path("charges/<str:order>", protect(charged if sync else charged_async)),
            path("streams", protect(streamed)),
        ]
    )


def serve(patterns: list[Any]) -> Any:
    """Return Django's application, as an asgi.py has it, with these patterns from now on."""
    if not settings.configured:
        settings.configure(
            SECRET_KEY="x", ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], MIDDLEWARE=[], LOGGING_CONFIG=None
        )
        django.setup(set_prefix=False)
    clear_url_caches()
    urlpatterns[:] = patterns
    return ASGIHandler()
