"""What TRL's importance-sampling correction is fed for completions that ran ahead, and what it makes of them."""

from __future__ import annotations

import random
import uuid
from typing import Any

import grpo
import pytest
import tiny
import torch
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from trl_callback import DeltaSyncCallback

NEAR = -4.56  # log(1 / 96), about what a fresh model gives any token


class Telling(StandInReplica):
    """Gives every token a log-probability of its own and remembers them by what it answered.

    From the second batch on, its third completion is said to have been so unlikely that its ratio is beyond any bound.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.said: dict[tuple[int, ...], list[float]] = {}
        self._noise = random.Random(1)

    def complete(self, body: Any) -> tuple[int, Any]:
        status, answer = super().complete(body)
        for i, choice in enumerate(answer["choices"]):
            logprobs = [NEAR + self._noise.uniform(-0.05, 0.05) for _ in choice["token_ids"]]
            if i == 2 and len(self.generated_at) > 1:
                logprobs = [-12.0] * len(logprobs)
            names = choice["logprobs"]["tokens"]
            tops = [{name: one} for name, one in zip(names, logprobs, strict=True)]
            choice["logprobs"] |= {"token_logprobs": logprobs, "top_logprobs": tops}
            self.said[tuple(choice["token_ids"])] = logprobs
        return status, answer


class Scored(TrainerCallback):
    """Compares what the optimizer is about to step on with what the server said and what the weights now say."""

    def __init__(self, replica: Telling) -> None:
        self.replica, self.trainer, self.compared = replica, None, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = self.trainer
        (batch,) = trainer._buffered_inputs
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].size(1))
        torch.testing.assert_close(batch["old_per_token_logps"], now[0])
        for i, tokens in enumerate(batch["completion_ids"].tolist()):
            told = torch.tensor(self.replica.said[tuple(tokens)])
            torch.testing.assert_close(batch["sampling_per_token_logps"][i], told)
            ratio = (now[0][i] - told).sum().exp()
            kept = ratio if ratio <= 3 else torch.tensor(0.0)  # TRL's default: a sequence is masked beyond 3
            torch.testing.assert_close(batch["importance_sampling_ratio"][i, 0], kept)
            self.compared += 1


@pytest.mark.parametrize(("mode", "unweighted"), [("sequence_mask", 0.25), ("token_truncate", 0.0)])
def test_the_ratio_is_of_the_weights_that_sampled_and_those_that_train(
    tmp_path: Any, mode: str, unweighted: float
) -> None:
    uri, model = f"memory://{uuid.uuid4().hex}", tiny.llama()
    with Telling(uri, model).running() as replica:
        sync = DeltaSyncCallback(uri, sync_timeout=120, rollouts_ahead=1, max_staleness=1)
        scored = Scored(replica)
        callbacks = [sync, grpo.AheadFirst(sync), *([scored] if mode == "sequence_mask" else [])]
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=callbacks,
                                    vllm_importance_sampling_mode=mode)  # fmt: skip
        scored.trainer = trainer
        trainer.train()
        sync.close()
    assert sync.rollouts.staleness == {0: 4, 1: 12}
    assert scored.compared == (16 if mode == "sequence_mask" else 0)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("delta_sync/ahead_unweighted") for entry in logs] == [None] + [unweighted] * 3
