"""The live weights of all ranks seen as one: what they are proven to be, and the ways to change and check them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from delta_sync.digest import model_fingerprint
from delta_sync.errors import IntegrityError, MappingError
from delta_sync.manifest import Manifest, PromptCache, TensorState
from delta_sync.plan import Plan, Position
from vllm_delta_plugin.adapter_slot import no_lora
from vllm_delta_plugin.cache_salt import CacheSalt
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.engine_audit import Auditor, compare
from vllm_delta_plugin.engine_commit import Committed, commit_all
from vllm_delta_plugin.engine_load import Loaded, Pause, load_dense
from vllm_delta_plugin.engine_stage import Staged, Stager
from vllm_delta_plugin.gate import Gate
from vllm_delta_plugin.group import ALONE, Group
from vllm_delta_plugin.main_thread import EngineBroken, MainThread
from vllm_delta_plugin.output_clock import OutputClock
from vllm_delta_plugin.proof import Layout, Proven, Sums, check_names
from vllm_delta_plugin.ranks import Ranks, Reply
from vllm_delta_plugin.weights_label import WeightsLabel

_STRICTEST_FIRST: tuple[PromptCache, ...] = ("none", "new_session", "all")


@dataclass(frozen=True)
class Audit:
    """What a scan found: each rank's region sums, and the first that is not what was proven.

    ``copies_differ``: a rank has several copies of a region, and the sums don't say which is right.
    """

    found: Sequence[Sums]
    error: IntegrityError | None
    copies_differ: bool = False


class Live:
    """Made on the engine's thread, where it attaches the workers; later used by the coordinator's thread.

    Raises RankError or MappingError if the model cannot be followed exactly.
    """

    def __init__(
        self, config: ReplicaConfig, ranks: Ranks, main: MainThread, salt: CacheSalt, pause: Pause, group: Group = ALONE
    ) -> None:
        self._ranks, self._main, self._salt, self._pause, self._group = ranks, main, salt, pause, group
        self._timeout, self._transition = config.stage_timeout, config.transition
        self.gate, self.outputs = Gate(), OutputClock()
        self.lost = False  # a load in place failed half way: the engine is paused until one succeeds
        replies = group.share(ranks.tell("attach", config.to_dict()))
        sums = [reply["regions"] for reply in replies]
        self.ranks = len(replies)
        self._layout = Layout(_tensors(replies), sums)
        self._stager = Stager(main, ranks, config.stage_timeout, group)
        self._auditor = Auditor(main, ranks, config.audit_commits, config.audit_period, config.retry)
        self._serves: Manifest | None = None
        self.lora: Mapping[str, Any] | None = replies[0].get("lora")
        self.shadow_bytes = sum(int(reply.get("shadow_bytes") or 0) for reply in replies)
        self.stale = False  # what is served is not what vLLM makes of the weights, which are proven all the same
        self._adapter: str | None = None  # sha256 of the adapter that is loaded
        self.fingerprint = model_fingerprint(self._layout.states(dict.fromkeys(self._layout.tensors, 0)))
        self._proven: Proven | None = None
        self.forget(sums)

    @property
    def position(self) -> Position | None:
        """Where the live weights are, None while they are no proven version's."""
        serves = self._serves
        return None if serves is None else Position(serves.version, serves.sha256)

    @property
    def label(self) -> WeightsLabel:
        """The same, as tokens are labelled with it."""
        serves = self._serves  # read once: another thread may set it
        return WeightsLabel() if serves is None else WeightsLabel(serves.version, serves.epoch)

    @property
    def tensor_count(self) -> int:
        """How many tensors the served model's checkpoint has."""
        return len(self._layout.tensors)

    @property
    def generation(self) -> int:
        """Commits and rollbacks so far."""
        return self._salt.generation

    @property
    def auditing(self) -> bool:
        """True while a scan runs."""
        return self._auditor.running

    @property
    def audited(self) -> tuple[float, float] | None:
        """When the last scan that counts began and ended on this engine's ranks, in unix time."""
        return self._auditor.span

    @property
    def must_audit(self) -> bool:
        """True while no commit may happen before a scan is done."""
        return self._auditor.must_finish

    @property
    def state_digest(self) -> str | None:
        """Digest of the whole live state; None while the ranks' copies disagree."""
        proven = self._proven  # read once: another thread may set it
        return proven.state if proven else None

    def states(self) -> dict[str, TensorState]:
        """Every tensor's state; empty while the ranks' copies disagree."""
        proven = self._proven  # read once: another thread may set it
        return self._layout.states(proven.digests) if proven else {}

    @property
    def adapter_states(self) -> Mapping[str, TensorState]:
        """The states of the live adapter's tensors, by PEFT's names; empty where a version has none."""
        serves = self._serves
        return serves.tensors if serves is not None and serves.kind == "adapter" else {}

    def stage(self, plan: Plan) -> Staged:
        """Stage and prove a plan in the background; see Stager.stage."""
        self._group.open(plan, self.state_digest)
        return self._stager.stage(plan, self._layout, self._sums)

    def check(self, plan: Plan) -> None:
        """MappingError if the plan's target is an adapter and this engine serves none: before anything is touched."""
        if plan.target.kind == "adapter" and self.lora is None:
            raise no_lora(plan.target)

    def changes_adapter(self, plan: Plan) -> bool:
        """Whether the plan's target is served with another adapter than the one that is loaded, or with none."""
        return adapter_of(plan.target) != self._adapter

    def changes_what_is_served(self, plan: Plan) -> bool:
        """Whether a plan that changes no weights is served otherwise than these are now."""
        return self.stale or self.changes_adapter(plan)

    def drop(self) -> None:
        """Forget what is staged."""
        self._stager.drop()

    def commit(self, staged: Staged, report: Callable[[Committed, int], None]) -> Committed:
        """Make a staged plan live on all ranks or none; see commit_all. With "sync" running requests end first.

        ``report`` is called with that and the generation before the engine steps again: tokens and status go together.
        """
        self.outputs.rest()  # from the proof
        if self._transition != "sync":
            return self._group.commit(self._main, lambda: self._commit(staged, report))
        try:
            self._stop_stepping()
            return self._main.run(lambda: self._commit(staged, report))
        finally:
            self._step_again()

    def _stop_stepping(self) -> None:
        """With "sync" running requests end first, and new ones wait at the gate."""
        drain = self._transition == "sync"
        if drain:
            self.gate.close()
        self._pause.begin(drain)

    def _step_again(self) -> None:
        self._pause.end()
        self.gate.open()

    def _commit(self, staged: Staged, report: Callable[[Committed, int], None] = lambda *_: None) -> Committed:
        """On the engine's thread, so that whatever it reads next sees new bits and new position together."""
        plan = staged.plan
        self.outputs.commit()
        remains = _cache_that_remains(plan, self._serves)
        committed = commit_all(self._ranks, self._salt, plan.target.version, remains, self._group.agree)
        self._serves, self._adapter = plan.target, adapter_of(plan.target)
        self._sums, self._proven, self.stale = staged.after.sums, staged.after, False
        self._auditor.committed()
        committed = replace(committed, unsettled=committed.unsettled or self._recompute())
        report(committed, self.generation)
        return committed

    def _recompute(self) -> Exception | None:
        """With "recompute" running requests start over; why they could not."""
        if self._transition == "recompute":
            try:
                self._pause.recompute()
            except EngineBroken:
                raise
            except Exception as error:  # noqa: BLE001  # the weights are live already; vLLM's own, as caches may be moving
                return error
        return None

    def load(self, plan: Plan) -> Loaded:
        """Pause, overwrite live weights, verify, resume. See load_dense.

        On any error nothing is known about the weights any more and the engine stays paused.
        """
        self._stop_stepping()
        self._serves, self._proven, self.lost = None, None, True
        loaded = load_dense(plan, self._layout, self._main, self._ranks, self._timeout, self._salt.advance)
        self._sums, self._proven, self.stale = loaded.proven.sums, loaded.proven, False
        unsettled = None
        if self.changes_adapter(plan):  # still paused
            staged = self.stage(Plan(plan.target, "live", None, (), {}))
            unsettled = self._main.run(lambda: self._commit(staged)).unsettled
        self._serves, self.lost = plan.target, False
        self._auditor.committed()
        unsettled = unsettled or self._main.run(self._recompute)
        self._step_again()
        return replace(loaded, unsettled=unsettled)

    def adopt(self, plan: Plan) -> None:
        """The live bits are the target's already."""
        self._group.open(plan, self.state_digest)
        self._group.exchange(None)
        self._serves = plan.target

    def refuse_load(self, plan: Plan) -> None:
        """MappingError where an anchor must not be loaded in place, before anything is touched or paused."""
        check_names(self._layout, plan.tensors)
        if missing := set(self._layout.tensors) - set(plan.tensors):
            raise MappingError(
                f"anchor for version {plan.target.version}",
                expected=f"all {self.tensor_count} tensors of the served model",
                got=f"no {min(missing)!r}",
                remedy="serve the model that is trained",
            )
        if not self._group.can_load:
            raise MappingError(
                "anchor",
                expected="one that fits into what staging may use, since engines that share experts load none in place",
                got="more on a rank",
                remedy="raise stage_bytes, or restart the server from this anchor's folder",
            )

    def forget(self, found: Sequence[Sums], copies_differ: bool = False) -> None:
        """Trust only what a scan of all ranks found: no version is known to be live."""
        self._serves, self._sums, self._proven = None, found, None
        if not copies_differ:
            with suppress(IntegrityError):
                self._proven = Proven.of(self._layout, found)

    def request_audit(self) -> None:
        """Scan as soon as possible."""
        self._auditor.request()

    def audit_step(self) -> Audit | None:
        """Start or poll a scan; when it is done, what it found. Another engine's bad news counts as a scan too."""
        found = self._auditor.step()
        if found is None:
            elsewhere = self._group.damage(self._sums)
            self.stale = self.stale or elsewhere is not None
            return None if elsewhere is None else Audit(*elsewhere)
        differ = self._auditor.copies_differ
        error = compare(found, self._group.own(self._sums)) or self._auditor.damage
        told = error is not None and self._group.report_damage(found, error, differ)  # then all stage what heals it
        self.stale = self.stale or told or self._auditor.damage is not None
        return Audit(self._group.with_own(self._sums, found), error, differ)


def adapter_of(manifest: Manifest) -> str | None:
    """The adapter that a version is served with, by its sha256."""
    return manifest.objects[0].sha256 if manifest.kind == "adapter" else None


def _cache_that_remains(plan: Plan, serves: Manifest | None) -> PromptCache:
    """The strictest policy of the versions on the way; no cache outlives an anchor, a fold or a way back.

    Nor one of several adapters on the way, of which the plan knows the last alone.
    """
    if plan.target.kind == "adapter":
        follows = plan.start == "position" and serves is not None and plan.target.parent == serves.sha256
        return plan.target.prompt_cache if follows and not plan.deltas else "none"
    manifests = [step for step in plan.deltas if isinstance(step, Manifest)]
    if plan.start in ("anchor", "back") or len(manifests) < len(plan.deltas):
        return "none"
    policies = {manifest.prompt_cache for manifest in manifests}
    return next((policy for policy in _STRICTEST_FIRST if policy in policies), "none")


def _tensors(replies: Sequence[Reply]) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for reply in replies:
        described: Mapping[str, Mapping[str, Any]] = reply["tensors"]
        for name, value in described.items():
            described_as = (str(value["dtype"]), tuple(int(d) for d in value["shape"]))
            if tensors.setdefault(name, described_as) != described_as:
                raise MappingError(f"tensor {name!r}", expected=f"{tensors[name]} as on rank 0", got=described_as)
    return tensors
