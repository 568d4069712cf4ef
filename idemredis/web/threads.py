"""How many requests a WSGI server runs at once in this process, if that can be found out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["threads_of"]

_GUNICORN_HANDLES = (signal.SIGABRT, signal.SIGQUIT, signal.SIGTERM)
"""Signals for which a worker of gunicorn sets handlers; an application may have replaced one."""


def threads_of(environ: Mapping[str, Any]) -> int | None:
    """Return the number of threads of gunicorn's, uWSGI's or waitress's worker; None if it is unknown or unlimited."""
    found = _of_waitress(environ) or _of_uwsgi() or _of_gunicorn()
    return found if type(found) is int and found > 0 else None


def _of_waitress(environ: Mapping[str, Any]) -> Any:
    channel = getattr(environ.get("waitress.client_disconnected"), "__self__", None)
    return getattr(getattr(getattr(channel, "server", None), "adj", None), "threads", None)


def _of_uwsgi() -> Any:
    server: Any = sys.modules.get("uwsgi")  # there is such a module only inside uWSGI
    if server is None:
        return None
    options = getattr(server, "opt", {})
    if b"gevent" in options or "gevent" in options:
        return None
    threads = options.get("threads", options.get(b"threads", 1))
    try:
        return int(threads)
    except (TypeError, ValueError):
        return None


def _of_gunicorn() -> Any:
    base: Any = sys.modules.get("gunicorn.workers.base")
    if base is None:
        return None
    for number in _GUNICORN_HANDLES:
        worker = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(worker, base.Worker):
            kind = type(worker).__name__
            return {"SyncWorker": 1, "ThreadWorker": getattr(worker.cfg, "threads", None)}.get(kind)
    return None
