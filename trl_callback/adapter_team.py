"""A LoRA adapter that each of several ranks holds whole (DDP, ZeRO-1 and 2): rank 0 publishes it for all."""

from __future__ import annotations

from collections.abc import Callable

from delta_sync.errors import MappingError
from trl_callback.adapter_session import AdapterSession
from trl_callback.config import DeltaSyncConfig
from trl_callback.fleet_status import Statuses
from trl_callback.metrics import Metrics
from trl_callback.session import Interval, Subject
from trl_callback.supported import has_shards
from trl_callback.team import Team

MARGIN = 300.0  # seconds that a rank waits for rank 0 beyond the longest wait that it may be in


class AdapterTeamSession:
    """See AdapterSession; called by all ranks at the same point of training, but for ``sync_alone``.

    What stops rank 0 makes all raise there, with the reason.
    """

    def __init__(self, subject: Subject, config: DeltaSyncConfig, status: Statuses | None, metrics: Metrics) -> None:
        if has_shards(subject.model):
            raise MappingError(
                'model with lora="adapter"',
                expected="weights that each rank holds whole",
                got="shards (FSDP2 or ZeRO-3)",
                remedy="train with DDP or ZeRO stage <= 2",
            )
        self._session: AdapterSession | None = None
        longest = max(config.sync_timeout, config.publish_timeout, config.flush_timeout)
        self._team = Team(max(2 * longest + MARGIN, subject.ranks_wait))

        def begin() -> None:
            if self._team.rank == 0:
                self._session = AdapterSession(subject, config, status, metrics)

        try:
            self._team.together(begin)
        except BaseException:
            self.close()
            raise

    def optimizing(self) -> None:
        """The optimizer's step begins: until ``step_done`` the adapter is no step's."""
        if self._session is not None:
            self._session.optimizing()

    def step_done(self, step: int, optimizer: Interval | None = None) -> None:
        """After an optimizer step: rank 0 leaves the adapter to its publisher."""
        self._together(lambda session: session.step_done(step, optimizer))

    def sync(self, step: int) -> None:
        """Return once the server serves weights at most ``max_staleness`` steps older than ``step``."""
        self._together(lambda session: session.sync(step))

    def sync_alone(self, step: int) -> None:
        """On rank 0, without the others: wait again for what ``sync`` waited for."""
        if self._session is not None:
            self._session.sync(step)

    def finish(self, step: int) -> None:
        """Publish what is not published yet, and wait until it is durable."""
        self._together(lambda session: session.finish(step))

    def close(self) -> None:
        """End rank 0's thread; what is not durable by now is left to the next run."""
        if self._session is not None:
            self._session.close()
        self._team.close()

    def _together(self, work: Callable[[AdapterSession], None]) -> None:
        self._team.together(lambda: None if self._session is None else work(self._session))
