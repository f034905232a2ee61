"""Rank 0's side of orders to all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trl_callback.follower import raise_answer
from trl_callback.rank_part import RankPart
from trl_callback.team import Team

PING = 30.0  # seconds after which an order is given only so that no rank's wait for one reaches its limit


class Crew:
    """Gives all ranks the same order, rank 0 included, and collects what came of it."""

    def __init__(self, team: Team, part: RankPart) -> None:
        self.team, self.part = team, part
        self._last = time.monotonic()

    def do(self, do: str, own: Callable[[], dict[str, Any]] | None = None, **said: Any) -> list[dict[str, Any]]:
        """Every rank's answer; raises the first failure once all have answered, so that the next order finds all."""
        self.team.order({"do": do, **said})
        failure: Exception | None = None
        answers: list[dict[str, Any]] = [{}]
        try:
            answers[0] = own() if own is not None else self.part.obey(do, **said)
        except Exception as error:  # noqa: BLE001 (raised below)
            failure = error
        answers += self.team.answers()
        self._last = time.monotonic()
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            raise_answer(rank, answer)
        return answers

    def dismiss(self) -> None:
        """End the other ranks' threads."""
        self.team.order({"do": "stop"})

    def ping(self) -> None:
        """Show that rank 0 is there."""
        if time.monotonic() - self._last >= PING:
            self.do("ping")
