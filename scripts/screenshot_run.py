"""A small run to take pictures of: a made-up model that a made-up optimizer moves, and replicas that really follow.

The trainer rounds fp32 masters to bf16, so which elements change is what rounding makes of small updates. Replicas
fetch, decode, apply and prove each version, on numpy arrays in place of an engine; their times are measured.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np

from delta_sync.ack import Ack
from delta_sync.cli.weights import read_delta, rebuild
from delta_sync.delta import apply
from delta_sync.digest import digest, tensor_key
from delta_sync.errors import DeltaSyncError, IntegrityError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Position
from delta_sync.store.open import open_store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.publish import Publisher

LAYERS, WIDE = 12, 128
KINDS = {"self_attn.q_proj": WIDE, "self_attn.k_proj": WIDE // 2, "self_attn.o_proj": WIDE, "mlp.up_proj": 3 * WIDE}


class Trainer:
    """Publishes a version a step; a restart takes a new epoch and goes on with the same weights."""

    def __init__(self, uri: str) -> None:
        self._random, self._uri, self._step = np.random.default_rng(1), uri, 0
        shapes = {"model.embed_tokens.weight": (1024, WIDE), "model.norm.weight": (WIDE,)}
        for layer in range(LAYERS):
            shapes |= {f"model.layers.{layer}.{kind}.weight": (rows, WIDE) for kind, rows in KINDS.items()}
        self._masters = {name: self._normal(0.02, shape) for name, shape in shapes.items()}
        self._publisher = Publisher(uri, self._bits())
        self.anchor(self._publisher.origin())

    def step(self, corrupt: str | None = None) -> Manifest:
        """Move every weight a little, later layers more, all of them less with time; publish.

        corrupt: "object" spoils what is stored before the version is visible, as a bad disk would; see ``heal``.
        """
        self._step += 1
        rate = 1.5e-6 / (1 + self._step / 40)
        for at, (name, master) in enumerate(self._masters.items()):
            master += self._normal(rate * (0.3 + at / len(self._masters)), master.shape)
            self._publisher.weights[name] = bf16(master)
        learned = 0.85 - 0.7 * np.exp(-self._step / 25)
        self._publisher.steps = (self._step, self._step)
        self._publisher.metrics = {"reward": float(learned + self._random.normal(0, 0.03))}
        return self._publisher.delta(corrupt)

    def restart(self) -> Manifest:
        """Another trainer takes over."""
        self._publisher = Publisher(self._uri, self._bits())
        self._publisher.steps = (self._step, self._step)
        return self._publisher.origin()

    def anchor(self, manifest: Manifest) -> None:
        """Attach the present weights to the newest version."""
        self._publisher.anchor(manifest)

    def heal(self, manifest: Manifest) -> None:
        """Write a spoilt object again."""
        self._publisher.heal(manifest)

    def _normal(self, scale: float, shape: tuple[int, ...]) -> np.ndarray:
        return self._random.normal(0, scale, shape).astype(np.float32)

    def _bits(self) -> dict[str, np.ndarray]:
        return {name: bf16(master) for name, master in self._masters.items()}


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16 numbers, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Replica(threading.Thread):
    """Follows a run and acknowledges; an inner loop stands for the engine, whose longest pause is told as the gap."""

    def __init__(self, name: str, uri: str) -> None:
        super().__init__(name=name, daemon=True)
        self.refused, self.stopped = threading.Event(), threading.Event()
        self._ledger, self._bits, self._at = Ledger(open_store(uri)), dict[str, np.ndarray](), None
        self._engine = Engine()

    @property
    def version(self) -> int | None:
        """What it serves."""
        return self._at.version if self._at else None

    def stop(self) -> None:
        """End both threads."""
        self.stopped.set()
        self.join(20)
        self._engine.stop()

    def run(self) -> None:
        while not self.stopped.is_set():
            head = self._ledger.wait_newer(self._at, time.monotonic() + 0.2, self.stopped, poll_seconds=0.03)
            if head is None:
                continue
            try:
                self._acknowledge(head, self._move(head, time.time() - head.created_at))
            except DeltaSyncError as error:
                self._refuse(head, error)
                return

    def _move(self, head: Manifest, noticed: float) -> dict[str, float]:
        began = time.monotonic()
        if self._at is None:
            _, found = rebuild(self._ledger, head)
            self._bits = {name: bits.copy() for name, bits in found.bits.items()}
            new, fetched = {}, 0
        else:
            new, fetched = self._stage(head)
        staged = time.monotonic()
        self._engine.between_steps(lambda: self._bits.update(new))
        committed, gap = time.monotonic(), self._engine.longest(staged)
        self._at = Position(head.version, head.sha256)
        return {
            "noticed_seconds": noticed,
            "stage_seconds": staged - began,
            "commit_seconds": committed - staged,
            "served_seconds": noticed + committed - began,
            "gap_seconds": gap,
            "fetched_bytes": fetched,
        }

    def _stage(self, head: Manifest) -> tuple[dict[str, np.ndarray], int]:
        """New bits of what changed, proven against the manifests' digests."""
        way = [head, *self._ledger.ancestors(head, self.version + 1)]
        new: dict[str, np.ndarray] = {}
        fetched = 0
        for manifest in reversed(way):
            for ref in manifest.objects:
                for delta in read_delta(self._ledger, manifest, ref)[2]:
                    new.setdefault(delta.name, self._bits[delta.name].copy())
                    apply(delta, new[delta.name])
                fetched += ref.size
            for name, state in manifest.tensors.items():
                got = digest(new.get(name, self._bits[name]).reshape(-1), tensor_key(name))
                if got != state.digest:
                    raise IntegrityError(f"digest of {name}", expected=state.digest, got=got)
        return new, fetched

    def _acknowledge(self, head: Manifest, performance: dict[str, float]) -> None:
        nothing = (None, None, None, None)
        self._ledger.acknowledge(
            Ack(self.name, head.version, head.sha256, head.epoch, "live", *nothing, time.time(), performance)
        )

    def _refuse(self, head: Manifest, error: DeltaSyncError) -> None:
        about = (head.version, None, type(error).__name__, str(error), time.time())
        self._ledger.acknowledge(Ack(self.name, self._at.version, self._at.manifest, head.epoch, "refused", *about))
        self.refused.set()


class Engine:
    """A loop of small matrix products, each an output; work is done between two of them."""

    def __init__(self) -> None:
        self._orders: queue.Queue = queue.Queue()
        self._outputs, self._stopped = [time.monotonic()], threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def between_steps(self, work) -> None:
        """Do it on the engine's thread, before its next output."""
        done = threading.Event()
        self._orders.put((work, done))
        if not done.wait(60):
            raise TimeoutError("the stand-in engine took no order within 60 s")

    def longest(self, since: float) -> float:
        """The longest time between two outputs since a moment, until three more have come."""
        had, end = len(self._outputs), time.monotonic() + 10
        while len(self._outputs) < had + 3 and time.monotonic() < end:
            time.sleep(0.002)
        outputs = self._outputs[:]
        return max(b - a for a, b in itertools.pairwise(outputs) if b >= since)

    def stop(self) -> None:
        """End the loop."""
        self._stopped.set()
        self._thread.join(20)

    def _run(self) -> None:
        a = np.ones((64, 64), np.float32)
        while not self._stopped.is_set():
            time.sleep(0.004)
            a = (a @ a) / 64
            while not self._orders.empty():
                work, done = self._orders.get()
                work()
                done.set()
            self._outputs.append(time.monotonic())
