"""Measure things in turns, so that a noisy machine is noisy for all, and hold their medians against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Figure", "Turns", "in_turns"]


@dataclass
class Figure:
    """One line of a table: a measured value, and what it should be at the most (or at least)."""

    what: str
    value: float
    unit: str
    aim: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def missed(self) -> bool:
        if self.aim is None:
            return False
        return self.value < self.aim if self.at_least else self.value > self.aim

    def line(self) -> str:
        aim = (
            ""
            if self.aim is None
            else f"{'≥' if self.at_least else '≤'} {self.aim:g}{'  MISSED' if self.missed else ''}"
        )
        return f"{self.what:<58} {self.value:>10.2f} {self.unit:<5} {aim:<15} {self.note}".rstrip()


@dataclass
class Turns:
    """Microseconds of each call, by name and round."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def p50(self, name: str) -> float:
        return statistics.median(self._all(name))

    def best(self, name: str) -> float:
        """The median of the round that was disturbed least: what the code itself costs."""
        return min(statistics.median(times) for times in self.rounds[name])

    def p99(self, name: str) -> float:
        return statistics.quantiles(self._all(name), n=100)[98]

    def ratio(self, name: str, *others: str, less: str = "") -> float:
        """The median over the rounds of `name` (less another) to the sum of the others, medians of one round each."""
        medians = {each: [statistics.median(times) for times in rounds] for each, rounds in self.rounds.items()}
        ratios = []
        for i, value in enumerate(medians[name]):
            rest = medians[less][i] if less else 0.0
            ratios.append((value - rest) / sum(medians[other][i] for other in others))
        return statistics.median(ratios)

    def note(self, *names: str) -> str:
        return "; ".join(f"{name} p50 {self.p50(name):.1f} p99 {self.p99(name):.0f} µs" for name in names)

    def _all(self, name: str) -> list[float]:
        return [each for times in self.rounds[name] for each in times]


def in_turns(actions: Mapping[str, Callable[[], object]], rounds: int = 40, calls: int = 100) -> Turns:
    """Call each action `calls` times in each round, all of them in turn, after a round that does not count."""
    turns = Turns({name: [] for name in actions})
    for number in range(rounds + 1):
        for name, action in actions.items():
            times = []
            for _ in range(calls):
                began = time.perf_counter()
                action()
                times.append((time.perf_counter() - began) * 1e6)
            if number:
                turns.rounds[name].append(times)
    return turns
