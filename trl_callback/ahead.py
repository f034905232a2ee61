"""Rollouts that run ahead: while the trainer steps on one batch, the servers generate the next."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from delta_sync.errors import DeltaSyncError, SyncTimeoutError
from trl_callback.config import DeltaSyncConfig
from trl_callback.halves import RolledOut, check_halves, instead, new_environments, replace_attribute, roll_out, score
from trl_callback.http import CutError
from trl_callback.lines import Lines
from trl_callback.lookahead import LookAhead, Upcoming
from trl_callback.metrics import Metrics
from trl_callback.rollout_log import RolloutLog
from trl_callback.sampled import Sampled, oldest_versions
from trl_callback.session import Session

logger = logging.getLogger(__name__)
LET_GO = 5.0  # seconds that the end of training waits for a batch that was cut off


class RolloutsAhead:
    """Of one training run, from ``install`` to ``stop``: puts itself before the trainer's data and its generation.

    The next batch begins once the current one is scored, so reward functions and environments of two batches never
    run at once, and an evaluation begins once it is there. ``connect`` makes the lines to the servers, which it has
    for itself. Raises MappingError for a trainer that is not TRL's GRPO or RLOO, DeltaSyncError if ``max_staleness``
    does not allow for it.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        connect: Callable[[], Lines],
        config: DeltaSyncConfig,
        metrics: Metrics,
        log: RolloutLog,
    ) -> None:
        check_halves(trainer)
        self._trainer, self._session, self._lines = trainer, session, connect()
        self._config, self._metrics, self._log = config, metrics, log
        self._look = LookAhead(trainer)
        self._environments = new_environments(trainer)
        self._original = trainer._generate_and_score_completions
        self._running: AheadBatch | None = None
        self._put_back: list[Callable[[], None]] = []
        check_staleness(config.max_staleness, self._look.steps)
        if not getattr(trainer, "vllm_importance_sampling_correction", True):
            logger.warning(
                "delta-sync: rollouts run ahead but vllm_importance_sampling_correction is off: TRL treats them as if "
                "the current weights had sampled them. Remedy: leave it on",
            )

    def install(self) -> None:
        """Take the trainer's place at its data loader and at its generation."""
        names = {
            "get_batch_samples": self._look.get_batch_samples,
            "_generate_and_score_completions": self.generate_and_score,
        }
        self._put_back = [replace_attribute(self._trainer, name, value) for name, value in names.items()]

    def stop(self) -> None:
        """Give the places back and break off what still runs: nobody will use it."""
        running, self._running = self._running, None
        for put_back in self._put_back:
            put_back()
        self._put_back = []
        if running is not None:
            running.cut()

    def generate_and_score(self, batch: Any) -> Any:
        """TRL's scored batch: of completions that ran ahead where there are any, else generated now."""
        if not self._trainer.model.training:
            if self._running is not None:
                self._running.wait()
            return self._original(batch)
        rolled = self._rolled_out(batch)
        scored = self._generated_now(batch) if rolled is None else self._scored(batch, rolled)
        self._begin_next()
        return scored

    def _scored(self, batch: Any, rolled: RolledOut) -> Any:
        """TRL's scored batch; how much of it staleness made worthless is recorded, as TRL does not say."""
        scored = score(self._trainer, batch, rolled)
        ratio = scored.get("importance_sampling_ratio")  # [completions, tokens or 1]
        if ratio is not None:
            self._metrics.record(ahead_unweighted=float((ratio == 0).all(-1).float().mean()))
        return scored

    def _rolled_out(self, batch: Any) -> RolledOut | None:
        """The completions that ran ahead for this very batch, None if there are none or if they are too old."""
        running, self._running = self._running, None
        if running is None:
            return None
        if running.upcoming.batch is not batch:
            raise RuntimeError("the trainer asks for another batch than the one that its data loader gave next")
        began = time.monotonic()
        rolled = running.result()
        step = self._trainer.state.global_step
        self._metrics.record(wait_seconds=time.monotonic() - began, ahead_seconds=running.seconds)
        steps = self._steps_of(rolled.prompt_ids, rolled.completion_ids, running.sampled)
        if any(made is None or made < self._session.oldest_allowed(step) for made in steps):
            logger.warning("delta-sync: of %d completions that ran ahead some come from weights older than "
                           "max_staleness allows: generated anew", len(steps))  # fmt: skip
            return None
        self._note(step, steps, ahead=True)
        return rolled

    def _generated_now(self, batch: Any) -> Any:
        """As without us, the first batch of an epoch: what is recorded is the same."""
        trainer, sampled = self._trainer, list[Sampled]()
        generate = trainer._generate

        def noted(prompts: list[Any]) -> Any:
            generated = generate(prompts)
            self._note(trainer.state.global_step, self._steps_of(generated[0], generated[1], sampled), ahead=False)
            return generated

        client = trainer.vllm_generation.vllm_client
        with instead(trainer, "_generate", noted), instead(client, "sampled", sampled.extend):
            return self._original(batch)

    def _begin_next(self) -> None:
        upcoming = self._look.next_generation()
        if upcoming is None:
            return
        oldest = self._session.oldest_allowed(upcoming.step)
        self._session.prepare(oldest)
        self._running = AheadBatch(self, upcoming, oldest)

    def _steps_of(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], sampled: list[Sampled]
    ) -> list[int | None]:
        versions = oldest_versions(prompts, completions, sampled)
        return [None if version is None else self._session.step_of(version) for version in versions]

    def _note(self, step: int, made: Sequence[int | None], *, ahead: bool) -> None:
        known = self._log.note(step, made, ahead=ahead)
        if ahead and known:
            self._metrics.record(staleness=sum(known) / len(known))


class AheadBatch:
    """One batch that is being generated, in a thread and over connections of its own."""

    def __init__(self, owner: RolloutsAhead, upcoming: Upcoming, oldest: int) -> None:
        self.upcoming, self.sampled = upcoming, list[Sampled]()
        self.seconds = 0.0
        self._owner, self._oldest = owner, oldest
        self._lines = owner._lines
        self._lines.client.sampled, self._lines.client.recovered = self._heard, self._wait_for_weights
        self._rolled: RolledOut | None = None
        self._error: BaseException | None = None
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="delta-sync-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once it has ended; SyncTimeoutError if nothing has come for as long as one answer may take."""
        config = self._owner._config
        limit = config.sync_timeout + config.generate_timeout
        while self._thread.is_alive():
            self._thread.join(1.0)
            if self._thread.is_alive() and time.monotonic() - self._heard_at > limit:
                raise SyncTimeoutError(
                    "rollouts that run ahead",
                    expected=f"a completion within sync_timeout + generate_timeout ({limit:g} s)",
                    got="none",
                    remedy="look at the servers, and at the tools and environments that the rollouts call",
                )

    def result(self) -> RolledOut:
        """What it generated; raises what stopped it."""
        self.wait()
        if self._error is not None:
            raise self._error
        if self._rolled is None:
            raise RuntimeError("a batch that ran ahead has ended with neither completions nor an error")
        return self._rolled

    def cut(self) -> None:
        """Break it off: its requests end at the servers too. An environment that hangs is left behind."""
        self._lines.fleet.cut()
        self._thread.join(LET_GO)
        if self._thread.is_alive():
            logger.warning("delta-sync: a batch that ran ahead is still in its rollout function or a tool: left behind")
        elif isinstance(self._error, DeltaSyncError) and not isinstance(self._error, CutError):
            logger.warning("delta-sync: rollouts that ran ahead had failed: %s", self._error)

    def _run(self) -> None:
        began, owner = time.monotonic(), self._owner
        try:
            self._wait_for_weights()
            generation = self._lines.generation(owner._trainer.vllm_generation)
            self._rolled = roll_out(owner._trainer, self.upcoming.batch, generation, owner._environments)
        except BaseException as error:  # noqa: BLE001 (the training thread raises it)
            self._error = error
        self.seconds = time.monotonic() - began

    def _wait_for_weights(self) -> None:
        covering, _ = self._owner._session.wait_elsewhere(self._lines.status, self._oldest)
        self._lines.client.min_version = covering.version

    def _heard(self, sampled: list[Sampled]) -> None:
        self.sampled.extend(sampled)
        self._heard_at = time.monotonic()


def check_staleness(allowed: int, steps: int) -> None:
    """DeltaSyncError where a batch that runs ahead is always older than ``allowed`` optimizer steps."""
    if allowed < steps:
        raise DeltaSyncError(
            "delta-sync setting 'max_staleness' with rollouts_ahead=1",
            expected=f"at least {steps}: a batch is used {steps} optimizer steps after its generation begins "
            "(steps_per_generation * num_iterations / gradient_accumulation_steps)",
            got=str(allowed),
            remedy=f"set max_staleness={steps}, or generate more often",
        )
