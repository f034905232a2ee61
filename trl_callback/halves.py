"""TRL's ``_generate_and_score_completions`` in two halves: rolling out, in any thread, and scoring, in the trainer's.

Both halves are TRL's own method. The first runs on a copy of the trainer that has its own environments and its own
metrics, and ends where completions are there. The second runs on the trainer itself, which takes these completions
where it would have generated.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from delta_sync.errors import MappingError

NEEDED = ("_generate_and_score_completions", "_generate", "_prepare_inputs", "get_batch_samples", "_metrics", "_step",
          "num_iterations", "vllm_generation")  # fmt: skip
POOL = "_environment_pool"


@dataclass
class RolledOut:
    """One batch's completions, as TRL's ``_generate`` returned them, with all that came about on the way."""

    prompts: list[Any]  # as the environments completed them
    generated: Any
    environments: list[Any] | None
    metrics: dict[str, list[Any]]
    input_tokens: int

    @property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of every prompt."""
        return self.generated[0]  # type: ignore[no-any-return]

    @property
    def completion_ids(self) -> list[list[int]]:
        """Token ids of every completion, over all turns."""
        return self.generated[1]  # type: ignore[no-any-return]


class _Generated(BaseException):
    """Ends the first half; a BaseException, so that no handler on the way takes it for a failure."""

    def __init__(self, rolled: RolledOut) -> None:
        self.rolled = rolled


class _Training:
    """The model as the first half sees it: in training, whatever the trainer does to the model meanwhile."""

    training = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Played:
    """Stands in the second half where an environment was in the first: it was reset and played there."""

    def reset(self, **_: Any) -> None:
        """Nothing to observe: the prompts are already complete."""


def check_halves(trainer: Any) -> None:
    """MappingError naming what TRL's trainer is missing for its generation to run ahead."""
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        raise MappingError(
            f"rollouts_ahead with {type(trainer).__name__}",
            expected="TRL's GRPO or RLOO trainer with rollouts on a server",
            got=f"no attribute {missing[0]!r}",
            remedy="set rollouts_ahead=0",
        )


def new_environments(trainer: Any) -> dict[Any, list[Any]] | None:
    """An empty pool of environments for the first half; None for a trainer without any."""
    pool = getattr(trainer, POOL, None)
    return None if pool is None else {name: [] for name in pool}


def roll_out(trainer: Any, batch: Any, generation: Any, environments: dict[Any, list[Any]] | None) -> RolledOut:
    """The first half for ``batch``: with completions by ``generation``, playing in ``environments``, a pool."""
    kind, ahead = type(trainer), copy.copy(trainer)
    ahead.vllm_generation, ahead.model = generation, _Training(trainer.model)
    ahead.state = copy.copy(trainer.state)
    ahead.state.num_input_tokens_seen = 0
    ahead._last_loaded_step = ahead.state.global_step  # TRL is not to wait for weights: that is done
    ahead._metrics = {mode: defaultdict(list) for mode in trainer._metrics}
    if environments is not None:
        setattr(ahead, POOL, environments)

    def generate(prompts: list[Any]) -> Any:
        generated = kind._generate(ahead, prompts)
        metrics = dict(ahead._metrics["train"])
        raise _Generated(
            RolledOut(prompts, generated, getattr(ahead, "environments", None), metrics,
                      int(ahead.state.num_input_tokens_seen))
        )  # fmt: skip

    ahead._generate = generate
    try:
        kind._generate_and_score_completions(ahead, batch)
    except _Generated as done:
        return done.rolled
    raise MappingError("rollouts_ahead", expected="TRL to call _generate", got="a batch scored without it",
                       remedy="set rollouts_ahead=0")  # fmt: skip


def score(trainer: Any, batch: Any, rolled: RolledOut) -> Any:
    """The second half: TRL's scored batch, from completions that were there before."""

    def generated(prompts: list[Any]) -> Any:
        prompts[:] = rolled.prompts
        if rolled.environments is not None:
            trainer.environments = rolled.environments
        trainer.state.num_input_tokens_seen += rolled.input_tokens
        for name, values in rolled.metrics.items():
            trainer._metrics["train"][name].extend(values)
        trainer._metrics["train"]["num_tokens"] = [trainer.state.num_input_tokens_seen]
        return rolled.generated

    with instead(trainer, "_generate", generated), _played_environments(trainer, len(batch)):
        return type(trainer)._generate_and_score_completions(trainer, batch)


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for a while."""
    put_back = replace_attribute(owner, name, value)
    try:
        yield
    finally:
        put_back()


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set ``owner.name``; what is returned puts the instance's own attribute back, or removes it if it had none."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def put_back() -> None:
        if had:
            setattr(owner, name, before)
        else:
            vars(owner).pop(name, None)

    return put_back


@contextmanager
def _played_environments(trainer: Any, count: int) -> Iterator[None]:
    pool = getattr(trainer, POOL, None)
    if pool is None:
        yield
        return
    with instead(trainer, POOL, {name: [_Played()] * count for name in pool}):
        yield
