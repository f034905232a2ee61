"""What changed since the snapshot, and how a waiting change set moves when the one before it is committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from delta_sync import tracing
from delta_sync.delta import fold
from delta_sync.tensor_delta import TensorDelta
from trl_callback.parts import Parts


@dataclass(frozen=True)
class ChangeSet:
    """Every changed tensor of one capture, relative to the snapshot; ``step`` is the optimizer step it was taken at.

    ``trace`` lasts until the changes are durable, or until a later capture holds them.
    ``parts`` are the objects of the next version that were begun during the capture, where it was known to be next.
    """

    step: int
    deltas: Mapping[str, TensorDelta]
    parts: Parts | None = None
    trace: tracing.Span = field(default=tracing.OFF, compare=False)

    @property
    def changed(self) -> int:
        """How many elements changed."""
        return sum(delta.changed for delta in self.deltas.values())


def rebase(waiting: ChangeSet, committed: ChangeSet) -> ChangeSet:
    """``waiting``, taken against the same snapshot as ``committed``, as changes to the snapshot after ``committed``.

    Exact: ULP steps are a group, so going back through ``committed`` and on through ``waiting`` is one fold.
    """
    names = [*waiting.deltas, *(name for name in committed.deltas if name not in waiting.deltas)]
    folded = {name: _rebase_tensor(waiting.deltas.get(name), committed.deltas.get(name)) for name in names}
    deltas = {name: delta for name, delta in folded.items() if delta is not None}
    return ChangeSet(waiting.step, deltas, trace=waiting.trace)


def _rebase_tensor(waiting: TensorDelta | None, committed: TensorDelta | None) -> TensorDelta | None:
    parts = [*([] if committed is None else [_inverse(committed)]), *([] if waiting is None else [waiting])]
    folded = fold(parts)
    return folded[0] if folded else None


def _inverse(delta: TensorDelta) -> TensorDelta:
    steps = np.negative(delta.values)  # modulo 2**bits
    return TensorDelta(delta.name, delta.dtype, delta.shape, delta.encoding, delta.positions, steps)
