"""What a user of `reserve` and `once` writes, as mypy --strict sees it. Nothing here runs."""

from __future__ import annotations

from typing import assert_type

from idemredis import (
    AsyncLedger,
    AsyncReservation,
    HoldForReview,
    Ledger,
    Reservation,
    StoredResponse,
    current_reservation,
    fingerprint_value,
)

ledger = Ledger.from_url("memory://")
async_ledger = AsyncLedger.from_url("memory://")


def look(r: Reservation) -> list[int] | None:
    if r.last_checkpoint is None:
        raise HoldForReview(r.downstream_key("gateway"))
    return None


@ledger.once(principal="shop", key=lambda order: f"order-{order}", recover=look, on_error="store", wait=2.0)
def charge(order: int, note: str = "") -> list[int]:
    ledger.checkpoint(current_reservation, "charged", {"order": order})
    return [order]


@async_ledger.once(principal=lambda order: order % 2, key="k", fingerprint=lambda order: str(order), operation="c")
async def charge_later(order: int) -> str:
    return str(order)


class Shop:
    @ledger.once(principal=1, key="yearly")
    def close(self, year: int) -> None: ...


def calls() -> None:
    assert_type(charge(1, note=""), list[int])
    charge("1")  # type: ignore[arg-type]
    assert_type(Shop().close(2026), None)
    with ledger.reserve("shop", "k", fingerprint_value([1]), "op", lease=5, wait=1, on_error="hold", route="r") as r:
        assert_type(r, Reservation)
        assert_type(r.route, str)
        r.checkpoint("half")
        r.result = {"done": True}
        r.response = StoredResponse(204)
        r.results = 1  # type: ignore[attr-defined]
    with ledger.reserve("shop", "k", "f", on_error="ignore"):  # type: ignore[arg-type]
        pass


async def awaits() -> None:
    assert_type(await charge_later(1), str)
    async with async_ledger.reserve("shop", "k", "f") as r:
        assert_type(r, AsyncReservation)
        await r.checkpoint("half")
