"""One rank's side of the sync: what is live, what is staged, and the few moves between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from delta_sync.errors import ConflictError, IntegrityError, MappingError, SyncTimeoutError
from delta_sync.plan import Plan
from delta_sync.store.cache import MAX_BYTES, ObjectCache
from delta_sync.store.open import open_store
from delta_sync.threads import thread_count
from vllm_delta_plugin import background, stage
from vllm_delta_plugin.adapter_slot import AdapterSlot
from vllm_delta_plugin.anchor_diff import load_dense
from vllm_delta_plugin.audit import Scan, damaged, scan
from vllm_delta_plugin.background import Job
from vllm_delta_plugin.commit import HalfSwapped, Host, device_of
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.faults import Faults
from vllm_delta_plugin.reading import ReadingLedger
from vllm_delta_plugin.rehearsal import rehearse
from vllm_delta_plugin.shadow import Shadow, shadow_bytes
from vllm_delta_plugin.stage import Rank, Staged

Reply = dict[str, Any]


class RankSync:
    """States: idle, staging, staged, committed (until settled or undone), loading, loaded, failed.

    Every method but the constructor returns at once; long work runs in a Job. Not thread safe: call it from the
    worker's own thread, whose place in the queue of steps is what makes a commit fall between two of them.
    """

    def __init__(
        self,
        weights: WeightMap,
        config: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        slot: AdapterSlot | None = None,
    ) -> None:
        weights.check()
        if not weights.storages:
            raise MappingError("model", expected="weights loaded from a checkpoint", got="none on this rank")
        background.share_interpreter()
        self.weights = weights
        self._faults = Faults(rank, config.get("fault") or {})
        self._faults.at("attach")
        thread_count()  # refused here, as no object is to blame for a setting
        self._ledger = ReadingLedger(open_store(str(config["uri"])), cache=_cache(config))
        self._device = device_of(weights.storages)
        for storage in {(storage.dtype, storage.on_cpu): storage for storage in weights.storages}.values():
            rehearse(storage, Host() if storage.on_cpu else self._device)
        self._rank = Rank(weights, self._device, world_size == 1, config.get("stage_bytes"), slot)
        self._generation = 0  # odd while a swap runs
        self._stage: Job[Staged] | None = None
        self._base = -1  # generation at which staging read the live bits
        self._committed: int | None = None
        self._mixed = False  # a swap failed half way and could not be taken back
        self._dense: Job[dict[str, int]] | None = None
        self._dense_target: int | None = None
        self._audit: Job[tuple[Scan, str | None]] | None = None
        self.version: int | None = None

    def describe(self) -> Reply:
        """Tensors and fresh region digests of this rank, and the checkpoint tensors it does not hold."""
        return {
            "tensors": {n: {"dtype": t.dtype.name, "shape": list(t.shape)} for n, t in self.weights.tensors.items()},
            "regions": self.weights.digests(),
            "ignored": self.weights.ignored,
            "aliases": self.weights.aliases,
            "lora": self._rank.slot and self._rank.slot.describe(),
            "shadow_bytes": shadow_bytes(self.weights.storages),
        }

    def stage_begin(self, plan: Plan) -> Reply:
        """Start staging a plan; what was staged before is dropped. ConflictError on an open commit."""
        self._no_open_commit()
        self.stage_drop()
        self._base = self._generation
        self._ledger.begin()

        def work(job: Job[Staged]) -> Staged:
            self._faults.at("stage")
            return stage.stage(job, self._rank, self._ledger, plan)

        self._stage = Job("delta-sync-stage", background.STAGING, work)
        return {"state": "staging"}

    def stage_poll(self) -> Reply:
        """Where staging (or a dense load) stands; sums once staged, fresh digests once loaded."""
        if self._dense is not None:
            return self._poll_dense(self._dense)
        job = self._stage
        if job is None:
            return {"state": "idle"}
        if job.error is not None:
            return {"state": "failed", "error": background.describe(job.error, job.object)}
        if job.result is None:
            return {"state": "staging", "object": job.object}
        staged = job.result
        state = "staged" if self._committed is None else "committed"
        done = {"parts": staged.parts, "changed": staged.changed, "read": self._ledger.read}
        return {"state": state, "target": staged.target, **done}

    def stage_drop(self) -> Reply:
        """Forget what is staged; ConflictError while a commit is not settled."""
        self._no_open_commit()
        if self._stage is not None:
            self._stage.cancel()
        self._stage = None
        return {"state": "idle"}

    def commit(self, target: int) -> Reply:
        """Swap the staged version in; ConflictError unless it is staged against the bits that are live now."""
        staged = self._staged(target)
        if self._committed is not None or self._base != self._generation:
            raise ConflictError(
                f"commit of version {target}", expected="staged on the live bits", got="live bits moved"
            )
        self._faults.at("commit")
        try:
            self._swap(staged, lambda: self._faults.at("commit_half"))
        except HalfSwapped:
            self._mixed = True
            raise
        except BaseException:
            self._base = self._generation  # a failed swap has put the old bits back
            raise
        self._committed = target
        return {"state": "committed", "generation": self._generation}

    def undo(self, target: int) -> Reply:
        """Swap back; does nothing where this version was not committed, so every rank may be told. IntegrityError."""
        self._faults.at("undo")
        if self._mixed:
            raise IntegrityError("live weights", expected="one version's", got=f"some of version {target}'s")
        if self._committed is None:
            return {"state": "unchanged", "generation": self._generation}
        staged = self._staged(target)
        self._swap(staged, lambda: None)
        self._committed = None
        self._base = self._generation  # exactly the bits that staging read are live again
        return {"state": "staged", "generation": self._generation}

    def settle(self, target: int) -> Reply:
        """Free the undo buffer: the version is live for good."""
        self._faults.at("settle")
        if self._committed != target:
            raise ConflictError(f"settling version {target}", expected="it to be committed", got=self._committed)
        self._committed, self._stage, self.version = None, None, target
        if self.weights.requantised is not None:  # what it owes would be kept in memory until somebody reads it
            Job("delta-sync-shadow", background.STAGING, _settled(self.weights.requantised.shadow))
        return {"state": "idle", "version": target}

    def load_dense(self, plan: Plan) -> Reply:
        """Start overwriting live weights with a plan's target; the engine must be paused, and verify afterwards."""
        self.stage_drop()
        self._generation += 2
        self._dense_target = plan.target.version
        self._ledger.begin()

        def work(job: Job[dict[str, int]]) -> dict[str, int]:
            folded = stage.fold_plan(job, self._rank, self._ledger, plan, self._rank.stage_bytes)
            with self._device.reading():
                return load_dense(job, self.weights, self._ledger, plan, folded)

        self._dense = Job("delta-sync-load", 0, work)
        return {"state": "loading", "target": plan.target.version}

    def audit_begin(self, again: bool = False) -> Reply:
        """Start a full scan; a running one is dropped. ``again``: what the last one found does not count."""
        if self._audit is not None:
            self._audit.cancel()
        if self.weights.requantised is not None and not again:
            self.weights.requantised.next_turn()

        def work(job: Job[Any]) -> tuple[Scan, str | None]:
            looking = job, self.weights, self._device, lambda: self._generation
            return scan(*looking), damaged(*looking)

        self._audit = Job("delta-sync-audit", background.AUDITING, work)
        return {"state": "running"}

    def audit_poll(self) -> Reply:
        """Where the scan stands; once it is done every region's digest, a module that is damaged, unequal copies."""
        job = self._audit
        if job is None:
            return {"state": "idle"}
        if job.error is not None:
            raise job.error
        if job.result is None:
            return {"state": "running"}
        found, module = job.result
        told = {"regions": found.sums, "unequal": found.unequal, "damaged": module}
        return {"state": "done", **told, "generation": self._generation, "began": job.began, "ended": job.ended}

    def read_tensor(self, name: str) -> Reply:
        """This rank's live bits of a tensor: region key -> row-major little-endian bytes of that region."""
        regions = self.weights.regions.get(self.weights.aliases.get(name, name), [])
        if not regions and name not in self.weights.known:
            raise MappingError(f"tensor {name!r}", expected="a tensor of the served model", got="an unknown name")
        boxes = {}
        for region in regions:
            live = self.weights.storages[region.storage]
            boxes[region.key] = live.read_box(region.shape, region.dst_offset, region.dst_strides).tobytes()
        return {"name": name, "regions": boxes}

    def read_adapter(self, name: str, rank: int) -> Reply:
        """One module's A and B of ``rank`` as this rank computes with them, B scaled: row-major little-endian bytes."""
        if self._rank.slot is None:
            raise MappingError("adapter", expected="a server with --enable-lora", got="one without")
        return {part: self._rank.slot.read(name, part, rank) for part in ("A", "B")}

    def _swap(self, staged: Staged, between: Any) -> None:
        self._generation += 1
        try:
            staged.swap.swap(between)
        finally:
            self._generation += 1

    def _staged(self, target: int) -> Staged:
        staged = self._stage.result if self._stage is not None else None
        if staged is None or staged.target != target:
            got = "nothing" if staged is None else f"version {staged.target}"
            raise ConflictError(f"version {target}", expected="it to be staged", got=got)
        return staged

    def _no_open_commit(self) -> None:
        if self._committed is not None:
            raise ConflictError("staging", expected="a settled commit", got=f"version {self._committed} unsettled")
        if self._dense is not None and self._dense.running:  # the engine waits no longer for it
            self._dense.cancel()
            raise SyncTimeoutError(
                "staging", expected="no dense load", got=f"one of version {self._dense_target}, being stopped"
            )
        self._dense = None

    def _poll_dense(self, job: Job[dict[str, int]]) -> Reply:
        if job.error is not None:
            return {"state": "failed", "error": background.describe(job.error, job.object)}
        if job.result is None:
            return {"state": "loading", "target": self._dense_target}
        return {"state": "loaded", "target": self._dense_target, "regions": job.result, "read": self._ledger.read}


def _settled(shadow: Shadow) -> Callable[[Job[bool]], bool]:
    def work(_: Job[bool]) -> bool:
        shadow.settle()
        return True

    return work


def _cache(config: Mapping[str, Any]) -> ObjectCache | None:
    folder, gib = config.get("cache"), config.get("cache_gib")
    return ObjectCache(folder, MAX_BYTES if gib is None else int(gib * 2**30)) if folder else None
