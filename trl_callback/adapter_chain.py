"""Versions that are whole LoRA adapters over weights that never change: one origin, the base, then adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delta_sync.adapter import AdapterConfig, encode_adapter
from delta_sync.anchor_files import Tensor
from delta_sync.delta import apply
from delta_sync.errors import ChainError, FormatError, IntegrityError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Kind, Manifest, ObjectRef
from delta_sync.planner import build_plan
from delta_sync.tensor_delta import TensorDelta
from delta_sync.writer import adapter_ref
from trl_callback.chain import Attempt, Chain
from trl_callback.changes import ChangeSet
from trl_callback.config import DeltaSyncConfig
from trl_callback.parts import Parts
from trl_callback.snapshot import Snapshot

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey


class AdapterChain(Chain):
    """See Chain; ``base`` is what anchors hold, ``adapter`` what is published and moves.

    Without ``keep_anchors`` the base is anchored once at most: every version is whole, so a chain of any length costs
    its manifests.
    """

    kind: Kind = "adapter"

    def __init__(
        self,
        ledger: Ledger,
        base: Snapshot,
        config: DeltaSyncConfig,
        sidecars: Mapping[str, bytes],
        step: int,
        key: SigningKey | None = None,
        *,
        adapter: Snapshot,
        settings: AdapterConfig,
    ) -> None:
        self._adapter, self._settings = adapter, settings
        super().__init__(ledger, base, config, sidecars, step, key)

    def _origin(self, step: int) -> Manifest:
        """The adapter as it is now, over an origin of the base unless the run is at that base already.

        An origin is none of the versions that cover a step: nobody is to roll out from the base alone.
        """
        if not self._goes_on():
            self._manifest = super()._origin(step)
            self._published.pop()
        data = self._whole({})
        state, total = self._snapshot.digest_with({}), self._adapter.total_elements
        ref, states = self._put(data), self._adapter.states
        self._manifest = self._commit(self.kind, (step, step), states, state, ref, changed=total, total=total)
        self._keep((data,))
        return self._manifest

    def _goes_on(self) -> bool:
        """Whether the version before ours is over the very base that this trainer has."""
        before, base = self._writer.previous, self._snapshot
        if before is None or self._writer.after_reset:
            return False
        return (before.state_digest, before.model_fingerprint) == (base.digest_with({}), base.fingerprint)

    @property
    def goes_on(self) -> bool:
        """See Chain; an origin of our own may be version 1."""
        return self.previous is not None

    def has_anchor(self) -> bool:
        """Whether somebody who has nothing can get to the newest version."""
        try:
            build_plan(self._ledger, self._manifest, None, None)
        except (ChainError, FormatError, IntegrityError):
            return False
        return True

    def begin_early(self) -> Parts | None:
        """None: an adapter is one object, made once its last tensor is known."""
        return None

    def prepare(self, changes: ChangeSet) -> Attempt:
        """The whole adapter, with the changes, as an object that is stored; after a StoreError, call it again."""
        data = self._whole(changes.deltas)
        states = {**self._adapter.states, **self._adapter.advanced(changes.deltas)}
        state = self._snapshot.digest_with({})
        total = self._adapter.total_elements
        return Attempt(changes, states, state, (self._put(data),), None, (data,), total=total)

    @property
    def anchor_is_due(self) -> bool:
        """Only so that older versions can go."""
        return self._config.keep_anchors is not None and super().anchor_is_due

    def _whole(self, deltas: Mapping[str, TensorDelta]) -> bytes:
        """The next version's object."""
        tensors = (self._after(tensor, deltas.get(tensor[0])) for tensor in self._adapter)
        return encode_adapter(self._writer.run, self._writer.next_version, self._settings, tensors)

    def _after(self, tensor: Tensor, delta: TensorDelta | None) -> Tensor:
        if delta is None:
            return tensor
        name, kind, shape, bits = tensor
        bits = bits.copy()
        apply(delta, bits)
        return name, kind, shape, bits

    def _put(self, data: bytes) -> ObjectRef:
        ref = adapter_ref(self._writer.next_version, self._writer.epoch, data)
        self._ledger.store.put(ref.key, data)
        return ref
