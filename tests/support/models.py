"""Functions and result types for `once` that other modules import by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass
class Receipt:
    charge: str
    amount: int


@dataclass
class Basket:
    receipts: list[Receipt]


class Model:
    """The part of a pydantic model's interface that `once` uses."""

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and other.amount == self.amount

    __hash__ = None  # type: ignore[assignment]

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return {"amount": self.amount}

    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> Self:
        return cls(**data)


def give_receipt() -> Receipt:
    return Receipt("ch_1", 100)


def give_model() -> Model:
    return Model(5)


def give_basket() -> Basket:
    return Basket([Receipt("ch_1", 100)])


def basket_to_json(basket: Basket) -> object:
    return [asdict(receipt) for receipt in basket.receipts]


def basket_from_json(data: list[dict[str, Any]]) -> Basket:
    return Basket([Receipt(**receipt) for receipt in data])


def give_anything() -> object:
    return Receipt("ch_1", 100)
