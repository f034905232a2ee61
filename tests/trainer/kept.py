"""Each step's cast weights, and whether a run's versions are those: nothing waits or looks while it trains."""

from __future__ import annotations

from typing import Any

import bucket
import tiny
from transformers import TrainerCallback


class KeepSteps(TrainerCallback):
    """Keeps a checkpoint, cast to what is served, of the start (step 0, or where training resumes) and of each step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps[state.global_step] = tiny.cast_state(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps[state.global_step] = tiny.cast_state(model)

    def check(self, uri: str, last: int) -> list[Any]:
        """The manifests from the newest on that still has the first weights: each version has its step's bits, no step
        is left out, and the newest is of step ``last``.
        """
        seen, covered = [], set()
        for manifest, bits in bucket.versions(uri, bucket.tensors(self.steps[min(self.steps)])):
            assert bits == bucket.cast_bytes(self.steps[manifest.steps[1]]), (manifest.version, manifest.steps)
            covered |= set(range(manifest.steps[0], manifest.steps[1] + 1))
            seen.append(manifest)
        assert seen[-1].steps[1] == last, [m.steps for m in seen]
        assert covered == set(range(seen[0].steps[0], last + 1)), [m.steps for m in seen]
        return seen
