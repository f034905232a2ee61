"""A stand-in for a vLLM server with the plugin: it really follows the bucket, bit for bit, but runs no model.

It plans, fetches, checks hashes, decodes, applies and proves digests with the core library, keeps what it serves in
numpy arrays, and answers the routes a trainer uses; completions are arbitrary tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from stand_in_server import StandInServer, serving

from delta_sync.ack import Ack
from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.context_file import decode_against
from delta_sync.delta import apply
from delta_sync.digest import digest, model_fingerprint, state_digest, tensor_key
from delta_sync.errors import ChainError, DeltaSyncError, IntegrityError, SignatureError
from delta_sync.ledger import Ledger
from delta_sync.manifest import TensorState
from delta_sync.plan import Plan, Position
from delta_sync.signing import PublicKeys
from delta_sync.store.open import open_store, shown_uri
from trl_callback.serving_image import ServingImage

POLL = 0.02


class Paused(threading.Event):
    """While it is set a replica looks for nothing; ``set`` returns once a look that was under way has ended."""

    def __init__(self, looking: threading.Lock) -> None:
        super().__init__()
        self._looking = looking

    def set(self) -> None:
        """See the class."""
        super().set()
        with self._looking:
            pass


class StandInReplica:
    """Follows ``uri`` from the bits of ``model``; ``url`` is set while it is being served."""

    def __init__(
        self,
        uri: str,
        model: Any,
        *,
        vocab: int = 96,
        acknowledges: bool = False,
        keys: PublicKeys | None = None,
        ack_uri: str | None = None,
    ):
        self.ledger = Ledger(open_store(uri), keys=keys, acks=open_store(ack_uri) if ack_uri else None)
        self.shown_uri = shown_uri(uri)
        self.codecs = ["gap8-ulp8-zstd", "context8-ulp8-zstd"]
        self.refusal: dict[str, Any] | None = None
        self.last_error: dict[str, Any] | None = None
        self.refusals = self.anchors_taken = 0
        self.served: list[int] = []  # every version this replica went to
        self.generated_at: list[int | None] = []  # the version served at each completion request
        self.pinned: int | None = None
        self.lora: dict[str, Any] | None = None  # as if it served LoRA adapters
        self.vocab, self.acknowledges = vocab, acknowledges
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self.paused = Paused(self._lock)
        self._stop = threading.Event()
        self._serving = ExitStack()
        self.restart(model)

    def restart(self, model: Any) -> None:
        """Forget everything and hold the bits of ``model``, as a server started from that checkpoint would."""
        with self._lock:
            image = list(ServingImage(model, lambda name: "BF16"))
            self.live = {t.name: t.bits.copy() for t in image}
            self.layout = {t.name: (t.dtype.name, t.shape) for t in image}
            self.state_digest: str | None = state_digest(self.states(self.live))
            self.position: Position | None = None
            self.epoch: int | None = None

    def hide_status(self) -> None:
        """Answer 404 where the status was, as a proxy that lets only /v1 through would."""
        del self.server.routes["GET /delta_sync/status"]

    def stop_serving(self) -> None:
        """Close the port, as a killed server would."""
        self._serving.close()

    def states(self, bits: dict[str, np.ndarray]) -> dict[str, TensorState]:
        return {
            name: TensorState(dtype, shape, digest(bits[name], tensor_key(name)))
            for name, (dtype, shape) in self.layout.items()
        }

    def follow(self) -> None:
        while not self._stop.wait(POLL):
            try:
                with self._lock:
                    if not self.paused.is_set():
                        self._look()
            except DeltaSyncError as error:
                self.last_error = {"kind": type(error).__name__, "error": str(error), "time": time.time()}

    def _look(self) -> None:
        try:
            head = self.ledger.head()
        except SignatureError as error:
            newest = self.ledger.highest_listed()
            assert newest is not None
            self._refuse(newest, error)
            return
        try:
            plan = self.ledger.plan(self.position, self.state_digest)
        except ChainError as error:
            if head is not None:  # else the first version came in between: the next look sees it
                self._refuse(Position(head.version, head.sha256), error)
            return
        if plan is None:
            return
        try:
            self._take(plan)
        except DeltaSyncError as error:
            if not self._take_anchor():
                self._refuse(plan.position, error)

    def _take_anchor(self) -> bool:
        """What a live replica does about a refused delta once complete weights are there."""
        try:
            plan = self.ledger.plan(self.position, None, prefer_anchor=True)
            assert plan is not None
            self._take(plan)
        except DeltaSyncError:
            return False
        return True

    def _take(self, plan: Plan) -> None:
        self.live, self.state_digest = self._staged(plan)
        self.position, self.epoch = plan.position, plan.target.epoch
        self.anchors_taken += plan.start == "anchor"
        self.refusal = self.last_error = None
        self.served.append(plan.target.version)
        self._acknowledge("live")

    def _refuse(self, target: Position, error: DeltaSyncError) -> None:
        """Counted once for as long as it stays the same refusal, as the plugin does."""
        self.refusals += self.refusal is None or self.refusal["error"] != str(error)
        self.refusal = {
            "version": target.version,
            "manifest": target.manifest,
            "object": None,
            "kind": type(error).__name__,
            "error": str(error),
        }
        self._acknowledge("refused")

    def _staged(self, plan: Plan) -> tuple[dict[str, np.ndarray], str]:
        staged = {name: bits.copy() for name, bits in self.live.items()}
        if plan.anchor is not None:
            for name, _, _, bits in iter_anchor_tensors(self.ledger, plan.anchor):
                staged[name] = bits.copy()
        for manifest in plan.deltas:
            for ref in manifest.objects:
                for delta in decode_against(self.ledger.read_object(ref), lambda name, *_: staged[name])[1]:
                    apply(delta, staged[delta.name])
        found = state_digest(self.states(staged))
        if found != plan.target.state_digest:
            raise IntegrityError("state digest", expected=plan.target.state_digest, got=found)
        return staged, found

    def _acknowledge(self, state: Any) -> None:
        if not self.acknowledges:
            return
        position, refusal = self.position, self.refusal or {}
        self.ledger.acknowledge(
            Ack(
                "stand-in",
                position and position.version,
                position and position.manifest,
                self.epoch,
                state,
                refusal.get("version"),
                refusal.get("object"),
                refusal.get("kind"),
                refusal.get("error"),
                time.time(),
            )
        )

    def status(self, _: Any = None) -> tuple[int, Any]:
        with self._lock:
            return 200, {
                "plugin": "stand-in",
                "replica": "stand-in",
                "state": "refused" if self.refusal else "live" if self.position else "waiting",
                "version": self.position and self.position.version,
                "manifest": self.position and self.position.manifest,
                "epoch": self.epoch,
                "state_digest": self.state_digest,
                "model_fingerprint": model_fingerprint(self.states(self.live)),
                "serving_dtype": "BF16",
                "logprobs_mode": "processed_logprobs",
                "refusal": self.refusal,
                "refusals": self.refusals,
                "last_error": self.last_error,
                "newest_version": None,
                "uri": self.shown_uri,
                "codecs": self.codecs,
                "pinned_keys": list(self.ledger.keys.ids) if self.ledger.keys else [],
                "pinned": self.pinned,
                "lora": self.lora,
            }

    def tensors(self, _: Any = None) -> tuple[int, Any]:
        with self._lock:
            listed = {
                name: {"dtype": state.dtype, "shape": list(state.shape), "digest": f"{state.digest:016x}"}
                for name, state in self.states(self.live).items()
            }
        return 200, {"tensors": listed}

    def complete(self, body: Any) -> tuple[int, Any]:
        version = self.position and self.position.version
        self.generated_at.append(version)
        choices = []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                tokens = [self._random.randrange(4, self.vocab) for _ in range(body["max_tokens"])]
                names = [f"token_id:{token}" for token in tokens]
                logprob = -float(np.log(self.vocab))
                choices.append(
                    {
                        "index": len(choices),
                        "prompt_token_ids": prompt,
                        "token_ids": tokens,
                        "logprobs": {
                            "tokens": names,
                            "token_logprobs": [logprob] * len(names),
                            "top_logprobs": [{name: logprob} for name in names],
                        },
                    }
                )
        spans = [
            [{"version": version, "epoch": self.epoch, "start": 0, "end": len(one["token_ids"])}] for one in choices
        ]
        return 200, {"choices": choices, "usage": {"delta_sync": {"versions": [version], "choices": spans}}}

    @contextmanager
    def running(self, port: int = 0) -> Iterator[StandInReplica]:
        server = StandInServer(
            {
                "GET /health": lambda _: (200, b""),
                "GET /v1/models": lambda _: (200, {"data": [{"id": "stand-in"}]}),
                "POST /v1/completions": self.complete,
                "GET /delta_sync/tensors": self.tensors,
                "GET /delta_sync/status": self.status,
            }
        )
        self._stop.clear()
        follower = threading.Thread(target=self.follow, daemon=True)
        with self._serving:
            self.server = self._serving.enter_context(serving(server, port))
            self.url = server.url
            follower.start()
            try:
                yield self
            finally:
                self._stop.set()
                follower.join(10)
