"""What one decorated function is: which row a call of it has, and its result as JSON and back. Pure."""

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
from ..core.settle import ON_ERROR, Ending, OnError, of_error
from ..errors import AlreadyCompleted, ConfigurationError, PreviousAttemptFailed
from ..policy import Policy, check_lease, check_seconds

__all__ = ["ClaimArguments", "Once", "OnceOptions", "after_error", "check_on_error", "completed"]

logger = logging.getLogger("idemredis")

LONGEST_MESSAGE = 1000
"""Characters of an error's text that are kept under `on_error="store"`: what a person reads, not what a page holds."""

_JSON = (("content-type", "application/json"),)


class ClaimArguments(NamedTuple):
    """What `claim` is called with, in its own order."""

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
    """One decorated function: which row a call of it is, and its result as JSON and back."""

    def __init__(self, options: OnceOptions, function: Callable[..., object], *, asynchronous: bool) -> None:
        _check(options, function, asynchronous)
        self._options = options
        self._function = function
        self._name = _qualified(function)
        self._signature = inspect.signature(function)
        self._principal, self._key, self._fingerprint = (
            _chooser(part, self._signature) for part in (options.principal, options.key, options.fingerprint)
        )

    def claim_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ClaimArguments:
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
        encode, _ = self._hooks
        return json_response(value, encode, self._name)

    def value_of(self, done: Replay) -> Any:
        """Return the result that was stored, or raise what stands in its place."""
        if done.failed:
            raise PreviousAttemptFailed(done.response)
        if done.response.omitted:
            raise AlreadyCompleted(done.response)
        _, decode = self._hooks
        return decode(json.loads(done.response.body))

    def _of_arguments(self, bound: BoundArguments) -> str:
        arguments = dict(bound.arguments)
        if next(iter(arguments), "") in ("self", "cls"):
            del arguments[next(iter(arguments))]
        try:
            return fingerprint_value(arguments)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the arguments of {self._name} are not JSON ({error}); give once a fingerprint= of what counts"
            ) from None

    @cached_property
    def _hooks(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """How a result becomes JSON, and back. Looked up late, for an annotation may name what is defined below."""
        options = self._options
        if options.encode is None and options.decode is None:
            try:
                kind = typing.get_type_hints(self._function).get("return")
            except Exception:  # an annotation that cannot be evaluated says nothing
                kind = None
            if isinstance(kind, type) and hasattr(kind, "model_dump") and hasattr(kind, "model_validate"):
                return _reading_back(lambda value: value.model_dump(mode="json"), kind.model_validate)
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                return _reading_back(dataclasses.asdict, lambda data: kind(**data))
        return options.encode or _as_it_is, options.decode or _as_it_is


def completed(r: Reservation) -> Ending:
    """Return how a block ended that raised nothing: with its `response`, or its `result` as JSON."""
    return Ending("complete", r.response or json_response(r.result))


def after_error(error: BaseException, on_error: OnError) -> Ending:
    """Return how a block ended that raised: the error's type and text are what a final failure stores."""
    how = of_error(error, on_error)
    if how != "store":
        return Ending(how)
    facts = {"error": type(error).__name__, "message": str(error)[:LONGEST_MESSAGE]}
    return Ending("fail", StoredResponse(500, _JSON, json.dumps(facts, separators=(",", ":")).encode()))


def json_response(
    value: object, encode: Callable[..., object] | None = None, name: str = "the block"
) -> StoredResponse:
    """Return what to store for a result: JSON, or a tombstone where it has none."""
    try:
        text = json.dumps(value if encode is None else encode(value), separators=(",", ":"), allow_nan=False)
    except Exception as error:  # a hook may raise anything, and the work is done
        logger.warning("the result of %s cannot be stored as JSON (%s: %s)", name, type(error).__name__, error)
        return StoredResponse(200, omitted="not_encodable")
    return StoredResponse(200, _JSON, text.encode())


def _reading_back(
    write: Callable[[Any], object], read: Callable[[Any], object]
) -> tuple[Callable[..., object], Callable[..., object]]:
    """Refuse to store what duplicates would get back as something else, such as a tuple or a dataclass inside."""

    def checked(value: object) -> object:
        data = write(value)
        if read(json.loads(json.dumps(data))) != value:
            raise TypeError("it does not read back the same; give encode= and decode=")
        return data

    return checked, read


def _as_it_is(value: object) -> object:
    return value


def _chooser(given: object, function: inspect.Signature) -> Callable[[BoundArguments], object]:
    """Return how a constant, or a function of a call's arguments, becomes its value for one call."""
    if not callable(given):
        return lambda bound: given
    try:
        wanted = inspect.signature(given)
    except (TypeError, ValueError):  # some builtins do not say
        return lambda bound: given(*bound.args, **bound.kwargs)
    names = [name for name, p in wanted.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if names and len(names) == len(wanted.parameters) and function.parameters.keys() >= set(names):
        return lambda bound: given(**{name: bound.arguments[name] for name in names})
    try:
        wanted.bind(
            *(p for p in function.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            **{name: p for name, p in function.parameters.items() if p.kind == p.KEYWORD_ONLY},
        )
    except TypeError:
        raise ConfigurationError(
            f"a function of {wanted} cannot be given arguments of {function}; use the same names, or take them all"
        ) from None
    return lambda bound: given(*bound.args, **bound.kwargs)


def _qualified(function: Callable[..., object]) -> str:
    """Return module and qualified name; a script's own module by its file's name, as others import it."""
    module: str = function.__module__
    if module in ("__main__", "__mp_main__"):  # the second is how multiprocessing runs a script again
        names = getattr(inspect.unwrap(function), "__globals__", {})
        spec, file = names.get("__spec__"), names.get("__file__")
        module = spec.name if spec is not None else PurePath(file).stem if file else module
    return f"{module}.{function.__qualname__}"


def check_on_error(on_error: OnError) -> OnError:
    """Return it, or refuse what is none.

    Raises:
        ConfigurationError: it is not one of `ON_ERROR`.
    """
    if on_error not in ON_ERROR:
        raise ConfigurationError(f'on_error must be "release", "hold" or "store", not {on_error!r}')
    return on_error


def _check(options: OnceOptions, function: Callable[..., object], asynchronous: bool) -> None:
    """Refuse at the decoration what could only fail at the first call."""
    check_on_error(options.on_error)
    if options.lease is not None:
        check_lease(options.lease, options.policy.retention)
    if options.wait:
        check_seconds("wait", options.wait)
    if not (options.operation is None or isinstance(options.operation, str)):
        raise ConfigurationError(f"operation must be a str, or left out, not {options.operation!r}")
    for name in ("recover", "encode", "decode"):
        hook = getattr(options, name)
        if not (hook is None or callable(hook)):
            raise ConfigurationError(f"{name} must be a function, not {hook!r}")
    if not hasattr(function, "__qualname__"):
        raise ConfigurationError(f"once decorates functions, not {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{function.__qualname__} is a generator; once stores what a function returns")
    if inspect.iscoroutinefunction(function) != asynchronous:
        fix = "use Ledger.once" if asynchronous else "use AsyncLedger.once"
        kind = "a plain function" if asynchronous else "an async def"
        raise ConfigurationError(f"{function.__qualname__} is {kind}; {fix}")
    if not asynchronous and inspect.iscoroutinefunction(options.recover):
        raise ConfigurationError(f"recover of {function.__qualname__} is an async def; Ledger.once needs a plain one")
