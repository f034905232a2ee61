"""Which step's weights every completion came from."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT = 1000  # batches


@dataclass(frozen=True)
class BatchRecord:
    """One training batch: the step it was used at, and of each completion the step whose weights were its oldest.

    None in ``made``: weights that are not known to be a version of this trainer's.
    """

    step: int
    made: tuple[int | None, ...]
    ahead: bool


@dataclass
class RolloutLog:
    """The last thousand batches, and how many completions of all batches were how many optimizer steps old."""

    batches: deque[BatchRecord] = field(default_factory=lambda: deque(maxlen=KEPT))
    staleness: Counter[int] = field(default_factory=Counter)

    def note(self, step: int, made: Sequence[int | None], *, ahead: bool) -> list[int]:
        """Add a batch; the staleness of each completion of which it is known."""
        self.batches.append(BatchRecord(step, tuple(made), ahead))
        known = [step - one for one in made if one is not None]
        self.staleness.update(known)
        return known
