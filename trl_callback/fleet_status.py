"""What several rollout servers say about the weights they serve, and which of them take part in a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from delta_sync.errors import DeltaSyncError, NotFoundError
from delta_sync.manifest import TensorState
from trl_callback.fleet import Fleet, Member
from trl_callback.http import CutError, ServerUnavailableError
from trl_callback.status_client import ServerStatus, StatusClient

logger = logging.getLogger(__name__)
GLANCE = 0.1  # seconds that are spent on a server that did not answer the last time, while another does


class Statuses(Protocol):
    """What waiting needs to know of one server or several."""

    @property
    def url(self) -> str:
        """The servers' URLs, fit to be shown."""

    def statuses(self) -> list[ServerStatus]:
        """What every server that answers says; what one of them raises if none does."""

    def admit(self, serves: Callable[[ServerStatus], bool]) -> None:
        """Have work given to those servers of which ``serves`` is true, of the others left out for now."""

    def tensors(self) -> dict[str, TensorState]:
        """Name -> element type, shape and digest of every tensor that is served."""


class FleetStatus:
    """Looks at all members of a fleet at once; one that does not answer holds up nobody."""

    def __init__(self, fleet: Fleet, *, timeout: float, patience: float, poll: float) -> None:
        self._fleet, self._timeout, self._patience, self._poll = fleet, timeout, patience, poll
        self._looks = [_Look(member, timeout) for member in fleet.members]

    @property
    def url(self) -> str:
        """All URLs, fit to be shown."""
        return self._fleet.shown

    def statuses(self) -> list[ServerStatus]:
        """What every server that answers says; NotFoundError, ServerUnavailableError or FormatError if none does."""
        return [status for _, status in self._look()]

    def tensors(self) -> dict[str, TensorState]:
        """Of the first server that answers: they are to serve the same model."""
        for look in self._looks:
            if look.answers:
                return look.client.tensors()
        return self._looks[0].client.tensors()

    def admit(self, serves: Callable[[ServerStatus], bool]) -> None:
        """Wait up to ``patience`` seconds for servers that took part and answer but do not serve it yet.

        Then go on without them. One that is left out already is not waited for, but taken back once it serves.
        """
        if len(self._looks) == 1:
            return
        deadline = time.monotonic() + self._patience
        while True:
            seen = self._look()
            ready = {id(look): serves(status) for look, status in seen}
            if all(ready[id(look)] for look, _ in seen if look.member.serves) or time.monotonic() >= deadline:
                break
            time.sleep(self._poll)
        for look in self._looks:
            look.take_part(ready.get(id(look), False))

    def _look(self) -> list[tuple[_Look, ServerStatus]]:
        for look in self._looks:
            look.begin()
        some = any(look.answers for look in self._looks)
        for look in self._looks:
            look.end(self._timeout if look.answers or not some else GLANCE)
        seen = [(look, look.status) for look in self._looks if look.status is not None]
        if not seen:
            raise self._none_answers()
        return seen

    def _none_answers(self) -> DeltaSyncError:
        errors = [look.error for look in self._looks if look.error is not None]
        waiting = [error for error in errors if not isinstance(error, NotFoundError)]  # worth another look
        return (waiting or errors or [ServerUnavailableError(self.url, expected="an answer", got="none yet")])[0]


class _Look:
    """One member's status, asked for in a thread of its own."""

    def __init__(self, member: Member, timeout: float) -> None:
        self.member, self.client = member, StatusClient(member.server, timeout=timeout)
        self.status: ServerStatus | None = None
        self.error: DeltaSyncError | None = None
        self.answers = True
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Ask, unless an earlier question is still open."""
        self.status = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="delta-sync-look", daemon=True)
            self._found: ServerStatus | None = None
            self._thread.start()

    def end(self, timeout: float) -> None:
        """Wait for the answer up to ``timeout`` seconds; CutError if this side has cut the connection."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        self.answers = not self._thread.is_alive() and self._found is not None
        if not self._thread.is_alive():
            self._thread, self.status = None, self._found
        if isinstance(self.error, CutError):
            raise self.error

    def take_part(self, serves: bool) -> None:
        """Whether the member is asked for completions from now on."""
        if serves != self.member.serves:
            what = "takes part again" if serves else "is left out of rollouts until it serves recent weights again"
            logger.warning("delta-sync: %s %s", self.client.url, what)
        self.member.serves = serves

    def _ask(self) -> None:
        try:
            self._found, self.error = self.client.status(), None
        except DeltaSyncError as error:
            self.error = error
