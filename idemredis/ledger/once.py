"""A function decorated with `once`: the claim arguments of a call, and its result to and from JSON. Pure."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import typing
from collections.abc import Callable
from functools import cached_property
from inspect import BoundArguments
from pathlib import PurePath
from typing import Any, NamedTuple

from ..core.fingerprint import fingerprint_value
from ..core.outcomes import Replay
from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..core.settle import ON_ERROR, Ending, OnError, of_effect, of_error
from ..errors import AlreadyCompleted, ConfigurationError, PreviousAttemptFailed
from ..policy import Policy, check_lease, check_seconds

__all__ = ["ClaimArguments", "Once", "OnceOptions", "after_error", "check_on_error", "completed"]

logger = logging.getLogger("idemredis")

MAX_MESSAGE = 1000
"""Characters of an error's message that `on_error="store"` keeps. Enough to diagnose; a traceback belongs in a log."""

_JSON = (("content-type", "application/json"),)


class ClaimArguments(NamedTuple):
    """The arguments of `claim`, in their order."""

    principal: object
    key: Any
    fingerprint: str
    operation: str
    lease: float | None
    wait: float
    takeover: bool = True
    route: str = ""


class OnceOptions(NamedTuple):
    """The arguments of `once`, unchecked."""

    policy: Policy
    principal: object
    key: object
    fingerprint: object
    operation: str | None
    lease: float | None
    wait: float
    on_error: OnError
    recover: Callable[[Reservation], object] | None
    encode: Callable[..., object] | None
    decode: Callable[..., object] | None


class Once:
    """One decorated function: the claim arguments of a call, and its result to and from JSON."""

    def __init__(self, options: OnceOptions, function: Callable[..., object], *, asynchronous: bool) -> None:
        _check(options, function, asynchronous)
        self._options = options
        self._function = function
        self._name = _qualified(function)
        self._signature = inspect.signature(function)
        self._principal, self._key, self._fingerprint = (
            _value_getter(part, self._signature) for part in (options.principal, options.key, options.fingerprint)
        )

    def claim_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ClaimArguments:
        """Return the arguments of `claim` for one call of the function.

        Raises:
            ConfigurationError: there is no `fingerprint` option, and an argument is not JSON.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = self._options
        fingerprint: Any = self._of_arguments(bound) if options.fingerprint is None else self._fingerprint(bound)
        operation = self._name if options.operation is None else options.operation
        return ClaimArguments(
            self._principal(bound),
            self._key(bound),
            fingerprint,
            operation,
            options.lease,
            options.wait,
            route=self._name,
        )

    def response(self, value: object) -> StoredResponse:
        """Return what to store for a result; a `StoredResponse` is stored as it is."""
        if isinstance(value, StoredResponse):
            return value
        encode, _ = self._hooks
        return json_response(value, encode, self._name)

    def value_of(self, done: Replay) -> Any:
        """Return the stored result.

        Raises:
            PreviousAttemptFailed: a failure was stored.
            AlreadyCompleted: the result was not stored.
        """
        if done.failed:
            raise PreviousAttemptFailed(done.response)
        return self.result_of(done.response)

    def result_of(self, response: StoredResponse) -> Any:
        """Return the result that a response stands for: its JSON decoded, or else the response itself.

        Raises:
            AlreadyCompleted: the result was not stored.
        """
        if response.omitted:
            raise AlreadyCompleted(response)
        _, decode = self._hooks
        if decode is _same_response or not _is_json(response):
            return response
        return decode(json.loads(response.body))

    def returned(self, value: object) -> Any:
        """Return what the caller gets for a result of the function or of `recover`.

        A `StoredResponse` is what a duplicate call gets from the row, so that all callers agree.
        """
        if isinstance(value, StoredResponse) and not value.omitted:
            return self.result_of(value)
        return value

    def _of_arguments(self, bound: BoundArguments) -> str:
        arguments = dict(bound.arguments)
        if next(iter(arguments), "") in ("self", "cls"):
            del arguments[next(iter(arguments))]
        try:
            return fingerprint_value(arguments)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the arguments of {self._name} are not JSON ({error}); pass fingerprint= to once"
            ) from None

    @cached_property
    def _hooks(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """The encode and decode functions. Resolved at the first call: annotations may name types defined later."""
        options = self._options
        if options.encode is None and options.decode is None:
            try:
                kind = typing.get_type_hints(self._function).get("return")
            except Exception:  # the annotation cannot be evaluated, so the result is treated as plain JSON
                kind = None
            if kind is StoredResponse:
                return _unchanged, _same_response
            if isinstance(kind, type) and hasattr(kind, "model_dump") and hasattr(kind, "model_validate"):
                return _verified(lambda value: value.model_dump(mode="json"), kind.model_validate)
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                return _verified(dataclasses.asdict, lambda data: kind(**data))
        return options.encode or _unchanged, options.decode or _unchanged


def completed(r: Reservation) -> Ending:
    """Return the ending of a block that raised nothing: complete with its `response`, or its `result` as JSON."""
    return Ending("complete", r.response or json_response(r.result))


def after_error(error: BaseException, on_error: OnError, r: Reservation) -> Ending:
    """Return the ending of a block that raised; a stored failure has the error's type and message."""
    if (ending := of_effect(error, r)) is not None:
        return ending
    how = of_error(error, on_error)
    if how != "store":
        return Ending(how)
    facts = {"error": type(error).__name__, "message": str(error)[:MAX_MESSAGE]}
    return Ending("fail", StoredResponse(500, _JSON, json.dumps(facts, separators=(",", ":")).encode()))


def json_response(
    value: object, encode: Callable[..., object] | None = None, name: str = "the block"
) -> StoredResponse:
    """Return what to store for a result: its JSON, or a tombstone if it cannot be encoded."""
    try:
        text = json.dumps(value if encode is None else encode(value), separators=(",", ":"), allow_nan=False)
    except Exception as error:  # `encode` may raise anything; the work is done, so the caller gets its result
        logger.warning("the result of %s cannot be stored as JSON (%s: %s)", name, type(error).__name__, error)
        return StoredResponse(200, omitted="not_encodable")
    return StoredResponse(200, _JSON, text.encode())


def _verified(
    write: Callable[[Any], object], read: Callable[[Any], object]
) -> tuple[Callable[..., object], Callable[..., object]]:
    """Make `write` raise for a value that would not read back equal, such as a dataclass with a tuple field."""

    def checked(value: object) -> object:
        data = write(value)
        if read(json.loads(json.dumps(data))) != value:
            raise TypeError("it does not read back equal; pass encode= and decode=")
        return data

    return checked, read


def _unchanged(value: object) -> object:
    return value


def _same_response(value: object) -> object:
    """Mark a function whose result is a `StoredResponse`, by its annotation; there is nothing to decode."""
    return value


def _is_json(response: StoredResponse) -> bool:
    """Return True if the body is JSON; one without a type is JSON if it can be read as such."""
    kind = next((value.lower() for name, value in response.headers if name.lower() == "content-type"), "json")
    if "json" not in kind:
        return False
    try:
        json.loads(response.body)
    except ValueError:
        return False
    return True


def _value_getter(option: object, function: inspect.Signature) -> Callable[[BoundArguments], object]:
    """Return a function that computes an option's value for one call; the option is a constant or a function."""
    if not callable(option):
        return lambda bound: option
    try:
        signature = inspect.signature(option)
    except (TypeError, ValueError):  # some builtins have no signature
        return lambda bound: option(*bound.args, **bound.kwargs)
    names = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if names and len(names) == len(signature.parameters) and function.parameters.keys() >= set(names):
        return lambda bound: option(**{name: bound.arguments[name] for name in names})
    try:
        signature.bind(
            *(p for p in function.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            **{name: p for name, p in function.parameters.items() if p.kind == p.KEYWORD_ONLY},
        )
    except TypeError:
        raise ConfigurationError(
            f"a function with parameters {signature} cannot be called with the arguments of {function}; "
            "use the same parameter names, or accept all of them"
        ) from None
    return lambda bound: option(*bound.args, **bound.kwargs)


def _qualified(function: Callable[..., object]) -> str:
    """Return module and qualified name; the module of a script is its file's name, as importers see it."""
    module: str = function.__module__
    if module in ("__main__", "__mp_main__"):  # multiprocessing runs a script again as __mp_main__
        names = getattr(inspect.unwrap(function), "__globals__", {})
        spec, file = names.get("__spec__"), names.get("__file__")
        module = spec.name if spec is not None else PurePath(file).stem if file else module
    return f"{module}.{function.__qualname__}"


def check_on_error(on_error: OnError) -> OnError:
    """Return `on_error` if it is valid.

    Raises:
        ConfigurationError: it is not one of `ON_ERROR`.
    """
    if on_error not in ON_ERROR:
        raise ConfigurationError(f'on_error must be "release", "hold" or "store", not {on_error!r}')
    return on_error


def _check(options: OnceOptions, function: Callable[..., object], asynchronous: bool) -> None:
    """Raise at the decoration for options that would fail at the first call."""
    check_on_error(options.on_error)
    if options.lease is not None:
        check_lease(options.lease, options.policy.retention)
    if options.wait:
        check_seconds("wait", options.wait)
    if not (options.operation is None or isinstance(options.operation, str)):
        raise ConfigurationError(f"operation must be a str or None, not {options.operation!r}")
    for name in ("recover", "encode", "decode"):
        hook = getattr(options, name)
        if not (hook is None or callable(hook)):
            raise ConfigurationError(f"{name} must be a function, not {hook!r}")
    if not hasattr(function, "__qualname__"):
        raise ConfigurationError(f"once decorates functions, not {type(function).__name__} objects")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{function.__qualname__} is a generator; once needs a function that returns a result")
    if inspect.iscoroutinefunction(function) != asynchronous:
        fix = "use Ledger.once" if asynchronous else "use AsyncLedger.once"
        kind = "a plain function" if asynchronous else "an async def"
        raise ConfigurationError(f"{function.__qualname__} is {kind}; {fix}")
    if not asynchronous and inspect.iscoroutinefunction(options.recover):
        raise ConfigurationError(
            f"recover of {function.__qualname__} is an async def; Ledger.once needs a plain function"
        )
