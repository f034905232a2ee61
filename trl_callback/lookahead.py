"""The trainer's own batches of prompts, one generation further than it has asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Upcoming:
    """The batch that the trainer will generate for next, and the optimizer step at which it will do so."""

    batch: Any
    step: int


class LookAhead:
    """Stands before ``Trainer.get_batch_samples``: hands on what the data loader yields, and keeps what comes after.

    TRL's loader yields each generation batch ``steps_per_generation * num_iterations`` times (``every``), and the
    trainer generates for the first of these. Nothing is looked at beyond the end of an epoch: the order of the next
    one is not drawn yet.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._original = trainer, trainer.get_batch_samples
        self.every: int = trainer.args.steps_per_generation * trainer.num_iterations
        self._iterator: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()  # pulled from the loader, not yet handed on
        self._ended = False
        self._handed: list[Any] = []
        self._window_end = 0  # the trainer's count of batches (``_step``) when what was handed on last is used up

    @property
    def steps(self) -> int:
        """Optimizer steps, at most, from one generation to the next."""
        return -(-self.every // int(self._trainer.args.gradient_accumulation_steps))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """What the trainer asks for; the loader is read ``every`` batches further."""
        if epoch_iterator is not self._iterator:
            self._iterator, self._ended = epoch_iterator, False
            self._ahead.clear()
        self._pull(num_batches + self.every)
        handed = [self._ahead.popleft() for _ in range(min(num_batches, len(self._ahead)))]
        self._window_end = self._trainer._step + len(handed)
        self._handed = handed
        return self._original(iter(handed), num_batches, device)

    def next_generation(self) -> Upcoming | None:
        """Asked while the trainer generates: what it will generate for after this, None if nothing in this epoch."""
        now = self._trainer._step
        later = (now // self.every + 1) * self.every
        state, accumulation = self._trainer.state, self._trainer.args.gradient_accumulation_steps
        if later < self._window_end:
            return Upcoming(self._handed[later - self._window_end], state.global_step)
        beyond = later - self._window_end
        step = state.global_step + 1 + beyond // accumulation
        if beyond >= len(self._ahead) or step >= state.max_steps:
            return None
        return Upcoming(self._ahead[beyond], step)

    def _pull(self, count: int) -> None:
        while not self._ended and len(self._ahead) < count:
            try:
                self._ahead.append(next(self._iterator))  # type: ignore[arg-type]
            except StopIteration:
                self._ended = True
