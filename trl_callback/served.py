"""Waiting until the rollout server serves weights that are recent enough, and saying why when it does not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from delta_sync.errors import (
    ConflictError,
    FormatError,
    MappingError,
    NotFoundError,
    SignatureError,
    StoreError,
    SyncTimeoutError,
)
from delta_sync.ledger import Ledger
from trl_callback.chain import Published
from trl_callback.config import DeltaSyncConfig
from trl_callback.fleet_status import Statuses
from trl_callback.healing import Refusal, acknowledged_refusal
from trl_callback.http import ServerUnavailableError
from trl_callback.publisher import Publisher
from trl_callback.status_client import ServerStatus
from trl_callback.trust import check_trusted

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey

SLOWEST_POLL = 0.5  # seconds


@dataclass(frozen=True)
class Seen:
    """One look: the version that is served, which replicas refuse which not, and what is wrong, in words."""

    version: int | None = None
    epoch: int | None = None
    manifest: str | None = None
    replicas: Mapping[str, Refusal | None] = field(default_factory=dict)
    trouble: str | None = None
    pinned_keys: tuple[str, ...] = ()
    pinned: int | None = None


class ServedWait:
    """Compares what the server serves with what the publisher made durable."""

    def __init__(
        self,
        status: Statuses,
        ledger: Ledger,
        publisher: Publisher,
        config: DeltaSyncConfig,
        key: SigningKey | None = None,
    ) -> None:
        self._status, self._ledger, self._publisher, self._config = status, ledger, publisher, config
        self._key = key

    def until(self, step: int) -> Published:
        """Return the served version once it covers ``step``; refusals met on the way go to the publisher.

        SyncTimeoutError after ``sync_timeout`` seconds names server, version wanted and served, and the last error;
        ConflictError if the server serves another trainer's newer version, or is held at an older one;
        MappingError if it can't take this model's, SignatureError if it won't take what this trainer signs;
        whatever stopped the publisher.
        """
        start = time.monotonic()
        pause = self._config.poll_interval
        while True:
            self._publisher.raise_if_failed()
            seen = self.look()
            wanted, served = self._publisher.covering(step), self._served(seen)
            self._raise_if_hopeless(seen)
            self._raise_if_pinned(seen, wanted)
            self._publisher.report(seen.replicas)
            if wanted is not None and served is not None and served.version >= wanted.version:
                self._status.admit(partial(self._serves, wanted.version))
                return served
            if time.monotonic() - start >= self._config.sync_timeout:
                raise self._timed_out(step, wanted, seen)
            if wanted is None:
                self._publisher.wait_covering(step, pause)
            else:
                time.sleep(pause)
            pause = min(SLOWEST_POLL, pause * 1.2)

    def look(self) -> Seen:
        """What the status routes say, or, where no server has one, the replicas' acknowledgements in the bucket."""
        try:
            return _seen(self._status.statuses())
        except NotFoundError as error:
            return self._acknowledged(str(error))
        except (ServerUnavailableError, FormatError) as error:  # a proxy's page in between is not the end of a run
            return Seen(trouble=str(error))

    def _serves(self, version: int, status: ServerStatus) -> bool:
        served = self._served(_seen([status]))
        return served is not None and served.version >= version

    def _acknowledged(self, trouble: str) -> Seen:
        """The replica of this epoch that is furthest behind; those of earlier epochs may be long gone."""
        try:
            acks = self._ledger.acknowledgements().values()
        except StoreError as error:  # the next look may find it well again
            return Seen(trouble=f"{trouble}; {error}")
        replicas = {ack.replica: acknowledged_refusal(ack) for ack in acks}
        serving = [ack for ack in acks if ack.epoch == self._publisher.epoch and ack.version is not None]
        if not serving:
            return Seen(replicas=replicas, trouble=trouble)
        behind = min(serving, key=lambda ack: ack.version or 0)
        return Seen(behind.version, behind.epoch, behind.manifest, replicas, behind.error)

    def _raise_if_hopeless(self, seen: Seen) -> None:
        """What stays so, whatever is published: a model that can't take deltas, a key that isn't trusted.

        A version of the trainer before this one may have been what the server can't have.
        """
        check_trusted(self._key, seen.pinned_keys, self._status.url)
        for refusal in filter(None, seen.replicas.values()):
            ours = self._publisher.by_version(refusal.version) is not None
            if refusal.kind == "MappingError" and ours:
                raise MappingError(
                    f"version {refusal.version} at {self._status.url}",
                    expected="a model it can update",
                    got=refusal.error,
                )
            untold = refusal.kind == "SignatureError" and not seen.pinned_keys  # an acknowledgement lists no keys
            if untold and ours:
                raise SignatureError(
                    f"version {refusal.version} of this trainer",
                    expected=f"to be trusted by replica {refusal.replica}",
                    got=refusal.error,
                    remedy="pin this trainer's public key there, or set signing_key here to a key that is pinned",
                )

    def _raise_if_pinned(self, seen: Seen, wanted: Published | None) -> None:
        """Its operator holds the server at an older version: what is wanted comes only when they let it go."""
        if seen.pinned is not None and wanted is not None and seen.pinned < wanted.version:
            raise ConflictError(
                f"waiting for {self._status.url}",
                expected=f"version {wanted.version}",
                got=f"a server that its operator holds at version {seen.pinned}",
                remedy="POST /delta_sync/unpin there, then resume training",
            )

    def _served(self, seen: Seen) -> Published | None:
        """The version of ours that the server serves, proven by its manifest's digest."""
        if seen.version is None:
            return None
        ours = self._publisher.by_version(seen.version)
        if ours is not None and seen.manifest == ours.sha256:
            return ours
        if seen.epoch is not None and seen.epoch > self._publisher.epoch:
            raise ConflictError(
                f"{self._status.url} serves version {seen.version}",
                expected=f"epoch {self._publisher.epoch} of this trainer",
                got=f"epoch {seen.epoch}",
                remedy=f"does the server follow {self._config.shown_uri} (see its /delta_sync/status)? "
                "If so, another trainer publishes there too: stop one, or give each its own URI",
            )
        return None

    def _timed_out(self, step: int, wanted: Published | None, seen: Seen) -> SyncTimeoutError:
        version = f"version {wanted.version}" if wanted else "a version not durable yet"
        refused = [f"version {r.version} refused: {r.error}" for r in seen.replicas.values() if r is not None]
        last = "; ".join(refused) or seen.trouble or self._publisher.last_error or "no error reported"
        return SyncTimeoutError(
            f"waiting for {self._status.url}",
            expected=f"{version} (step {step}) served within {self._config.sync_timeout:g} s",
            got=f"version {seen.version}; last error: {last}",
            remedy=f"check that the server runs with --delta-sync {self._config.shown_uri}, its log, and the bucket; "
            "or raise sync_timeout",
        )


def _seen(statuses: Sequence[ServerStatus]) -> Seen:
    """Of several servers that which is furthest, rather one that is not held; what any refuses."""
    best = max(
        statuses, key=lambda one: (one.pinned is None, one.epoch or 0, -1 if one.version is None else one.version)
    )
    trouble = best.last_error or (None if best.state == "live" else f"state {best.state}")
    replicas = {status.replica: status.refusal for status in statuses}
    keys = best.pinned_keys
    return Seen(best.version, best.epoch, best.manifest, replicas, trouble, keys, best.pinned)


def wait_for_live_states(status: Statuses, timeout: float) -> list[ServerStatus]:
    """The first statuses that all have a digest of the live weights; SyncTimeoutError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        trouble: object
        try:
            seen = status.statuses()
            without = [one for one in seen if not one.state_digest]
            if not without:
                return seen
            trouble = without[0].last_error or f"state {without[0].state}"
        except ServerUnavailableError as error:
            trouble = error
        if time.monotonic() >= deadline:
            raise SyncTimeoutError(
                f"waiting for {status.url}",
                expected=f"a digest of its live weights within {timeout:g} s",
                got=trouble,
                remedy="look at the server's log",
            )
        time.sleep(min(SLOWEST_POLL, max(0.0, deadline - time.monotonic())))
