"""The class vLLM mixes into its worker: remote procedures that never raise and never wait long.

vLLM imports this module in every worker process before a model is loaded; the import installs the seams there.
A raise in one rank would leave the ranks' replies out of step for good, so each method answers
``{"ok": bool, "error": {"kind", "action", "error", "object"} | None, ...}``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_delta_plugin import worker_seams
from vllm_delta_plugin.background import describe

if TYPE_CHECKING:
    from delta_sync.plan import Plan
    from vllm_delta_plugin.rank_sync import RankSync

Reply = dict[str, Any]

worker_seams.install()


def _answer(method: Callable[..., Reply]) -> Callable[..., Reply]:
    @functools.wraps(method)
    def safe(self: Any, *args: Any) -> Reply:
        try:
            return {"ok": True, "error": None} | method(self, *args)
        except Exception as error:  # noqa: BLE001 - the reply carries it
            return {"ok": False, "error": describe(error)}

    return safe


class DeltaSyncWorkerExtension:
    """Named in ``--worker-extension-cls``; every name starts with delta_sync, since vLLM forbids collisions."""

    _delta_sync_rank: Any = None

    @_answer
    def delta_sync_attach(self: Any, config: dict[str, Any]) -> Reply:
        """Check that this model can be followed, scan it once, and describe this rank's tensors and regions."""
        from vllm_delta_plugin.adapter_slot import AdapterSlot
        from vllm_delta_plugin.after_loading import check_unmoved
        from vllm_delta_plugin.compat.load_seam import weight_map
        from vllm_delta_plugin.compat.lora_seam import LoraManager
        from vllm_delta_plugin.rank_sync import RankSync
        from vllm_delta_plugin.ranks import place
        from vllm_delta_plugin.refusals import check_config

        check_config(self.vllm_config)
        model = self.get_model()
        weights = weight_map(model)
        check_unmoved(model, weights)
        rank, world_size = place(self.vllm_config, self.rank)
        lora = self.vllm_config.lora_config is not None
        slot = AdapterSlot(LoraManager(self.model_runner), weights) if lora else None
        sync = RankSync(weights, config, rank=rank, world_size=world_size, slot=slot)
        self._delta_sync_rank = sync
        return {"rank": self.rank} | sync.describe()

    @_answer
    def delta_sync_stage_begin(self: Any, plan: Plan) -> Reply:
        """Start staging a plan in the background."""
        return _sync(self).stage_begin(plan)

    @_answer
    def delta_sync_stage_poll(self: Any) -> Reply:
        """State of staging or of a dense load: idle, staging, staged, committed, loading, loaded or failed."""
        return _sync(self).stage_poll()

    @_answer
    def delta_sync_stage_drop(self: Any) -> Reply:
        """Forget what is staged."""
        return _sync(self).stage_drop()

    @_answer
    def delta_sync_commit(self: Any, target_version: int) -> Reply:
        """Swap staged and live bits."""
        return _sync(self).commit(target_version)

    @_answer
    def delta_sync_undo(self: Any, target_version: int) -> Reply:
        """Swap back, if this rank had committed."""
        return _sync(self).undo(target_version)

    @_answer
    def delta_sync_settle(self: Any, target_version: int) -> Reply:
        """Free the undo buffer."""
        return _sync(self).settle(target_version)

    @_answer
    def delta_sync_load_dense(self: Any, plan: Plan) -> Reply:
        """Start writing a plan's target over live weights, while the engine is paused; poll with stage_poll."""
        return _sync(self).load_dense(plan)

    @_answer
    def delta_sync_audit_begin(self: Any, again: bool = False) -> Reply:
        """Start a full scan in the background; ``again``: what the last one found does not count."""
        return _sync(self).audit_begin(again)

    @_answer
    def delta_sync_audit_poll(self: Any) -> Reply:
        """State of the scan: idle, running, or done with every region's digest."""
        return _sync(self).audit_poll()

    @_answer
    def delta_sync_read_tensor(self: Any, name: str) -> Reply:
        """This rank's live bits of one tensor, as bytes by region key."""
        return _sync(self).read_tensor(name)

    @_answer
    def delta_sync_read_adapter(self: Any, name: str, rank: int) -> Reply:
        """One module's A and B, as bytes, as this rank computes with them."""
        return _sync(self).read_adapter(name, rank)


def _sync(worker: Any) -> RankSync:
    if worker._delta_sync_rank is None:
        raise RuntimeError("delta_sync_attach has not succeeded on this worker")
    rank: RankSync = worker._delta_sync_rank
    return rank
