"""What a function decorated with `once` does, and what its duplicates get."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from idemredis import (
    AlreadyCompleted,
    AsyncLedger,
    ConfigurationError,
    FencedOut,
    HoldForReview,
    KeyInProgress,
    KeyReused,
    Ledger,
    NoReservation,
    Policy,
    PreviousAttemptFailed,
    Reservation,
    StoredResponse,
    current_reservation,
    fingerprint_value,
)
from tests.support import models
from tests.support.clock import SLACK, TurnedClock
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.subject import Mode
from tests.support.worker import MakeWorker, Worker

ROOT = Path(__file__).parents[2]


class Counted:
    """A function that remembers its calls."""

    def __init__(self, *, fails: BaseException | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fails = fails

    def function(self) -> Callable[..., Any]:
        def charge(order: int, amount: int = 10, *, note: str = "") -> object:
            """Charge an order."""
            self.calls.append((order, amount))
            if self.fails is not None:
                raise self.fails
            return {"order": order, "charged": amount}

        return charge


@pytest.fixture
def counted() -> Counted:
    return Counted()


def by_order(worker: Worker, counted: Counted, **settings: Any) -> Callable[..., Any]:
    return worker.once(
        counted.function(), **{"principal": "worker", "key": lambda order: f"o{order}", "operation": "", **settings}
    )


def test_a_duplicate_gets_the_result_without_running(worker: Worker, counted: Counted) -> None:
    charge = by_order(worker, counted)
    first = charge(1)
    assert first == {"order": 1, "charged": 10}
    assert charge(1) == charge(order=1) == charge(1, 10) == charge(1, amount=10, note="") == first
    assert charge(2)["order"] == 2
    assert counted.calls == [(1, 10), (2, 10)]


def test_the_result_is_json_that_anyone_can_read_in_the_row(worker: Worker, counted: Counted) -> None:
    by_order(worker, counted)(1)
    fields = worker.fields("o1")
    assert fields[b"response_body"] == b'{"order":1,"charged":10}'
    assert fields[b"response_headers"] == b'[["content-type","application/json"]]'
    assert fields[b"response_status"] == b"200"


@pytest.mark.parametrize("result", [None, 0, "", False, [], {}, [1, {"a": [None, "é\ud800"]}], 1.5, 2**70])
def test_each_json_value_comes_back_as_it_was(worker: Worker, result: object) -> None:
    runs: list[int] = []

    def work() -> object:
        runs.append(1)
        return result

    once = worker.once(work, principal="worker", key="k")
    assert once() == once() == result
    assert runs == [1]


def test_other_arguments_under_the_same_key_are_refused(worker: Worker, counted: Counted) -> None:
    charge = by_order(worker, counted)
    charge(1, 10)
    with worker.unchanged("o1"), pytest.raises(KeyReused):
        charge(1, 11)
    assert counted.calls == [(1, 10)]


def test_the_default_fingerprint_is_of_all_arguments_by_name_as_canonical_json(
    worker: Worker, counted: Counted
) -> None:
    by_order(worker, counted)(1)
    expected = fingerprint_value({"order": 1, "amount": 10, "note": ""})
    assert worker.fields("o1")[b"fingerprint"].decode() == expected


def test_a_fingerprint_of_ones_own_decides_what_counts(worker: Worker, counted: Counted) -> None:
    charge = by_order(worker, counted, fingerprint=lambda amount: fingerprint_value(amount))
    charge(1, note="first try")
    charge(1, note="second try")
    with pytest.raises(KeyReused):
        charge(1, 11)
    assert counted.calls == [(1, 10)]


def test_principal_key_and_fingerprint_may_be_constants(worker: Worker, counted: Counted) -> None:
    charge = by_order(worker, counted, key="yearly", fingerprint="2026")
    assert charge(1) == charge(2) == {"order": 1, "charged": 10}


def test_the_principal_may_be_a_function_of_the_arguments(worker: Worker, counted: Counted) -> None:
    charge = by_order(worker, counted, principal=lambda order: f"shop{order % 2}", key="k")
    assert charge(1)["order"] == 1
    assert charge(2)["order"] == 2
    assert worker.row("k", "shop1").status == worker.row("k", "shop0").status == "completed"


def test_a_function_of_other_names_gets_all_arguments_in_order(worker: Worker, counted: Counted) -> None:
    charge = by_order(worker, counted, key=lambda *all_of, **rest: f"{all_of}{rest}".replace(" ", ""))
    charge(amount=3, order=1)
    assert worker.fields("(1,3){'note'%3A''}") == {}  # the row's name has more of it encoded
    assert worker.row("(1,3){'note':''}").status == "completed"


def test_a_function_that_cannot_be_given_the_arguments_is_refused_at_the_decoration(
    worker: Worker, counted: Counted
) -> None:
    with pytest.raises(ConfigurationError, match="customer"):
        by_order(worker, counted, key=lambda customer: customer)


def test_it_decorates_methods_of_every_kind_and_self_and_cls_do_not_count(worker: Worker) -> None:
    runs: list[object] = []

    def once(**settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: worker.once(function, principal="worker", operation="", **settings)

    class Shop:
        @once(key=lambda order: f"m{order}")
        def method(self, order: int) -> object:
            runs.append(self)
            return order

        @classmethod
        @once(key=lambda order: f"c{order}")
        def of_class(cls, order: int) -> object:
            runs.append(cls)
            return order

        @staticmethod
        @once(key=lambda order: f"s{order}")
        def static(order: int) -> object:
            runs.append("static")
            return order

    shop = Shop()
    assert [shop.method(1), Shop().method(1)] == [1, 1]
    assert [shop.of_class(2), Shop.of_class(2)] == [2, 2]
    assert [shop.static(3), Shop.static(order=3)] == [3, 3]
    assert runs == [shop, Shop, "static"]
    for key in ("m1", "c2", "s3"):
        assert worker.row(key).fingerprint == fingerprint_value({"order": int(key[1])})


def test_it_may_stand_above_classmethod_and_staticmethod_too() -> None:
    ledger = Ledger.from_url("memory://")
    runs: list[object] = []

    class Shop:
        @ledger.once(principal=1, key=lambda order: f"c{order}")
        @classmethod
        def of_class(cls, order: int) -> int:
            runs.append(cls)
            return order

        @ledger.once(principal=1, key=lambda order: f"s{order}")
        @staticmethod
        def static(order: int) -> int:
            runs.append("static")
            return order

    assert [Shop.of_class(2), Shop().of_class(2), Shop.static(3), Shop().static(3)] == [2, 2, 3, 3]
    assert runs == [Shop, "static"]


def test_a_method_may_have_its_principal_from_self(worker: Worker) -> None:
    class Shop:
        def __init__(self, account: str) -> None:
            self.account = account

        charge = worker.once(lambda self, order: self.account, principal=lambda self: self.account, key="k")

    assert [Shop("a").charge(1), Shop("b").charge(1)] == ["a", "b"]


def test_two_functions_of_the_same_key_do_not_share_a_row(worker: Worker) -> None:
    def one() -> object:
        return 1

    def two() -> object:
        return 2

    first = worker.once(one, principal="worker", key="k")
    second = worker.once(two, principal="worker", key="k")
    assert [first(), second(), first()] == [1, 2, 1]
    name = f"{__name__}.{one.__qualname__}"
    assert worker.row("k", operation=name).response == StoredResponse(200, JSON, b"1")


JSON = (("content-type", "application/json"),)

SCRIPT = """
import multiprocessing, sys
from idemredis import Ledger

seen = []
ledger = Ledger.from_url("memory://", observers=[lambda event: seen.append(event.operation)])

@ledger.once(principal=1, key="k")
def send(): pass

def show():
    send()
    print(seen[0])

if __name__ == "__main__":
    if sys.argv[1:]:
        child = multiprocessing.get_context("spawn").Process(target=show)
        child.start()
        child.join()
    else:
        show()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["shop/sender.py"], "sender.send"),
        (["shop/sender.py", "in a spawned process"], "sender.send"),
        (["-m", "shop.sender"], "shop.sender.send"),
        (["-m", "shop.sender", "in a spawned process"], "shop.sender.send"),
    ],
)
def test_a_function_of_the_main_module_is_named_as_others_import_it(
    tmp_path: Path, words: list[str], name: str
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "sender.py").write_text(SCRIPT)
    command, env = [sys.executable, *words], {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=True)
    assert ran.stdout.strip() == name


def test_the_function_keeps_its_name_and_signature(counted: Counted, make_worker: MakeWorker, server: Any) -> None:
    plain = counted.function()
    decorated = make_worker("sync", server).ledger.once(principal="w", key="k")(plain)
    assert (decorated.__name__, decorated.__doc__) == ("charge", "Charge an order.")
    assert inspect.signature(decorated) == inspect.signature(plain)

    async def later() -> None: ...

    assert inspect.iscoroutinefunction(make_worker("async", server).ledger.once(principal="w", key="k")(later))


def plain() -> object:
    return 1


async def later() -> object:
    return 1


def many() -> Iterator[int]:
    yield 1


async def many_later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("mode", "function", "settings", "said"),
    [
        ("sync", later, {}, "AsyncLedger.once"),
        ("async", plain, {}, "Ledger.once"),
        ("sync", many, {}, "generator"),
        ("async", many_later, {}, "generator"),
        ("sync", plain, {"recover": later}, "recover"),
        ("sync", plain, {"recover": "look"}, "recover"),
        ("sync", plain, {"encode": "json"}, "encode"),
        ("sync", plain, {"on_error": "ignore"}, "on_error"),
        ("sync", plain, {"lease": 0}, "lease"),
        ("sync", plain, {"lease": 100_000}, "retention"),
        ("sync", plain, {"wait": -1}, "wait"),
        ("sync", plain, {"operation": 3}, "operation"),
        ("sync", 3, {}, "functions"),
    ],
)
def test_what_cannot_work_is_refused_at_the_decoration(
    mode: str, function: Any, settings: dict[str, Any], said: str
) -> None:
    ledger: Any = (Ledger if mode == "sync" else AsyncLedger).from_url("memory://")
    with pytest.raises(ConfigurationError, match=said):
        ledger.once(**{"principal": "w", "key": "k", **settings})(function)


def test_arguments_that_are_not_json_need_a_fingerprint_and_nothing_runs_without(worker: Worker) -> None:
    runs: list[object] = []
    settings: dict[str, Any] = {"principal": "worker", "key": "k", "operation": ""}
    once = worker.once(lambda what: runs.append(what), **settings)
    with pytest.raises(ConfigurationError, match="fingerprint="):
        once(object())
    assert (runs, worker.fields("k")) == ([], {})
    worker.once(lambda what: runs.append(what), fingerprint="f", **settings)(object())
    assert len(runs) == 1


@pytest.mark.parametrize("give", [models.give_receipt, models.give_model])
def test_a_dataclass_or_model_that_the_annotation_names_comes_back_as_one(
    worker: Worker, give: Callable[[], object]
) -> None:
    once = worker.once(give, principal="worker", key="k", operation="")
    assert once() == once() == give()
    assert json.loads(worker.fields("k")[b"response_body"]) in ({"charge": "ch_1", "amount": 100}, {"amount": 5})


@pytest.mark.parametrize("give", [models.give_basket, models.give_anything])
def test_what_would_come_back_as_something_else_is_not_kept(
    worker: Worker, give: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    once = worker.once(give, principal="worker", key="k")
    assert once() == give()
    with pytest.raises(AlreadyCompleted) as done:
        once()
    assert done.value.response.omitted == "not_encodable"
    assert give.__name__ in caplog.text


def test_hooks_make_any_result_json_and_back(worker: Worker) -> None:
    once = worker.once(
        models.give_basket,
        principal="worker",
        key="k",
        operation="",
        encode=models.basket_to_json,
        decode=models.basket_from_json,
    )
    assert once() == once() == models.give_basket()
    assert worker.fields("k")[b"response_body"] == b'[{"charge":"ch_1","amount":100}]'


@pytest.mark.parametrize(("result", "why"), [({1, 2}, "not_encodable"), ("x" * 99, "too_large")])
def test_a_result_that_cannot_be_kept_is_the_first_callers_and_duplicates_are_told(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server, result: object, why: str
) -> None:
    worker = make_worker(mode, valkey_server, policy=Policy(max_body=100))
    runs: list[int] = []

    def work() -> object:
        runs.append(1)
        return result

    once = worker.once(work, principal="worker", key="k", operation="")
    assert once() == result
    with pytest.raises(AlreadyCompleted, match=why) as done:
        once()
    assert done.value.response.omitted == why
    assert (runs, worker.row("k").status) == ([1], "completed")


def test_an_encode_that_fails_costs_the_caller_nothing(worker: Worker) -> None:
    once = worker.once(plain, principal="worker", key="k", encode=lambda value: 1 / 0)
    assert once() == 1
    with pytest.raises(AlreadyCompleted):
        once()


def test_the_route_of_the_row_is_the_function_whatever_its_operation(worker: Worker) -> None:
    worker.once(plain, principal="worker", key="k", operation="charge")()
    assert worker.row("k", operation="charge").route == f"{__name__}.plain"


def test_an_exception_lets_the_next_call_run(worker: Worker, counted: Counted) -> None:
    counted.fails = ZeroDivisionError()
    charge = by_order(worker, counted)
    with pytest.raises(ZeroDivisionError):
        charge(1)
    counted.fails = None
    assert charge(1) == {"order": 1, "charged": 10}
    assert worker.row("o1").generation == 2


def test_a_held_exception_keeps_duplicates_away_for_the_lease(
    worker: Worker, counted: Counted, clock: TurnedClock
) -> None:
    counted.fails = ZeroDivisionError()
    charge = by_order(worker, counted, on_error="hold")
    with pytest.raises(ZeroDivisionError):
        charge(1)
    with pytest.raises(KeyInProgress) as busy:
        charge(1)
    assert 30.0 - SLACK < busy.value.retry_after <= 30.0
    clock.turn(30)
    counted.fails = None
    assert charge(1)["charged"] == 10


def test_a_stored_exception_is_what_duplicates_get(worker: Worker, counted: Counted) -> None:
    counted.fails = ValueError("card expired")
    charge = by_order(worker, counted, on_error="store")
    with pytest.raises(ValueError, match="card expired"):
        charge(1)
    for _ in range(2):
        with pytest.raises(PreviousAttemptFailed, match="card expired") as failed:
            charge(1)
    assert json.loads(failed.value.response.body) == {"error": "ValueError", "message": "card expired"}
    assert len(counted.calls) == 1


def test_an_already_completed_from_inside_is_not_taken_for_ones_own(worker: Worker) -> None:
    def work() -> object:
        raise AlreadyCompleted(StoredResponse(200, (), b'"of another operation"'))

    once = worker.once(work, principal="worker", key="k", operation="")
    with pytest.raises(AlreadyCompleted):
        once()
    assert worker.row("k").status == "pending"


def left_behind(worker: Worker, clock: TurnedClock, fingerprint: str) -> Reservation:
    """An earlier attempt that saved a checkpoint and died."""
    earlier = worker.looking.claim("worker", "k", fingerprint)
    assert isinstance(earlier, Reservation)
    worker.looking.checkpoint(earlier, "charged", {"charge": "ch_1"})
    clock.turn(31)
    return earlier


def test_recover_answers_for_an_attempt_that_did_not_finish(worker: Worker, clock: TurnedClock) -> None:
    earlier = left_behind(worker, clock, "f")
    seen: list[Reservation] = []

    def recover(r: Reservation) -> object:
        seen.append(r)
        return {"found": r.last_checkpoint}

    def work() -> object:
        raise AssertionError("ran again")

    once = worker.once(work, principal="worker", key="k", operation="", fingerprint="f", recover=recover)
    expected = {"found": ["charged", {"charge": "ch_1"}]}
    assert json.loads(json.dumps(once())) == once() == expected
    assert [r.generation for r in seen] == [2]
    assert seen[0].downstream_key("card") == earlier.downstream_key("card")


def test_recover_may_have_the_function_run(worker: Worker, clock: TurnedClock) -> None:
    left_behind(worker, clock, "f")
    once = worker.once(plain, principal="worker", key="k", operation="", fingerprint="f", recover=lambda r: None)
    assert once() == 1


def test_recover_is_not_asked_at_the_first_attempt(worker: Worker) -> None:
    once = worker.once(plain, principal="worker", key="k", recover=lambda r: 1 / 0)
    assert once() == once() == 1


def test_recover_may_leave_the_decision_to_a_person(worker: Worker, clock: TurnedClock) -> None:
    left_behind(worker, clock, "f")

    def recover(r: Reservation) -> object:
        raise HoldForReview("the card network has no record")

    once = worker.once(plain, principal="worker", key="k", operation="", fingerprint="f", recover=recover)
    with pytest.raises(HoldForReview):
        once()
    assert worker.events == ["taken_over", "held_for_review"]
    with pytest.raises(KeyInProgress):
        once()
    assert worker.row("k").status == "pending"


def test_recover_of_an_async_function_may_be_async(make_worker: MakeWorker, server: Any, clock: TurnedClock) -> None:
    worker = make_worker("async", server)
    left_behind(worker, clock, "f")

    async def recover(r: Reservation) -> object:
        return r.generation

    decorate = worker.ledger.once(principal="worker", key="k", operation="", fingerprint="f", recover=recover)
    assert worker.awaited(decorate(later))() == 2


def test_the_function_can_ask_for_its_reservation(worker: Worker) -> None:
    def inner() -> object:
        return current_reservation.key

    def outer() -> object:
        owner = current_reservation.owner
        its_key = nested() if worker.mode == "sync" else None
        assert current_reservation.owner == owner
        assert current_reservation.held
        return [current_reservation.key, current_reservation.generation, its_key]

    nested = worker.once(inner, principal="worker", key="inner")
    expected = ["outer", 1, "inner" if worker.mode == "sync" else None]
    assert worker.once(outer, principal="worker", key="outer")() == expected
    assert not current_reservation
    for error in (NoReservation, LookupError, RuntimeError):
        with pytest.raises(error):
            _ = current_reservation.key
        with pytest.raises(error):
            current_reservation.result = 1


@contextmanager
def overtaking(worker: Worker, clock: TurnedClock, then: Callable[[Reservation], object]) -> Iterator[Any]:
    """Yield a `once` function during whose call another attempt takes its row over, and does this with it."""
    with ExitStack() as from_then_on:

        def overtaken(finds_out: bool = False) -> object:
            clock.turn(31)
            successor = worker.looking.claim("worker", "k", "f")
            assert isinstance(successor, Reservation)
            then(successor)
            from_then_on.enter_context(worker.unchanged("k"))
            if finds_out:
                worker.looking.renew(current_reservation)
            return "mine"

        yield worker.once(overtaken, principal="worker", key="k", operation="", fingerprint="f")


@pytest.mark.parametrize("finds_out", [False, True])
def test_who_is_fenced_out_returns_the_stored_result_so_that_all_callers_agree(
    worker: Worker, clock: TurnedClock, finds_out: bool
) -> None:
    stored = StoredResponse(200, JSON, b'"theirs"')
    with overtaking(worker, clock, lambda r: worker.looking.complete(r, stored)) as once:
        assert once(finds_out) == "theirs"
        assert once(finds_out) == "theirs"
    emitted_here = [] if finds_out else ["fenced"]
    assert worker.events == ["claimed", *emitted_here, "replayed"]


@pytest.mark.parametrize("left", ["pending", "released"])
def test_who_is_fenced_out_is_told_where_there_is_no_result(worker: Worker, clock: TurnedClock, left: str) -> None:
    with (
        overtaking(worker, clock, worker.looking.release if left == "released" else lambda r: None) as once,
        pytest.raises(FencedOut),
    ):
        once()


def test_who_is_fenced_out_by_a_stored_failure_is_told_of_it(worker: Worker, clock: TurnedClock) -> None:
    failure = StoredResponse(500, JSON, b'{"error":"Declined"}')
    with (
        overtaking(worker, clock, lambda r: worker.looking.fail(r, failure)) as once,
        pytest.raises(PreviousAttemptFailed, match="Declined") as failed,
    ):
        once()
    assert failed.value.response == failure


def test_who_is_fenced_out_by_a_result_that_was_not_stored_is_told_that_the_operation_is_completed(
    worker: Worker, clock: TurnedClock
) -> None:
    tombstone = StoredResponse(200, JSON, b'"theirs"').without_body("too_large")
    with (
        overtaking(worker, clock, lambda r: worker.looking.complete(r, tombstone)) as once,
        pytest.raises(AlreadyCompleted, match="too_large"),
    ):
        once()


def test_who_is_fenced_out_learns_nothing_of_another_request_with_its_key(worker: Worker) -> None:
    def emptied() -> object:
        worker.looking.client.delete(current_reservation.row)
        other = worker.looking.claim("worker", "k", "another request")
        assert isinstance(other, Reservation)
        worker.looking.complete(other, StoredResponse(200, JSON, b'"theirs"'))
        return "mine"

    once = worker.once(emptied, principal="worker", key="k", operation="", fingerprint="f")
    with pytest.raises(FencedOut):
        once()


def test_an_exception_of_a_function_that_was_fenced_out_is_what_its_caller_gets(
    worker: Worker, clock: TurnedClock
) -> None:
    def overtaken() -> object:
        clock.turn(31)
        successor = worker.looking.claim("worker", "k", "f")
        assert isinstance(successor, Reservation)
        worker.looking.complete(successor, StoredResponse(200, JSON, b'"theirs"'))
        raise ZeroDivisionError

    once = worker.once(overtaken, principal="worker", key="k", operation="", fingerprint="f")
    with pytest.raises(ZeroDivisionError):
        once()
    assert worker.events == ["claimed", "fenced"]


def test_a_value_that_redis_is_not_there_for_is_the_callers_all_the_same(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        worker = make_worker(mode, valkey_server, url=proxy.url)

        def work() -> object:
            proxy.refuse()
            return "done"

        once = worker.once(work, principal="worker", key="k", operation="")
        assert once() == "done"
        proxy.refuse(False)
        worker.do("close")
        assert once() == "done"
        assert worker.row("k").generation == 1
