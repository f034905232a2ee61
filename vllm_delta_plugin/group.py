"""What an engine must settle with others before it changes weights; ``Alone`` is an engine that need not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from delta_sync.errors import DeltaSyncError, IntegrityError
from delta_sync.plan import Plan
from vllm_delta_plugin.main_thread import MainThread
from vllm_delta_plugin.proof import Sums
from vllm_delta_plugin.ranks import RankError, Reply

T = TypeVar("T")


class PeerError(RankError):
    """Another engine of the group reported an error: ``rank`` is that engine's number."""

    def __init__(self, engine: int, kind: str, message: str, object_key: str | None = None) -> None:
        super().__init__(engine, kind, message, object_key)
        self.args = (f"engine {engine}: {message}",)

    def __reduce__(self) -> tuple[object, ...]:
        return (PeerError, (self.rank, self.kind, self.message, self.object_key))


class Group(Protocol):
    """Engines that take every version together. Sums and replies of all ranks are in the engines' order."""

    can_load: bool  # whether weights may be overwritten in place while the engine is paused

    def share(self, replies: Sequence[Reply]) -> list[Reply]:
        """All ranks' replies to "attach", given this engine's; on the engine's thread, at start."""

    def own(self, sums: Sequence[Sums]) -> Sequence[Sums]:
        """Those of this engine's ranks, out of all ranks'."""

    def with_own(self, sums: Sequence[Sums], found: Sequence[Sums]) -> Sequence[Sums]:
        """All ranks' sums, with ``found`` in the place of this engine's."""

    def open(self, plan: Plan, base: str | None) -> None:
        """This engine begins on a plan; ``base``: the state digest of what is live."""

    def exchange(self, parts: Sequence[Sums] | None) -> Sequence[Sums]:
        """All ranks' staged sums, given this engine's (None: nothing has to change), once every engine is ready.

        PeerError if another one is not; SyncTimeoutError if one is late.
        """

    def fail(self, error: Exception) -> None:
        """Tell the others, at any time, that this engine won't take the plan; once, and not what they told it."""

    def check(self) -> None:
        """PeerError if another engine won't take the plan, SyncTimeoutError if it was given up: why go on?"""

    def commit(self, main: MainThread, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine's thread between the same two steps as the others; SyncTimeoutError."""

    def agree(self, ok: bool) -> int | None:
        """Within that function: an engine at which it failed, if there is one; the same answer on all."""

    def report_damage(self, found: Sequence[Sums], error: DeltaSyncError, copies_differ: bool) -> bool:
        """Tell the others that this engine's live weights are not what was proven; whether there are others."""

    def damage(self, sums: Sequence[Sums]) -> tuple[Sequence[Sums], IntegrityError, bool] | None:
        """Such news of another engine: all ranks' sums with what it found, its error, whether its copies differ."""

    def hold(self, version: int | None) -> None:
        """Tell the others at which version an operator holds all; None: at none."""

    def refuse(self, refusal: Mapping[str, Any] | None) -> None:
        """Tell the others what is refused from now on; None: nothing any more."""

    def shown(self) -> Mapping[str, Any]:
        """What status says of it."""


class Alone:
    """One engine, whose ranks hold the whole model; see Group."""

    can_load = True

    def share(self, replies: Sequence[Reply]) -> list[Reply]:
        """See Group."""
        return list(replies)

    def own(self, sums: Sequence[Sums]) -> Sequence[Sums]:
        """See Group."""
        return sums

    def with_own(self, sums: Sequence[Sums], found: Sequence[Sums]) -> Sequence[Sums]:
        """See Group."""
        return found

    def open(self, plan: Plan, base: str | None) -> None:
        """See Group."""

    def exchange(self, parts: Sequence[Sums] | None) -> Sequence[Sums]:
        """See Group."""
        return parts or ()

    def fail(self, error: Exception) -> None:
        """See Group."""

    def check(self) -> None:
        """See Group."""

    def commit(self, main: MainThread, function: Callable[[], T]) -> T:
        """See Group."""
        return main.run(function)

    def agree(self, ok: bool) -> int | None:
        """See Group."""
        return None

    def report_damage(self, found: Sequence[Sums], error: DeltaSyncError, copies_differ: bool) -> bool:
        """See Group."""
        return False

    def damage(self, sums: Sequence[Sums]) -> tuple[Sequence[Sums], IntegrityError, bool] | None:
        """See Group."""
        return None

    def hold(self, version: int | None) -> None:
        """See Group."""

    def refuse(self, refusal: Mapping[str, Any] | None) -> None:
        """See Group."""

    def shown(self) -> Mapping[str, Any]:
        """See Group."""
        return {}


ALONE = Alone()
