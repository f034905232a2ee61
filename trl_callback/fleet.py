"""Several rollout servers as one: each takes work as it finishes work, one that fails is left out until it is back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trl_callback.http import Server, ServerUnavailableError

LANES = 2  # parts that one server of several works on at a time: one computes while the other's answer travels
PARTS = 4  # of its fair share of a batch that one server of several is given at a time, at least


@dataclass
class Member:
    """One server, whether it is asked now, and its model's name, empty until it is learnt."""

    server: Server
    serves: bool = True
    model: str = ""


class Fleet:
    """The servers of one user of them: a trainer's own rollouts, or those that run ahead."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.members = [Member(server) for server in servers]

    @property
    def shown(self) -> str:
        """All URLs, fit to be shown."""
        return ", ".join(member.server.url.shown for member in self.members)

    def cut(self) -> None:
        """Break off every request, see ``Server.cut``."""
        for member in self.members:
            member.server.cut()

    def parts(self, count: int) -> deque[range]:
        """``range(count)`` in parts that are asked for one by one: of one server all at once, it batches better."""
        servers = len(self.members)
        size = count if servers == 1 else max(1, count // (PARTS * servers))
        return deque(range(start, min(count, start + size)) for start in range(0, count, size))

    def work_off(self, parts: deque[range], ask: Callable[[Member, range], None]) -> ServerUnavailableError | None:
        """Call ``ask`` for every part, side by side, on members that serve; a part that is done leaves ``parts``.

        A member that can't be reached serves no more, its part stays, and its error is returned. Any other error is
        raised, once no call is running.
        """
        crew = _Crew(parts, ask)
        ready = [member for member in self.members if member.serves]
        if not ready:  # of all that failed one may be back
            ready = self.members
            for member in ready:
                member.serves = True
        if len(self.members) == 1:
            crew.work(ready[0])
        else:
            crew.work_side_by_side(ready)
        if crew.failure is not None:
            raise crew.failure
        return crew.unavailable


class _Crew:
    """Threads that take parts off one list until it is empty, or until one of them fails for good."""

    def __init__(self, parts: deque[range], ask: Callable[[Member, range], None]) -> None:
        self._parts, self._ask = parts, ask
        self.failure: BaseException | None = None
        self.unavailable: ServerUnavailableError | None = None

    def work_side_by_side(self, members: Sequence[Member]) -> None:
        """``work`` on every member, ``LANES`` times each, until all have ended."""
        threads = [
            threading.Thread(target=self.work, args=(member,), name="delta-sync-lane", daemon=True)
            for member in members
            for _ in range(LANES)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            self.failure = error  # nobody waits any more: no lane takes another part
            raise

    def work(self, member: Member) -> None:
        """Take parts and ask ``member`` for them until there are none left, or it fails."""
        while member.serves and self.failure is None:
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            try:
                self._ask(member, part)
            except ServerUnavailableError as error:
                member.serves, self.unavailable = False, error
                self._parts.append(part)
            except BaseException as error:  # noqa: BLE001 (the caller's thread raises it)
                self.failure = error
