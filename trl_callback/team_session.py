"""One training run over several ranks: each compares and stores its own shards, rank 0 commits what all stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from delta_sync.at_exit import at_exit, not_at_exit
from delta_sync.delta_file import DEFAULT_CODEC
from delta_sync.errors import MappingError
from delta_sync.store.open import open_store
from delta_sync.tensor_delta import TensorDelta
from trl_callback.config import CODECS, DeltaSyncConfig
from trl_callback.crew import Crew
from trl_callback.fleet_status import Statuses
from trl_callback.follower import Follower
from trl_callback.metrics import Metrics
from trl_callback.publisher import LAST_CALL, STOP
from trl_callback.rank_part import RankPart
from trl_callback.session import (
    AskedServer,
    Interval,
    ServingDtypes,
    Session,
    Subject,
    ask,
    begin_trace,
    serving_dtypes,
)
from trl_callback.shard_image import ShardImage
from trl_callback.shard_snapshot import Key
from trl_callback.team import Team
from trl_callback.team_chain import TeamChain, TeamChanges
from trl_callback.team_snapshot import TeamSnapshot, describe

MARGIN = 300.0  # seconds that a rank waits for the others beyond the longest wait that one of them may be in


class TeamSession:
    """Every rank has one; its methods, but for ``sync_alone``, are called by all ranks at the same point of training.

    Whatever stops one rank makes all raise there, with the reason. Rank 0's publisher decides when a step is captured:
    only when nothing is in flight, so that all ranks' captures are of the same step and relative to the same version.
    A step left out loses nothing: the next capture holds its changes.
    """

    def __init__(self, subject: Subject, config: DeltaSyncConfig, status: Statuses | None, metrics: Metrics) -> None:
        longest = max(config.sync_timeout, config.publish_timeout, config.flush_timeout)
        self._team = team = Team(max(2 * longest + MARGIN, subject.ranks_wait))
        self._flush_timeout = config.flush_timeout
        self._metrics = metrics
        self._lead: _Lead | None = None
        self._crew: Crew | None = None
        self._follower: Follower | None = None
        self._server = AskedServer()
        self._deltas: Mapping[Key, TensorDelta] = {}
        self._resting = False

        try:
            self._open(subject, config, status)
        except BaseException:
            team.close()
            raise
        at_exit(self._leave)

    def _open(self, subject: Subject, config: DeltaSyncConfig, status: Statuses | None) -> None:
        """Every rank takes its snapshot, rank 0 sees that they make up one model and commits the origin."""
        team = self._team
        team.decide(lambda: self._ask(status, config))
        said = team.share(json.dumps(asdict(serving_dtypes(config, self._server, subject.compute_dtype))))
        dtypes = ServingDtypes(**json.loads(said))
        team.together(lambda: self._take_snapshot(subject, config, dtypes))
        described = team.gather(describe(self._part.snapshot))
        team.decide(lambda: self._begin(subject, config, described))
        if team.rank:
            self._follower = Follower(team, self._part)
            self._follower.start()

    def _ask(self, status: Statuses | None, config: DeltaSyncConfig) -> None:
        self._server = ask(status, config)

    def _take_snapshot(self, subject: Subject, config: DeltaSyncConfig, dtypes: ServingDtypes) -> None:
        image = ShardImage(subject.model, dtypes, self._team.rank, self._team.size)
        self._part = RankPart(image, config, partial(open_store, config.uri))
        if CODECS[config.codec] != DEFAULT_CODEC and not self._part.snapshot.holds_whole_tensors:
            raise MappingError("codec 'context'", expected="whole tensors on the trainer's ranks", got="shards",
                               remedy="set codec='gap'")  # fmt: skip

    def _begin(self, subject: Subject, config: DeltaSyncConfig, described: list[str]) -> None:
        self._crew = Crew(self._team, self._part)
        snapshot = TeamSnapshot(described)
        self._lead = _Lead(subject, self._server, config, self._metrics, snapshot, partial(TeamChain, self._crew))

    def step_done(self, step: int, optimizer: Interval | None = None) -> None:
        """After an optimizer step: leave its changes to the publisher, unless one before it is still on its way."""
        if self._lead_says(lambda lead: lead.wants(step)):
            self._capture(step, optimizer=optimizer)

    def sync(self, step: int) -> None:
        """Return once the server serves weights at most ``max_staleness`` steps older than ``step``."""
        start = time.monotonic()
        if self._lead_says(lambda lead: lead.must_capture(step)):
            self._capture(step)
        self._lead_says(lambda lead: lead.wait_for(step, start))

    def sync_alone(self, step: int) -> None:
        """On rank 0, without the others: wait again for what ``sync`` waited for, from a server that was away."""
        if self._lead is not None:
            self._lead.wait_for(step, time.monotonic())

    def finish(self, step: int) -> None:
        """Publish what is not published yet, wait until it is durable (``flush_timeout``), and let the ranks go."""
        same = self._lead_says(lambda lead: lead.settled(step))
        self._capture(step, even_if_same=not same)
        self._lead_says(lambda lead: lead.flush())
        self._rest(self._flush_timeout + (MARGIN if self._follower else 0))  # rank 0 may be in a job for that long

    def close(self) -> None:
        """End the background threads; what is not durable by now is left to the next run."""
        not_at_exit(self._leave)
        if self._rest(STOP):
            self._team.close()

    def _leave(self) -> None:
        """At a rank's exit in the middle of training: let rank 0 publish what was captured before."""
        if self._follower is not None and not self._resting:
            self._follower.leave(quiet=STOP, most=LAST_CALL)
        elif self._lead is not None and not self._resting:
            self._lead.leave()
        self.close()

    def _rest(self, timeout: float) -> bool:
        """End the background threads, so that none is in a process group when the trainer destroys them all."""
        if self._resting:
            return True
        if self._lead is not None and self._crew is not None:
            self._resting = self._lead.stop(timeout)
            if self._resting:
                self._crew.dismiss()
        elif self._follower is not None:
            self._resting = self._follower.join(timeout)
        return self._resting

    def _lead_says(self, choose: Callable[[_Lead], object]) -> bool:
        """What rank 0's own side answers, on every rank; what stopped any rank's background thread, all raise."""
        return bool(self._team.together(lambda: self._own_say(choose))[0])

    def _own_say(self, choose: Callable[[_Lead], object]) -> int:
        if self._follower is not None:
            self._follower.raise_if_failed()
        return int(self._lead is not None and bool(choose(self._lead)))

    def _capture(self, step: int, *, even_if_same: bool = True, optimizer: Interval | None = None) -> None:
        began, start = time.time(), time.monotonic()
        total = sum(self._team.together(self._compare))
        deltas, self._deltas = self._deltas, {}
        if not total and not even_if_same:
            return
        self._part.submit(step, deltas)
        if self._lead is not None:
            trace = begin_trace(step, optimizer, began)
            trace.child("delta_sync.publish.detect", began, time.time(), changed_elements=total)
            self._lead.submit(TeamChanges(step, {}, trace=trace, total=total))
            self._metrics.record(extract_seconds=time.monotonic() - start)

    def _compare(self) -> int:
        self._deltas = self._part.snapshot.diff(self._part.image)
        return sum(delta.changed for delta in self._deltas.values())


class _Lead(Session):
    """Rank 0's own side: the publisher, and the wait for the server."""

    def __init__(
        self,
        subject: Subject,
        server: AskedServer,
        config: DeltaSyncConfig,
        metrics: Metrics,
        snapshot: TeamSnapshot,
        make_chain: partial[TeamChain],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._start(subject, server, snapshot, make_chain)

    def wants(self, step: int) -> bool:
        """Whether this step is to be captured now."""
        self._publisher.raise_if_failed()
        return step % self._config.publish_every == 0 and self._publisher.is_idle

    def must_capture(self, step: int) -> bool:
        """Whether rollouts at ``step`` need a capture; waits then until nothing is in flight."""
        missing = self._publisher.captured_step < self.oldest_allowed(step)
        if missing:
            self._publisher.flush(self._config.sync_timeout)
        return missing

    def wait_for(self, step: int, since: float) -> None:
        """Return once the server serves what ``step`` needs."""
        self._wait_for(step, since)

    def settled(self, step: int) -> bool:
        """Wait until nothing is in flight; whether ``step`` was captured."""
        self.flush()
        return self._publisher.captured_step >= step

    def flush(self) -> None:
        """Wait until everything captured is durable."""
        self._publisher.flush(self._config.flush_timeout)

    def submit(self, changes: TeamChanges) -> None:
        """Have the ranks' parts published."""
        self._publisher.submit(changes)

    def leave(self) -> None:
        """End the publisher's thread once what was captured is durable, within limits."""
        self._publisher.leave()

    def stop(self, timeout: float) -> bool:
        """End the publisher's thread; whether it has ended."""
        return self._publisher.stop(timeout)
