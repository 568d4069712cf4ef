"""Errors that are sent to another process keep their class and their facts."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from idemredis import StoredResponse, errors

STORED = StoredResponse(201, (("content-type", "text/plain"), ("link", "a"), ("link", "b")), b"\xff\x00 secret")
TOMBSTONE = StoredResponse(200, omitted="too_large")

ERRORS = [
    errors.IdempotencyError("what"),
    errors.ConfigurationError("lease must be shorter"),
    errors.InvalidKey("too long"),
    errors.InvalidPrincipal("None"),
    errors.InvalidResponse("not bytes"),
    errors.LedgerUnavailable("no reply", 1.5, False),
    errors.LedgerUnavailable("no reply", seconds=0.5),
    errors.NotDurable("too few", acknowledged=0, required=1, seconds=0.5),
    errors.CorruptRow("no owner", 12.5),
    errors.CorruptRow("no owner"),
    errors.FencedOut("generation 1"),
    errors.KeyInProgress(1.5),
    errors.KeyReused(),
    errors.KeyReused("0123456789ab"),
    errors.AlreadyCompleted(STORED),
    errors.AlreadyCompleted(TOMBSTONE),
    errors.EffectDone(STORED),
    errors.EffectDone(TOMBSTONE, "0123456789ab"),
    errors.PreviousAttemptFailed(STORED),
    errors.HoldForReview("look"),
    errors.NoReservation("none"),
]


def same(one: BaseException, other: BaseException) -> bool:
    def facts(error: BaseException) -> object:
        return type(error), str(error), repr(error), error.args, vars(error)

    return facts(one) == facts(other)


def test_each_error_is_tried() -> None:
    kinds = {getattr(errors, name) for name in errors.__all__}
    assert {type(error) for error in ERRORS} == kinds


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_is_made_again_from_its_arguments_as_json(error: errors.IdempotencyError) -> None:
    arguments = json.loads(json.dumps(error.args))
    again = type(error)(*arguments)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert json.loads(json.dumps(again.args)) == arguments


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_can_be_pickled_and_copied(error: errors.IdempotencyError) -> None:
    error = copy.copy(error)
    error.add_note("seen by worker 7")
    assert same(pickle.loads(pickle.dumps(error)), error)
    assert same(copy.deepcopy(error), error)


class Declined(errors.PreviousAttemptFailed):
    """An application's own error, with a constructor of its own."""

    def __init__(self, response: StoredResponse, card: str) -> None:
        super().__init__(response)
        self.card = card


def test_an_error_of_an_application_can_be_pickled() -> None:
    error = Declined(STORED, "tok_visa")
    assert same(pickle.loads(pickle.dumps(error)), error)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_an_error_comes_through_a_result_back_end_of_celery(error: errors.IdempotencyError, serializer: str) -> None:
    settings = {"result_serializer": serializer, "accept_content": ["json", "pickle"]}
    app = Celery(set_as_current=False, backend="cache+memory://", config_source=settings)
    backend: Any = app.backend
    task = uuid4().hex  # the back end is one for the whole process
    backend.mark_as_failure(task, error)
    with pytest.raises(type(error)) as got:
        app.AsyncResult(task).get()
    assert (type(got.value), str(got.value)) == (type(error), str(error))
    assert vars(got.value) == vars(error)


def test_a_lost_reply_before_the_error_is_not_forgotten_on_the_way() -> None:
    error = errors.LedgerUnavailable("Redis is loading", 0.5, False)
    error.after_lost_reply()
    again = errors.LedgerUnavailable(*json.loads(json.dumps(error.args)))
    assert (again.unknown, again.seconds) == (True, 0.5)
    assert str(again).endswith("the reply to an earlier try was lost; it is not known whether it ran")


def test_the_representation_of_an_error_shows_no_stored_body() -> None:
    assert "secret" not in repr(errors.AlreadyCompleted(STORED))
    assert "c2VjcmV0" not in repr(errors.AlreadyCompleted(STORED))
