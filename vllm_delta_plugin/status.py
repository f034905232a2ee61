"""What a replica says about itself: written by the coordinator, read by the status route."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from delta_sync.store.open import shown_uri
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.measures import Measures
from vllm_delta_plugin.redact import redact_text

_SIGHTINGS = 1000  # most versions that are remembered while none is taken


@dataclass(frozen=True)
class Facts:
    """What does not change while the engine runs."""

    replica: str
    uri: str
    model: str
    serving_dtype: str
    logprobs_mode: str
    model_fingerprint: str
    codecs: tuple[str, ...] = ()  # of deltas, that this replica can decode
    ranks: int = 1  # that share the model: context-coded deltas must be cut into a multiple of so many tiles
    pinned_keys: tuple[str, ...] = ()  # ids of the public keys of which one must have signed what is taken
    transition: str = "async"
    max_lag: int | None = None  # versions that it may be behind and still call itself ready
    lora: Mapping[str, Any] | None = None  # what a LoRA adapter must be like; None: it serves none
    shadow_bytes: int = 0  # host memory of all ranks that holds weights of which vLLM serves a quantised form


@dataclass(frozen=True)
class Refusal:
    """The newest known version was refused: which object, what kind of error, and its message."""

    version: int
    manifest: str
    object: str | None
    kind: str
    error: str


@dataclass
class Counters:
    """Counts since start, and the last commit's numbers (milliseconds on the engine's thread, seconds of staging)."""

    commits: int = 0
    rollbacks: int = 0
    refusals: int = 0
    anchors_taken: int = 0
    changed_elements_last: int = 0
    commit_ms_last: float | None = None
    committed_at_last: float | None = None  # unix time
    stage_seconds_last: float | None = None


@dataclass
class Served:
    """What the live weights are."""

    run: str | None = None
    version: int | None = None
    epoch: int | None = None
    manifest: str | None = None
    state_digest: str = ""
    commit_generation: int = 0
    adapter: str | None = None  # sha256 of the LoRA adapter over these weights


@dataclass(frozen=True)
class Sighting:
    """When a version was made and when it was first seen here, both unix time."""

    made: float
    seen: float


@dataclass
class AuditStatus:
    """The background scan: scans completed, the version of the last one that agreed, what it is doing, unix times."""

    completed: int = 0
    last_ok_version: int | None = None
    state: str = "idle"
    began_at_last: float | None = None
    ended_at_last: float | None = None


@dataclass
class Status:
    """Everything ``GET /delta_sync/status`` shows; methods are safe to call from any thread."""

    facts: Facts
    served: Served = field(default_factory=Served)
    counters: Counters = field(default_factory=Counters)
    audit: AuditStatus = field(default_factory=AuditStatus)
    measures: Measures = field(default_factory=Measures, repr=False)
    performance: dict[str, float] = field(default_factory=dict)  # of the last commit, as acknowledged
    newest_version: int | None = None
    looked_at: float | None = None  # unix time of the last look at the store that got an answer
    staged: int | None = None
    refusal: Refusal | None = None
    poisoned: bool = False
    pinned: int | None = None  # the version an operator holds it at
    last_error: dict[str, Any] | None = None
    _sightings: dict[int, Sighting] = field(default_factory=dict, repr=False)  # of versions newer than what is served
    _refused: set[Refusal] = field(default_factory=set, repr=False)
    _keeping: bool = field(default=False, repr=False)  # whether a refusal outlives that a version is taken
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def state(self) -> str:
        """waiting | live | refused | poisoned."""
        if self.poisoned:
            return "poisoned"
        if self.refusal is not None:
            return "refused"
        return "waiting" if self.served.version is None else "live"

    @property
    def lag(self) -> int:
        """How many versions the store is ahead."""
        return 0 if self.newest_version is None else max(0, self.newest_version - (self.served.version or 0))

    @property
    def lag_seconds(self) -> float:
        """How long ago the oldest version that was seen and is not served was made, by its trainer's clock."""
        made = min((sighting.made for sighting in self._sightings.values()), default=None)
        return 0.0 if made is None or not self.lag else max(0.0, time.time() - made)

    @property
    def ready(self) -> bool:
        """False while poisoned, or behind by more than allowed; a pinned replica is meant to be behind."""
        late = self.facts.max_lag is not None and self.pinned is None and self.lag > self.facts.max_lag
        return not self.poisoned and not late

    def update(self, **changes: Any) -> None:
        """Set fields together."""
        with self._lock:
            for name, value in changes.items():
                setattr(self, name, value)

    def unproven(self, state_digest: str | None = None) -> None:
        """Live memory is not known to be any version's."""
        with self._lock:
            self.poisoned, served = True, self.served
            served.version = served.epoch = served.manifest = served.adapter = None
            served.state_digest = state_digest or ""

    def serves(self, served: Served) -> None:
        """A version was taken: live memory is proven and, unless that is to be kept, nothing is refused any more."""
        with self._lock:
            self.served, self.poisoned = served, False
            if not self._keeping:
                self.refusal = None
                self._refused.clear()
            self.newest_version = max(served.version or 0, self.newest_version or 0)
            self._sightings = {v: seen for v, seen in self._sightings.items() if v > (served.version or 0)}

    def keeps_refusal(self) -> bool:
        """Whether a refusal outlives what is taken now."""
        return self._keeping

    @contextmanager
    def keeping_refusal(self) -> Iterator[None]:
        """What is taken meanwhile is less than what was refused."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False

    def saw(self, version: int, made: float | None = None) -> None:
        """This is the newest version the store has, ``made`` at that unix time if it can be read."""
        with self._lock:
            self.newest_version, now = version, time.time()
            if version > (self.served.version or 0) and len(self._sightings) < _SIGHTINGS:
                self._sightings.setdefault(version, Sighting(now if made is None else made, now))

    def sighting(self, version: int) -> Sighting | None:
        """When a version that is not served yet was first seen, if it was."""
        with self._lock:
            return self._sightings.get(version)

    def refuse(self, refusal: Refusal) -> bool:
        """Note a refusal; True if it was not noted before since the last version that was taken."""
        with self._lock:
            refusal = Refusal(**{**asdict(refusal), "error": redact_text(refusal.error, self.facts.uri)})
            new = refusal not in self._refused
            self._refused.add(refusal)
            self.counters.refusals += new
            self.refusal = refusal
            if new:
                logger.warning("delta sync: version %d refused: %s: %s", refusal.version, refusal.kind, refusal.error)
            return new

    def accept(self) -> bool:
        """Nothing is refused any more; whether anything was."""
        with self._lock:
            was, self.refusal = self.refusal, None
            self._refused.clear()
            return was is not None

    def note_error(self, error: BaseException, kind: str | None = None) -> None:
        """Remember an error that is neither fatal nor a refusal; logged when its message changes."""
        text = redact_text(str(error), self.facts.uri)
        kind = kind or type(error).__name__
        with self._lock:
            if self.last_error is None or self.last_error["error"] != text:
                logger.warning("delta sync: %s: %s", kind, text)
            self.last_error = {"kind": kind, "error": text, "time": time.time()}

    def to_dict(self) -> dict[str, Any]:
        """One consistent JSON-able snapshot."""
        with self._lock:
            return {
                "plugin": plugin_version(),
                **{**asdict(self.facts), "uri": shown_uri(self.facts.uri)},
                "state": self.state,
                **asdict(self.served),
                "ready": self.ready,
                "pinned": self.pinned,
                "newest_version": self.newest_version,
                "looked_at": self.looked_at,
                "lag": self.lag,
                "lag_seconds": self.lag_seconds,
                "staged": self.staged,
                "refusal": asdict(self.refusal) if self.refusal else None,
                "last_error": dict(self.last_error) if self.last_error else None,
                **asdict(self.counters),
                "performance": dict(self.performance),
                "audit": asdict(self.audit),
                "time": time.time(),
            }


@cache  # 0.2 ms, and a status is made on the engine's thread
def plugin_version() -> str:
    """This distribution's version, or "unknown" when it runs from a folder that is not installed."""
    try:
        return metadata.version("delta-weight-sync")
    except metadata.PackageNotFoundError:
        return "unknown"


def as_mapping(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tensor states as JSON: dtype, shape and digest in hex."""
    return {
        name: {"dtype": s.dtype, "shape": list(s.shape), "digest": f"{s.digest:016x}"} for name, s in states.items()
    }
