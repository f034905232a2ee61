"""Putting a coordinator into one EngineCore, and what clients may ask it for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from delta_sync import tracing
from delta_sync.codec import codec_names
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.errors import DeltaSyncError, MappingError
from delta_sync.ledger import Ledger
from delta_sync.limits import for_model
from delta_sync.signing import PublicKeys, load_public_keys
from delta_sync.store.open import open_ack_store, open_store
from vllm_delta_plugin.background import share_interpreter
from vllm_delta_plugin.cache_salt import CacheSalt, Salted
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.coordinator import Coordinator
from vllm_delta_plugin.engine_load import Pause
from vllm_delta_plugin.expert_group import ExpertGroup, Steps
from vllm_delta_plugin.follower import Follower
from vllm_delta_plugin.group import ALONE
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.main_thread import EngineBroken, MainThread
from vllm_delta_plugin.output_clock import OutputClock
from vllm_delta_plugin.ranks import Ranks
from vllm_delta_plugin.read_back import assemble, read_adapter
from vllm_delta_plugin.replica_id import replica_id
from vllm_delta_plugin.status import Facts, Status

_LAST_SPANS = 2.0  # seconds
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class EngineFacts:
    """What the seam reads from vLLM's config; ``engine_index`` only for an engine of a data-parallel group."""

    model: str
    dtype: str
    logprobs_mode: str
    engine_index: int | None


class DeltaSync:
    """Everything the plugin keeps in one EngineCore. Made, pumped and asked on the engine's own thread."""

    def __init__(
        self,
        config: ReplicaConfig,
        engine: EngineFacts,
        collective_rpc: Callable[..., Sequence[Any]],
        wake: Callable[[], None],
        pause: Callable[[MainThread, threading.Event], Pause],
        steps: Steps | None = None,
    ) -> None:
        self._config = config
        self._stop = threading.Event()
        self.main = MainThread(self._stop, wake)
        self.salt = CacheSalt()
        self._ranks = Ranks(collective_rpc)
        store, keys = open_store(config.uri), load_public_keys(config.public_keys)
        acks = None if config.ack_uri is None else open_ack_store(config.ack_uri)
        group = ExpertGroup(steps, self._stop, config.stage_timeout) if steps is not None else None
        self._group = group or ALONE
        pausing = pause(self.main, self._stop)
        live = self._live = Live(config, self._ranks, self.main, self.salt, pausing, self._group)
        self._status = Status(_facts(config, engine, live, keys))
        if live.state_digest is None:
            raise MappingError("replicated weights", expected="equal on all ranks after loading", got="different bits")
        self._status.served.state_digest = live.state_digest
        ledger = Ledger(store, for_model(live.tensor_count), keys=keys, acks=acks)
        self._coordinator = Coordinator(config, ledger, live, self._status, self._stop, self._group)
        if group is not None:
            group.keeps_refusal, group.newest = self._status.keeps_refusal, lambda: self._status.newest_version
            if not group.leads:
                self._coordinator = Follower(config, ledger, live, self._status, self._stop, group)

    def start(self) -> None:
        """Begin to follow the run in the background."""
        share_interpreter()
        facts = self._status.facts
        logger.info("delta sync: replica %s follows %s", facts.replica, self._status.to_dict()["uri"])
        self._coordinator.start()

    def stop(self) -> None:
        """End the background thread."""
        self._coordinator.stop()
        tracing.flush(_LAST_SPANS)

    def salted(self, user_salt: str | None, session: str | None) -> Salted:
        """The prefix-cache salt for a new request."""
        return Salted(self.salt, user_salt, session)

    @property
    def serves_adapters(self) -> bool:
        """Whether requests are answered with the run's LoRA adapter, which is empty where a version has none."""
        return self._live.lora is not None

    def enter(self, timeout: float) -> Future[bool]:
        """Whether a new request may come in, once no drain is going on or after ``timeout`` seconds."""
        return self._live.gate.enter(timeout)

    def label(self) -> str:
        """What a batch that is scheduled now is computed by."""
        return self._live.label.encode()

    @property
    def outputs(self) -> OutputClock:
        """What wants to know when the engine's outputs come."""
        return self._live.outputs

    def metrics(self) -> dict[str, Any]:
        """What /metrics is made of: the status, and counts and histograms since the start."""
        return {**self.status(), "measures": self._status.measures.to_dict()}

    def status(self) -> dict[str, Any]:
        """The JSON of /delta_sync/status."""
        return {**self._status.to_dict(), "draining": self._live.gate.closed, **self._group.shown()}

    def tensors(self, scan: bool) -> dict[str, Any] | Future[dict[str, Any]]:
        """The JSON of /delta_sync/tensors: proven digests, or those of a scan that starts now."""
        return self._coordinator.scan() if scan else self._coordinator.tensors()

    def wait_for(self, version: int | None, timeout: float) -> Future[dict[str, Any]]:
        """Status once ``version`` (default: the newest now) is served, or after ``timeout`` seconds."""
        return self._coordinator.wait_for(version, timeout)

    def control(
        self, action: str, version: int | None, timeout: float, dry_run: bool, order: str
    ) -> Future[dict[str, Any]]:
        """A future answer to pin, unpin, rollback or reload, or with ``dry_run`` to whether that could be done.

        ``order``: an id that engines which share experts know the same command by.
        """
        if isinstance(self._coordinator, Follower):
            return self._coordinator.answer_of_leader(order, timeout)
        future = self._coordinator.command(action, version, timeout, dry_run)
        if isinstance(self._group, ExpertGroup):
            self._group.post_when_done(future, order)
        return future

    def hint(self) -> dict[str, Any]:
        """Look at the store at once; the status before."""
        self._coordinator.hint()
        return self.status()

    def read_tensor(self, name: str) -> dict[str, Any]:
        """One tensor's live bytes, assembled from all ranks: {dtype, shape, version, data}, or {error}.

        Of an adapter's tensors as they are computed with: vLLM multiplies B by the adapter's scaling.
        """
        if not self._config.read_back:
            return {"error": "read-back is off: start with --delta-sync-config '{\"read_back\": true}'"}
        now = self._coordinator.tensors()
        described, version = now["tensors"].get(name) or now["adapter"].get(name), now["version"]
        if described is None:
            return {"error": f"no tensor {name!r} is served"}
        try:
            if name in now["adapter"]:
                data = read_adapter(name, described["shape"], self._ranks)
            else:
                data = assemble(name, described, self._ranks.tell("read_tensor", name))
        except DeltaSyncError as error:  # of a rank, most likely
            return {"error": str(error)}
        except EngineBroken as error:  # vLLM only tells the client what a utility raises
            self.main.end(error)
            raise
        return {"dtype": described["dtype"], "shape": described["shape"], "version": version, "data": data}


def _facts(config: ReplicaConfig, engine: EngineFacts, live: Live, keys: PublicKeys | None) -> Facts:
    return Facts(
        replica=replica_id(config.replica, engine.engine_index),
        uri=config.uri,
        model=engine.model,
        serving_dtype=DTYPES.get(engine.dtype, engine.dtype),
        logprobs_mode=engine.logprobs_mode,
        model_fingerprint=live.fingerprint,
        codecs=(*codec_names(), CONTEXT_CODEC),
        ranks=live.ranks,
        pinned_keys=keys.ids if keys else (),
        transition=config.transition,
        max_lag=config.max_lag,
        lora=live.lora,
        shadow_bytes=live.shadow_bytes,
    )
