"""The one line a user adds to a trainer."""

from __future__ import annotations

import functools
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from delta_sync.errors import DeltaSyncError, MappingError
from trl_callback.adapter_session import AdapterSession
from trl_callback.adapter_team import AdapterTeamSession
from trl_callback.ahead import RolloutsAhead
from trl_callback.config import DeltaSyncConfig
from trl_callback.enclosing import enclosing_trainer
from trl_callback.fleet_status import FleetStatus
from trl_callback.generation import GenerationSwap
from trl_callback.halves import replace_attribute
from trl_callback.lines import Lines, open_lines
from trl_callback.metrics import Metrics, log_first
from trl_callback.ranks import is_main, many_ranks
from trl_callback.rollout_client import RolloutClient
from trl_callback.rollout_log import RolloutLog
from trl_callback.rollout_parity import batch_parity, warn_once_without
from trl_callback.serving_image import compute_dtype
from trl_callback.session import Session, Subject
from trl_callback.supported import has_shards
from trl_callback.team_session import TeamSession
from trl_callback.weight_transfer import DeltaSyncWeightTransfer, check_one_process, check_takes_transfer


class DeltaSyncCallback(TrainerCallback):
    """Publishes every optimizer step's weights to ``uri``; settings are DeltaSyncConfig's fields.

    In ``GRPOTrainer(callbacks=[…])`` with ``use_vllm=True, vllm_mode="server"`` rollouts come from a stock
    ``vllm serve MODEL --delta-sync URI`` and wait for its weights. Any other transformers Trainer just publishes.
    """

    def __init__(self, uri: str, **settings: Any) -> None:
        self.config = DeltaSyncConfig.build(uri, **settings)
        self.metrics = Metrics()
        self.rollouts = RolloutLog()  # with rollouts_ahead
        self.generates = False  # a trainer's rollouts come through us
        self._session: Session | TeamSession | AdapterTeamSession | None = None
        self._swap: GenerationSwap | None = None
        self._lines: Lines | None = None
        self._urls = self.config.server_urls
        self._ahead: RolloutsAhead | None = None
        self._transfers = False  # an AsyncGRPOTrainer's weights go through us
        self._args: TrainingArguments | None = None
        self._state = TrainerState()
        self._model: Any = None
        self._processing_class: Any = None
        self._optimizing_since = 0.0  # unix time
        self._optimized: tuple[float, float] | None = None
        self._warned_of_parity = False

    # What the trainer calls.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before TRL builds its generation: put ours in its place, for this trainer only."""
        self.remember(args, state, kwargs["model"], kwargs.get("processing_class"))
        if rolls_out_on_server(args):
            self._swap = GenerationSwap(self, self._model)
            self._swap.install()
        self.watch(enclosing_trainer(self))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish the origin: the weights that training starts, or resumes, from."""
        self.remember(args, state, kwargs["model"], kwargs.get("processing_class"))
        if self._swap is not None:
            self._swap.restore()
        if rolls_out_on_server(args) and not self.generates:
            raise DeltaSyncError(
                "DeltaSyncCallback",
                expected="to be given when the trainer is built",
                got="a trainer that already has its own rollout client",
                remedy="pass it in callbacks=[…], or build with use_vllm=False and call attach(trainer, uri)",
            )
        trainer = enclosing_trainer(self)
        if trainer is not None:
            log_first(trainer, self.metrics)
        if self._transfers:
            check_one_process()
            self._urls = self._urls or (str(vars(args)["vllm_server_base_url"]),)
        self.close()
        session = self._open()
        if self.config.rollouts_ahead:
            self._run_ahead(trainer, session)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that the optimizer's step begins: for its span, and as the weights are no step's until it ends."""
        self._optimizing_since = time.time()
        if isinstance(self._session, Session | AdapterTeamSession):
            self._session.optimizing()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """And when it ends."""
        self._optimized = self._optimizing_since, time.time()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the step's changes to the publisher; raise here whatever stopped it."""
        optimized, self._optimized = self._optimized, None
        self._open().step_done(state.global_step, optimized)
        every = self.config.parity_every
        if every and state.global_step % every == 0 and is_main():
            self._record_parity()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait until the last step's weights are in the bucket."""
        self._stop_ahead()
        self._open().finish(state.global_step)

    @property
    def model(self) -> Any:
        """The model that is trained, as the trainer has it."""
        return self._model

    def weight_transfer(self) -> DeltaSyncWeightTransfer:
        """For ``AsyncGRPOTrainer(callbacks=[sync], weight_transfer=sync.weight_transfer())``.

        MappingError where the installed TRL has no such trainer.
        """
        check_takes_transfer()
        self._transfers = True
        return DeltaSyncWeightTransfer(self)

    # What generation calls.

    def connect(self, url: str, timeout: float) -> RolloutClient:
        """Rank 0's client of the server at ``url`` (or the ``server_url`` setting), once one is healthy."""
        self._urls = self._urls or (url,)
        self._lines = open_lines(self._urls, self.config, self._sync_again)
        self._lines.client.connect(timeout)
        return self._lines.client

    def sync(self) -> None:
        """Wait, on all ranks, until the served weights are at most ``max_staleness`` steps old."""
        self._open().sync(self._state.global_step)

    def remember(self, args: TrainingArguments, state: TrainerState, model: Any, processing_class: Any) -> None:
        """Note what belongs to the trainer: events and generation each see only a part of it."""
        self._args, self._state, self._model, self._processing_class = args, state, model, processing_class

    def watch(self, trainer: Any) -> None:
        """See to it that however ``train`` ends, nothing runs ahead any more."""
        if trainer is None or not self.config.rollouts_ahead:
            return
        train = trainer.train

        @functools.wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self._stop_ahead()

        replace_attribute(trainer, "train", watched)

    def close(self) -> None:
        """End the background thread; what is not durable by now is left to the next run."""
        self._stop_ahead()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _record_parity(self) -> None:
        found = batch_parity(enclosing_trainer(self))
        self._warned_of_parity = warn_once_without(found, self._warned_of_parity)
        if found is not None:
            self.metrics.record(parity_k3_mean=found.k3_mean, parity_k3_max=found.k3_max)

    def _sync_again(self) -> None:
        """Rank 0's client found the server away and back: is what it serves still recent enough?"""
        session = self._open()
        again = session.sync if isinstance(session, Session) else session.sync_alone
        again(self._state.global_step)

    def _open(self) -> Session | TeamSession | AdapterTeamSession:
        """This run's session; opened at the start of training, or by an evaluation before it, on all ranks alike."""
        if self._session is None:
            self._session = self._kind()(self._subject(), self.config, self._statuses(), self.metrics)
        return self._session

    def _kind(self) -> type[Session] | type[TeamSession] | type[AdapterTeamSession]:
        several = many_ranks() or has_shards(self._model)
        if self.config.lora == "adapter":
            return AdapterTeamSession if several else AdapterSession
        return TeamSession if several else Session

    def _subject(self) -> Subject:
        args = self._args
        bf16, fp16 = bool(getattr(args, "bf16", False)), bool(getattr(args, "fp16", False))
        computed = compute_dtype(self._model, bf16=bf16, fp16=fp16)
        ranks_wait = float(getattr(args, "ddp_timeout", 0.0) or 0.0)
        return Subject(self._model, self._processing_class, computed, self._state.global_step, ranks_wait)

    def _statuses(self) -> FleetStatus | None:
        if self._lines is None and self._urls:
            self._lines = open_lines(self._urls, self.config, self._sync_again)
        return None if self._lines is None else self._lines.status

    def _run_ahead(self, trainer: Any, session: object) -> None:
        if not self.generates or trainer is None or not isinstance(session, Session):
            raise MappingError(
                "rollouts_ahead=1",
                expected="a GRPO or RLOO trainer in one process, with its rollouts on a server",
                got="several processes, or sharded weights" if self.generates else "a trainer that rolls out elsewhere",
                remedy="set rollouts_ahead=0",
            )
        connect = functools.partial(open_lines, self._urls, self.config, self._sync_again)
        self._ahead = RolloutsAhead(trainer, session, connect, self.config, self.metrics, self.rollouts)
        self._ahead.install()

    def _stop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()


def rolls_out_on_server(args: TrainingArguments) -> bool:
    """Whether a trainer with these arguments builds TRL's client of a vLLM server."""
    return bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "server"
