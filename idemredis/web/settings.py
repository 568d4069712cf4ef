"""The `IDEMREDIS_` settings of an application: names, defaults and checks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..core.fingerprint import FINGERPRINT_HEADERS
from ..core.response import REPLAY_HEADERS, storable_names
from ..core.settle import ON_ERROR, OnError
from ..core.tracebacks import hides_arguments
from ..errors import ConfigurationError
from ..policy import Policy, check_seconds
from ..store.clients import SOCKET_TIMEOUT
from .contract import SAFE_METHODS, Contract, Protocol

__all__ = ["DEFAULTS", "LEDGER_SETTINGS", "MODES", "PREFIX", "Mode", "Settings", "in_settings"]

PREFIX = "IDEMREDIS_"

Mode: TypeAlias = Literal["enforce", "observe", "off"]
"""`enforce`: refuse and replay; `observe`: claim and record, but always run the view; `off`: do nothing."""

MODES = ("enforce", "observe", "off")

DEFAULTS: Mapping[str, Any] = {
    "URL": None,
    "MODE": "enforce",
    "NAMESPACE": "idem",
    "LEASE_SECONDS": 30,
    "RETENTION_SECONDS": 86400,
    "MAX_HOLD_SECONDS": 900,
    "HEARTBEAT": True,
    "METHODS": ("POST", "PUT", "PATCH", "DELETE"),
    "REQUIRED": True,
    "PROTECT_ALL": False,
    "PROTOCOL": "default",
    "DOCS_URL": None,
    "FINGERPRINT_HEADERS": FINGERPRINT_HEADERS,
    "REPLAY_HEADERS": REPLAY_HEADERS,
    "MAX_BODY_BYTES": 16384,
    "MAX_REQUEST_BYTES": 64 * 1024 * 1024,
    "ON_ERROR": "release",
    "WAIT_SECONDS": 0,
    "RETRY_AFTER_SECONDS": 2,
    "FAIL_OPEN": False,
    "MIN_REPLICAS": 0,
    "REPLICA_TIMEOUT_SECONDS": 0.5,
    "SOCKET_TIMEOUT_SECONDS": SOCKET_TIMEOUT,
    "LOG_KEYS": False,
}
"""Every setting. Times are in seconds, sizes in bytes."""

LEDGER_SETTINGS = frozenset(
    {
        "URL",
        "NAMESPACE",
        "LEASE_SECONDS",
        "RETENTION_SECONDS",
        "MAX_HOLD_SECONDS",
        "HEARTBEAT",
        "MAX_BODY_BYTES",
        "MIN_REPLICAS",
        "REPLICA_TIMEOUT_SECONDS",
        "SOCKET_TIMEOUT_SECONDS",
        "LOG_KEYS",
    }
)
"""Settings that are refused if the application passes a ledger, which has its own."""

_POLICY = {
    "lease": "LEASE_SECONDS",
    "retention": "RETENTION_SECONDS",
    "max_hold": "MAX_HOLD_SECONDS",
    "heartbeat": "HEARTBEAT",
    "max_body": "MAX_BODY_BYTES",
    "min_replicas": "MIN_REPLICAS",
    "replica_timeout": "REPLICA_TIMEOUT_SECONDS",
}
_LEDGER = {**_POLICY, "URL": "URL", "socket_timeout": "SOCKET_TIMEOUT_SECONDS"}

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of an application; `configured` has the names that it set."""

    url: str | None = field(repr=False)
    mode: Mode
    namespace: str
    policy: Policy
    contract: Contract
    methods: frozenset[str]
    required: bool
    protect_all: bool
    fingerprint_headers: tuple[str, ...]
    storable: frozenset[str]
    max_request: int
    on_error: OnError
    wait: float
    fail_open: bool
    socket_timeout: float
    log_keys: bool
    configured: frozenset[str]

    @classmethod
    @hides_arguments
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Check an application's settings, whose names come without the prefix.

        Raises:
            ConfigurationError: a name is unknown or a value is not supported; the message has the name, the value and
                the fix.
        """
        for name in config:
            if name not in DEFAULTS:
                raise ConfigurationError(f"{PREFIX}{name} is not a setting{_near(name)}")
        values = {**DEFAULTS, **config}
        for name, (check, fix) in _CHECKS.items():
            if not check(values[name]):
                raise ConfigurationError(f"{PREFIX}{name} must be {fix}, not {_shown(name, values[name])}")
        if never := [name for name in values["REPLAY_HEADERS"] if not storable_names([name])]:
            raise ConfigurationError(
                f"{PREFIX}REPLAY_HEADERS must be without {never[0]!r}, which belongs to one client or one delivery; "
                f"remove it from {values['REPLAY_HEADERS']!r}"
            )
        policy = _policy(values)
        for name, used, fix in _IGNORED:
            if values[name] != DEFAULTS[name] and not used(values):
                raise ConfigurationError(f"{PREFIX}{name} would be ignored: {fix}, or remove it")
        return cls(
            url=values["URL"],
            mode=values["MODE"],
            namespace=values["NAMESPACE"],
            policy=policy,
            contract=Contract(_protocol(values["PROTOCOL"]), values["DOCS_URL"], values["RETRY_AFTER_SECONDS"]),
            methods=frozenset(values["METHODS"]),
            required=values["REQUIRED"],
            protect_all=values["PROTECT_ALL"],
            fingerprint_headers=tuple(values["FINGERPRINT_HEADERS"]),
            storable=storable_names(values["REPLAY_HEADERS"]),
            max_request=values["MAX_REQUEST_BYTES"],
            on_error=values["ON_ERROR"],
            wait=values["WAIT_SECONDS"],
            fail_open=values["FAIL_OPEN"],
            socket_timeout=values["SOCKET_TIMEOUT_SECONDS"],
            log_keys=values["LOG_KEYS"],
            configured=frozenset(config),
        )

    @classmethod
    @hides_arguments
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Settings:
        """Check the settings in a mapping whose names have the prefix; other names are not ours.

        Raises:
            ConfigurationError: as `read` raises it, or a name lacks the prefix.
        """
        for name in mapping:
            if name in DEFAULTS:
                raise ConfigurationError(f"settings has the name {name!r}; did you mean {PREFIX}{name}?")
        return cls.read(
            {
                name.removeprefix(PREFIX): value
                for name, value in mapping.items()
                if isinstance(name, str) and name.startswith(PREFIX)
            }
        )


def _shown(name: str, value: Any) -> str:
    """Return a value for an error message; of one that may have a password in it, only the type."""
    return f"of type {type(value).__name__}" if name == "URL" and value else repr(value)


def in_settings(error: ConfigurationError) -> ConfigurationError:
    """Return an error of the policy or the ledger with the names of the application's settings added."""
    names = ", ".join(f"{PREFIX}{name} is {field}" for field, name in _LEDGER.items() if field in str(error))
    return ConfigurationError(f"{error} ({names})" if names else str(error))


def _policy(values: Mapping[str, Any]) -> Policy:
    try:
        return Policy(**{field: values[name] for field, name in _POLICY.items()})
    except ConfigurationError as error:
        raise in_settings(error) from None


def _protocol(value: Any) -> Protocol:
    return "ietf" if value == "ietf" else "default"


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, DEFAULTS, 1, cutoff=0.5)
    return f"; did you mean {PREFIX}{near[0]}?" if near else f"; the settings are {', '.join(DEFAULTS)}"


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    try:
        check_seconds("", value)
    except ConfigurationError:
        return False
    return True


def _are_headers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(name, str) and _TOKEN.match(name) for name in value)


def _are_methods(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list, set, frozenset))
        and bool(value)
        and all(isinstance(name, str) and name.isupper() and name not in SAFE_METHODS for name in value)
    )


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "URL": (
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        "a redis://, rediss://, unix:// or memory:// URL",
    ),
    "MODE": (lambda value: value in MODES, '"enforce", "observe" or "off"'),
    "NAMESPACE": (lambda value: isinstance(value, str) and bool(value), "a non-empty str"),
    "METHODS": (_are_methods, 'a tuple of unsafe methods in upper case, such as ("POST", "PATCH")'),
    "REQUIRED": (_is_bool, "True or False"),
    "PROTECT_ALL": (_is_bool, "True or False"),
    "PROTOCOL": (lambda value: value in ("default", "ietf"), '"default" or "ietf"'),
    "DOCS_URL": (
        lambda value: value is None or (isinstance(value, str) and bool(re.match(r"https?://[!#-;=?-~]+\Z", value))),
        "an http:// or https:// URL",
    ),
    "FINGERPRINT_HEADERS": (_are_headers, 'a tuple of header names, such as ("content-type",)'),
    "REPLAY_HEADERS": (_are_headers, 'a tuple of header names, such as ("content-type", "location")'),
    "MAX_REQUEST_BYTES": (lambda value: type(value) is int and value > 0, "a whole number of bytes above 0"),
    "ON_ERROR": (lambda value: value in ON_ERROR, '"release", "hold" or "store"'),
    "WAIT_SECONDS": (
        lambda value: (not _is_bool(value) and value == 0) or _is_seconds(value),
        "a number of seconds, 0 or more",
    ),
    "RETRY_AFTER_SECONDS": (_is_seconds, "a number of seconds above 0"),
    "FAIL_OPEN": (_is_bool, "True or False"),
    "SOCKET_TIMEOUT_SECONDS": (_is_seconds, "a number of seconds above 0"),
    "LOG_KEYS": (_is_bool, "True or False"),
}

_IGNORED: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        "DOCS_URL",
        lambda values: values["PROTOCOL"] == "ietf",
        f'refusals link to it only under "ietf"; set {PREFIX}PROTOCOL to "ietf"',
    ),
    (
        "REPLICA_TIMEOUT_SECONDS",
        lambda values: values["MIN_REPLICAS"] > 0,
        f"no replica is waited for; set {PREFIX}MIN_REPLICAS to 1 or more",
    ),
)
"""Settings that have an effect only with another one: the name, whether it has one, and the fix."""
