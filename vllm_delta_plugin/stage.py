"""Staging one version in the background: fetch, verify, decode, fold, map, read old bits, sum up, bring near."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_sync.delta_file import Unpacked
from vllm_delta_plugin.adapter_slot import AdapterSlot, AdapterSwap, no_lora
from vllm_delta_plugin.anchor_diff import stage_anchor
from vllm_delta_plugin.background import Job
from vllm_delta_plugin.base_bits import AnchorBits, Start, live_bits
from vllm_delta_plugin.chain import Early, Folded, drop_aliases, fold_chain, undone
from vllm_delta_plugin.commit import Device, Swap
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.requantised import stage_made
from vllm_delta_plugin.shadow import ShadowedSwap
from vllm_delta_plugin.staged import StageBuilder, check_tensor

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.plan import Plan


@dataclass(frozen=True)
class Staged:
    """A version this rank can commit: its swap, the digest change of each region, how many elements change."""

    target: int
    swap: Swap
    parts: dict[str, int]
    changed: int


@dataclass(frozen=True)
class Rank:
    """What staging needs to know of this rank; ``limit`` caps staged bytes (None: a share of free memory)."""

    weights: WeightMap
    device: Device
    only_rank: bool
    limit: int | None = None
    slot: AdapterSlot | None = None  # where the engine serves LoRA adapters

    @property
    def stage_bytes(self) -> int:
        """The cap that holds now."""
        return self.device.staging_limit() if self.limit is None else self.limit


def stage(job: Job[Staged], rank: Rank, ledger: Ledger, plan: Plan) -> Staged:
    """Prepare ``plan`` without touching live weights; any error of delta_sync, Cancelled if dropped meanwhile."""
    adapted = _with_adapter(rank, ledger, plan)  # first: what does not fit is refused before an anchor is read
    limit = rank.stage_bytes
    early = _Early(rank, limit, wanted=plan.start in ("position", "live") and len(plan.deltas) == 1)
    with rank.device.reading():
        folded = fold_plan(job, rank, ledger, plan, limit, early if early.complete else None)
        builder = early.builder
        if not early.complete:
            builder = early.builder = rank.device.builder(rank.weights, limit)
            if plan.start == "anchor":
                stage_anchor(job, builder, ledger, plan, folded)
            else:
                builder.add_deltas(folded)
    job.check()
    swap = adapted(_prepared(job, rank, plan, builder))
    return Staged(plan.target.version, swap, builder.parts, builder.changed)


def _prepared(job: Job[Any], rank: Rank, plan: Plan, builder: StageBuilder) -> Swap:
    """The swap of what is staged and, where vLLM serves what it makes of weights, of what follows from it.

    That is made anew for all modules where live bits are taken for what they are, so that damage ends here.
    """
    requantised = rank.weights.requantised
    if requantised is None:
        return rank.device.prepare(builder)
    modules = requantised.modules if plan.start in ("live", "anchor") else requantised.touched(builder)
    with rank.device.reading():
        stage_made(builder, modules, job.check)
    shadowed = builder.take_shadowed()
    requantised.shadow.settle()
    return ShadowedSwap(rank.device.prepare(builder), requantised.shadow, shadowed)


def _with_adapter(rank: Rank, ledger: Ledger, plan: Plan) -> Callable[[Swap], Swap]:
    """What makes of staged weights the same with the target's adapter over them, or with none."""
    slot, target = rank.slot, plan.target
    if slot is None:
        if target.kind == "adapter":
            raise no_lora(target)
        return lambda weights: weights
    adapter = slot.prepare(ledger, target) if target.kind == "adapter" else slot.nothing()
    return lambda weights: AdapterSwap(weights, slot, adapter)


class _Early:
    """Stages one version's objects one by one; see chain.Early.

    Not where tensors share memory under two names: their changes must be compared first.
    """

    def __init__(self, rank: Rank, limit: int, *, wanted: bool) -> None:
        self.builder = rank.device.builder(rank.weights, limit)
        self.read = rank.device.read
        self.complete = wanted
        self._not_now = set(rank.weights.aliases)  # names, and those staged already

    def add_unpacked(self, object_: Unpacked) -> bool:
        """See chain.Early."""
        names = [entry.name for group in object_.groups for entry in group.entries]
        if not self._own(names) or not self.builder.add_unpacked(object_):
            return False
        self._not_now.update(names)
        return True

    def add(self, part: Folded) -> bool:
        """See chain.Early."""
        if self._own(part):
            self.builder.add_deltas(part)
            self._not_now.update(part)
        return self.complete

    def _own(self, names: Iterable[str]) -> bool:
        self.complete = self.complete and self._not_now.isdisjoint(names)
        return self.complete


def fold_plan(
    job: Job[Any],
    rank: Rank,
    ledger: Ledger,
    plan: Plan,
    limit: int,
    early: Early | None = None,
) -> Folded:
    """The plan's deltas, one folded change per tensor, tied names dropped; ``early`` as in ``fold_chain``."""
    weights = rank.weights
    check = partial(check_tensor, weights, only_rank=rank.only_rank)
    start: Start = partial(live_bits, weights)
    if plan.anchor is not None:
        start = AnchorBits(job, ledger, plan.anchor, weights.aliases)
    folded = fold_chain(ledger, plan.deltas, check, limit, job.reading, start, early)
    drop_aliases(folded, rank.weights.aliases)
    return undone(folded) if plan.start == "back" else folded
