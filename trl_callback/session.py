"""One training run: its model's image, its snapshot, its chain in the bucket, and the server it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from delta_sync import tracing
from delta_sync.at_exit import at_exit, not_at_exit
from delta_sync.deadline import StillRunningError, within
from delta_sync.delta_file import DEFAULT_CODEC
from delta_sync.errors import DeltaSyncError, MappingError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import TensorState
from delta_sync.signing import PublicKeys
from delta_sync.store.open import open_ack_store, open_store
from trl_callback.adapter_image import adapter_sizes
from trl_callback.anchors import sidecar_files
from trl_callback.chain import Chain, Published
from trl_callback.config import CODECS, DeltaSyncConfig
from trl_callback.fleet_status import Statuses
from trl_callback.gpu_snapshot import snapshot_of
from trl_callback.metrics import Metrics
from trl_callback.publisher import Publisher
from trl_callback.served import ServedWait, wait_for_live_states
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Snapshot
from trl_callback.status_client import ServerStatus
from trl_callback.supported import unwrap
from trl_callback.trust import check_trusted

logger = logging.getLogger(__name__)
Interval = tuple[float, float]  # unix seconds
DELTA_BYTES = 1.3  # that a changed element of a merged delta takes, about: docs/TRAINER.md, "Which is smaller"


@dataclass(frozen=True)
class Subject:
    """What is published: the model, its tokenizer or processor, the precision it computes in, the step it is at.

    ``ranks_wait``: how long, in seconds, the trainer lets its ranks wait for each other; of several.
    """

    model: nn.Module
    processing_class: Any
    compute_dtype: str
    step: int
    ranks_wait: float = 0.0


class Session:
    """Publishes from its opening, an origin, until ``close``; ``status`` is None where there is no server to wait for.

    Raises MappingError (model or server don't fit), ConflictError, StoreError, SyncTimeoutError.
    """

    def __init__(self, subject: Subject, config: DeltaSyncConfig, status: Statuses | None, metrics: Metrics) -> None:
        self._config, self._metrics = config, metrics
        server = ask(status, config)
        self._image = ServingImage(subject.model, serving_dtypes(config, server, subject.compute_dtype))
        self._start(subject, server, snapshot_of(self._image, config.snapshot_device, config.bucket_bytes), Chain)
        at_exit(self._leave)

    def _start(
        self,
        subject: Subject,
        server: AskedServer,
        snapshot: Snapshot,
        make_chain: Callable[..., Chain],
        published: Snapshot | None = None,
    ) -> None:
        """Check that trainer and server fit, commit the origin and begin to publish.

        ``snapshot`` is the served model's; ``published`` what versions are of, if that is something over it.
        """
        config, status = self._config, server.client
        self._key = config.load_signing_key()
        if status is not None:
            check_same_tensors(snapshot.states, server.tensors, status.url)
        for live in server.live:
            check_trusted(self._key, live.pinned_keys, live.url)
            check_codec(CODECS[config.codec], config.tiles, live, live.url)
            warn_about_uri(config.shown_uri, live, live.url)
        warn_about_precision(subject.compute_dtype, snapshot.main_dtype)

        sidecars = sidecar_files(subject.model, subject.processing_class, snapshot.main_dtype)
        ledger, chain = self._open(snapshot, sidecars, subject.step, make_chain)
        if chain.previous is not None:
            logger.warning(
                "delta-sync: %s already has version %d (epoch %d): this trainer goes on after it as epoch %d",
                config.shown_uri, chain.previous.version, chain.previous.epoch, chain.epoch,
            )  # fmt: skip
            warn_about_kind(chain)
        say_which_is_smaller(subject.model, config.lora)
        self._first_step = self._last_step = subject.step
        self._optimizing = False
        self._publisher = Publisher(chain, published or snapshot, config, self._metrics)
        self._ledger = ledger
        self._wait = None if status is None else self._wait_by(status)
        self._want_first_anchor(chain, snapshot, server.live)
        self._publisher.start()

    def _open(
        self, snapshot: Snapshot, sidecars: Mapping[str, bytes], step: int, make_chain: Callable[..., Chain]
    ) -> tuple[Ledger, Chain]:
        """Claim an epoch and commit the origin, off the training thread: a file system may hang for ever."""
        config = self._config

        def begin() -> tuple[Ledger, Chain]:
            keys = None if self._key is None else PublicKeys([self._key.public])
            acks = None if config.ack_uri is None else open_ack_store(config.ack_uri)
            ledger = Ledger(open_store(config.uri), keys=keys, acks=acks)
            return ledger, make_chain(ledger, snapshot, config, sidecars, step, self._key)

        try:
            return within(config.publish_timeout, begin)
        except StillRunningError:
            raise StoreError(
                f"opening {config.shown_uri}",
                expected=f"an answer within publish_timeout ({config.publish_timeout:g} s)",
                got="a call that has not returned",
                remedy="look at that file system or store",
            ) from None

    def _wait_by(self, status: Statuses) -> ServedWait:
        return ServedWait(status, self._ledger, self._publisher, self._config, self._key)

    def _want_first_anchor(self, chain: Chain, snapshot: Snapshot, live: Sequence[ServerStatus]) -> None:
        """None where every server's live bits are proven ours; on a used chain one all the same, but without hurry:
        a server that restarts could not get from the chain before this origin to the one after it."""
        state = snapshot.digest_with({})
        ours = (state, snapshot.fingerprint)
        same = bool(live) and all((one.state_digest, one.model_fingerprint) == ours for one in live)
        continues = chain.goes_on and (chain.previous is None or chain.previous.state_digest != state)
        if not same or continues or chain.after_reset:
            self._publisher.want_anchor(urgent=not same or chain.after_reset)

    def step_done(self, step: int, optimizer: Interval | None = None) -> None:
        """After an optimizer step: leave its changes to the publisher, every ``publish_every`` steps.

        ``optimizer`` is when the optimizer's own step began and ended, unix seconds.
        """
        self._last_step, self._optimizing = step, False
        self._publisher.raise_if_failed()
        if step % self._config.publish_every == 0:
            self._capture(step, optimizer=optimizer)

    def optimizing(self) -> None:
        """The optimizer's step begins: until ``step_done`` the weights are no step's."""
        self._optimizing = True

    def sync(self, step: int) -> None:
        """Return once the server serves weights at most ``max_staleness`` steps older than ``step``."""
        start = time.monotonic()
        if self._publisher.captured_step < self.oldest_allowed(step):
            self._capture(step)
        self._wait_for(step, since=start)

    def _wait_for(self, step: int, since: float) -> None:
        if self._wait is None:
            raise MappingError("sync_weights", expected="a rollout server", got="none", remedy="set server_url=…")
        served = self._wait.until(self.oldest_allowed(step))
        self._metrics.record(wait_seconds=time.monotonic() - since, staleness=step - served.step)

    def prepare(self, step: int) -> None:
        """On the training thread: see that a version that covers ``step`` is published or on its way."""
        self._publisher.raise_if_failed()
        if self._publisher.captured_step < step:
            self._capture(step)

    def wait_elsewhere(self, status: Statuses, step: int) -> tuple[Published, Published]:
        """On another thread, over its own connections: wait until ``step`` is served, once it is prepared.

        Returns the first version that covers it and the one that is served.
        """
        served = self._wait_by(status).until(step)
        return self._publisher.covering(step) or served, served

    def step_of(self, version: int) -> int | None:
        """The step whose weights this trainer's ``version`` holds, None if it has none of that number."""
        published = self._publisher.by_version(version)
        return None if published is None else published.step

    def oldest_allowed(self, step: int) -> int:
        """The oldest step whose weights rollouts that are used at ``step`` may come from."""
        return max(self._first_step, step - self._config.max_staleness)

    def finish(self, step: int) -> None:
        """Publish what is not published yet, and wait until it is durable (``flush_timeout``)."""
        self._publisher.raise_if_failed()
        self._capture(step, even_if_same=self._publisher.captured_step < step)
        self._publisher.flush(self._config.flush_timeout)
        not_at_exit(self._leave)  # which would keep the model in memory

    def close(self) -> None:
        """End the publisher's thread."""
        not_at_exit(self._leave)
        self._publisher.stop()

    def _leave(self) -> None:
        """At the interpreter's exit in the middle of training: publish the last whole step, if no version has it."""
        if self._optimizing or self._publisher.captured_step >= self._last_step:
            return
        try:
            self._capture(self._last_step)
        except DeltaSyncError as error:
            logger.error("delta-sync: step %d is not published: %s", self._last_step, error)

    def _capture(self, step: int, *, even_if_same: bool = True, optimizer: Interval | None = None) -> None:
        start = time.monotonic()
        trace = begin_trace(step, optimizer, time.time())
        self._publisher.capture(self._image, step, even_if_same=even_if_same, trace=trace)
        self._metrics.record(extract_seconds=time.monotonic() - start)


def begin_trace(step: int, optimizer: Interval | None, began: float) -> tracing.Span:
    """The span that lasts from an optimizer step, or ``began``, to the commit of the version that covers it."""
    trace = tracing.begin("delta_sync.publish", began=optimizer[0] if optimizer else began, step=step)
    if optimizer is not None:
        trace.child("delta_sync.publish.optimizer_step", *optimizer, step=step)
    return trace


@dataclass(frozen=True)
class AskedServer:
    """The servers to wait for and what each said of itself when asked, None or empty where there is none."""

    client: Statuses | None = None
    live: Sequence[ServerStatus] = ()
    tensors: Mapping[str, TensorState] = field(default_factory=dict)


def ask(status: Statuses | None, config: DeltaSyncConfig) -> AskedServer:
    """Wait until the servers know the digest of their live weights; SyncTimeoutError after ``sync_timeout``."""
    if status is None:
        return AskedServer()
    return AskedServer(status, wait_for_live_states(status, config.sync_timeout), status.tensors())


@dataclass(frozen=True)
class ServingDtypes:
    """Checkpoint tensor name -> element type to publish it in."""

    default: str
    named: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """The element type of one tensor."""
        return self.named.get(name, self.default)


def serving_dtypes(config: DeltaSyncConfig, server: AskedServer, computed: str) -> ServingDtypes:
    """The setting, else each tensor's type on the server, else what the trainer computes in."""
    if config.serving_dtype is not None:
        return ServingDtypes(config.serving_dtype)
    default = (server.live[0].serving_dtype if server.live else None) or computed
    return ServingDtypes(default, {name: state.dtype for name, state in server.tensors.items()})


def check_same_tensors(ours: Mapping[str, TensorState], served: Mapping[str, TensorState], url: str) -> None:
    """MappingError naming the first tensor that trainer and server don't have alike."""
    for name in sorted(ours.keys() | served.keys()):
        here, there = _layout(ours.get(name)), _layout(served.get(name))
        if here != there:
            raise MappingError(f"tensor {name!r}", expected=f"{here} as in the trainer", got=f"{there} at {url}",
                               remedy="serve the model that is trained, unquantised")  # fmt: skip


def _layout(state: TensorState | None) -> str:
    return "no such tensor" if state is None else f"{state.dtype} {list(state.shape)}"


def check_codec(codec: str, tiles: int, live: ServerStatus, url: str) -> None:
    """MappingError where the server does not say that it can decode what the settings ask for."""
    if codec == DEFAULT_CODEC:
        return
    if codec not in live.codecs:
        raise MappingError(f"codec {codec}", expected="a server that decodes it", got=f"{list(live.codecs)} at {url}",
                           remedy="set codec='gap'")  # fmt: skip
    if tiles % (live.ranks or 1):
        raise MappingError(f"tiles {tiles}", expected=f"a multiple of the {live.ranks} ranks at {url}", got=str(tiles),
                           remedy=f"set tiles={live.ranks}, or codec='gap'")  # fmt: skip


def warn_about_uri(ours: str, live: ServerStatus, url: str) -> None:
    """Warn where the server names another run than ours; it may be the same place by another path or a mirror."""
    if live.uri not in (None, ours):
        logger.warning(
            "delta-sync: this trainer publishes to %s but %s follows %s. Remedy: if these are not the same place, "
            "give both the same URI", ours, url, live.uri,
        )  # fmt: skip


def warn_about_kind(chain: Chain) -> None:
    """Warn where the run published adapters before and merged weights now, or the other way round."""
    before = chain.previous.kind if chain.previous is not None else "origin"
    if before != "origin" and before != chain.kind:
        logger.warning(
            "delta-sync: versions of this run up to %d are of kind %r, this trainer's are of kind %r: it begins a new "
            "chain, with complete weights in the bucket for servers that don't hold them. lora=%r goes on as before",
            chain.previous.version if chain.previous else 0, before, chain.kind,
            "adapter" if before == "adapter" else "merged",
        )  # fmt: skip


def say_which_is_smaller(model: nn.Module, lora: str) -> None:
    """One line for whoever trains an adapter: what a version costs either way."""
    adapter, adapted = adapter_sizes(unwrap(model))
    if adapter:
        logger.warning(
            "delta-sync: publishing %s; an adapter is %.3g MB a version, and merged weights are smaller where less "
            "than %.2g %% of the %.3g M adapted weights change between versions (metric changed_fraction)",
            "the adapter" if lora == "adapter" else "merged weights", 2 * adapter / 1e6,
            100 * 2 * adapter / (DELTA_BYTES * adapted), adapted / 1e6,
        )  # fmt: skip


def warn_about_precision(computed: str, served: str) -> None:
    """Warn where trainer and server compute in different precisions: log-probabilities then drift apart."""
    if computed != served:
        logger.warning(
            "delta-sync: the trainer computes in %s but the server serves %s, so their log-probabilities drift apart "
            "even when every sync is exact. Remedy: set %s=True (weights may stay float32)",
            computed, served, "bf16" if served == "BF16" else "fp16",
        )  # fmt: skip
