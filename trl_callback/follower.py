"""Ranks other than 0: a background thread that does what rank 0's publisher orders."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from delta_sync import errors
from delta_sync.errors import DeltaSyncError
from trl_callback.rank_part import RankPart
from trl_callback.team import Team


class Follower:
    """Obeys until it is told to stop, or until rank 0 is gone."""

    def __init__(self, team: Team, part: RankPart) -> None:
        self._team, self._part = team, part
        self.failure: BaseException | None = None
        self._heard = time.monotonic()  # when rank 0's last order was carried out
        self._thread = threading.Thread(target=self._run, name="delta-sync-follower", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until rank 0 has ended this; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def leave(self, quiet: float, most: float) -> bool:
        """Obey until rank 0 ends this, or gives no order for ``quiet`` seconds, or ``most`` have passed."""
        began = time.monotonic()
        while not self.join(0.1) and time.monotonic() < min(began + most, max(began, self._heard) + quiet):
            pass
        return self.join(0)

    def raise_if_failed(self) -> None:
        """Raise what ended the thread before its time."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while (order := self._team.next_order())["do"] != "stop":
                self._heard = math.inf
                self._team.answer(_obey(self._part, self._team, order))
                self._heard = time.monotonic()
        except BaseException as error:  # noqa: BLE001 (the training thread raises it)
            self.failure = error


def _obey(part: RankPart, team: Team, order: dict[str, Any]) -> dict[str, Any]:
    try:
        if order["do"] == "anchor":
            for *_, bits in part.runs(frozenset(order["names"])):
                team.send_bits(bits)
            return {}
        return part.obey(**order)
    except Exception as error:  # noqa: BLE001 (rank 0 raises it)
        kind = type(error).__name__ if isinstance(error, DeltaSyncError) else "DeltaSyncError"
        return {"failed": kind, "reason": f"{type(error).__name__}: {error}"}


def raise_answer(rank: int, answer: dict[str, Any]) -> None:
    """Raise, on rank 0, what another rank's answer says went wrong there."""
    if "failed" in answer:
        kind = getattr(errors, answer["failed"], DeltaSyncError)
        raise kind(f"rank {rank}", expected="its part of the weights published", got=answer["reason"])
