"""Batches that run ahead play in environments of their own, over several turns; rewards are those of a run without."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path
from typing import Any

import grpo
import tiny
import torch
import trl
from datasets import Dataset
from helpers.byte_tokenizer import byte_tokenizer
from stand_in_replica import StandInReplica
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from trl_callback import DeltaSyncCallback

QWEN3 = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
STEPS = 3


class Room:
    """Counts what is pressed in it."""

    made: list[Room]

    def __init__(self) -> None:
        self.pressed: list[int] = []
        self.opened = 0
        type(self).made.append(self)

    def reset(self, **_: Any) -> str:
        self.pressed = []
        self.opened += 1
        return f" Room {self.opened}."

    def press(self, number: int) -> str:
        """Press a button.

        Args:
            number: Which.

        Returns:
            What happens.
        """
        self.pressed.append(number)
        return "Click."

    def get_reward(self) -> float:
        return float(sum(self.pressed))


class Presser(StandInReplica):
    """Calls the tool in every first turn, each time with the next number, and ends in the second."""

    def __init__(self, uri: str, model: Any, tokenizer: Any) -> None:
        super().__init__(uri, model)
        self.tokenizer, self.presses = tokenizer, 0
        self.texts: list[str] = []
        self.second_turns = threading.Semaphore(0)

    def complete(self, body: Any) -> tuple[int, Any]:
        _, answer = super().complete(body)
        for choice in answer["choices"]:
            text = self.tokenizer.decode(choice["prompt_token_ids"])
            self.texts.append(text)
            self._say(choice, self._answer(text))
        if "<tool_response>" in text:
            self.second_turns.release()
        for choice, spans in zip(answer["choices"], answer["usage"]["delta_sync"]["choices"], strict=True):
            spans[0]["end"] = len(choice["token_ids"])
        return 200, answer

    def _answer(self, text: str) -> str:
        if "<tool_response>" in text:
            return "Done.<|im_end|>"
        self.presses += 1
        call = json.dumps({"name": "press", "arguments": {"number": self.presses % 7}})
        return f"<tool_call>\n{call}\n</tool_call><|im_end|>"

    def _say(self, choice: dict[str, Any], text: str) -> None:
        tokens = self.tokenizer.encode(text)
        names = [f"token_id:{token}" for token in tokens]
        chances = [-0.5] * len(tokens)
        tops = [{name: -0.5} for name in names]
        choice |= {
            "token_ids": tokens,
            "logprobs": {"tokens": names, "token_logprobs": chances, "top_logprobs": tops},
        }


class StillMine(TrainerCallback):
    """Holds a step until the next batch has been played, then looks at the environments of this one."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.replica: Any = None
        self.pools: list[set[int]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 < STEPS:
            assert self.replica.second_turns.acquire(timeout=60)
        self.pools.append({id(room) for room in self.trainer.environments})
        assert all(len(room.pressed) == 1 for room in self.trainer._environment_pool[None])


def played(folder: Path, *, ahead: int) -> tuple[list[float], Presser, DeltaSyncCallback, StillMine, int]:
    uri = f"memory://{uuid.uuid4().hex}"
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=300, num_key_value_heads=1, head_dim=8, **shape))
    tokenizer = byte_tokenizer(QWEN3.read_text())
    sync = DeltaSyncCallback(uri, sync_timeout=120, rollouts_ahead=ahead, max_staleness=ahead)
    kind = type("OneRunsRoom", (Room,), {"made": []})
    rows = {"prompt": [[{"role": "user", "content": f"Press {i}."}] for i in range(8)]}
    mine = StillMine()
    held = [mine, grpo.AheadFirst(sync)] if ahead else []
    with Presser(uri, model, tokenizer).running() as replica:
        trainer = grpo.grpo_trainer(
            folder, model=model, url=replica.url, use_vllm=True, callbacks=[sync, *held],
            max_steps=STEPS, max_completion_length=400, chat_template_kwargs={"enable_thinking": False},
            given={
                "reward_funcs": [], "environment_factory": kind, "processing_class": tokenizer,
                "train_dataset": Dataset.from_dict(rows),
            },
        )  # fmt: skip
        mine.trainer, mine.replica = trainer, replica
        trainer.train()
        sync.close()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert all(entry["tools/call_frequency"] == 1 for entry in trainer.state.log_history if "reward" in entry)
    return rewards, replica, sync, mine, len(kind.made)


def asked(replica: Presser) -> list[str]:
    """The prompts without what the environments added."""
    return [text.partition("Room")[0] for text in replica.texts]


def test_environments_of_a_batch_that_runs_ahead_are_its_own(tmp_path: Path) -> None:
    rewards, without, *_ = played(tmp_path / "0", ahead=0)
    found, replica, sync, mine, made = played(tmp_path / "1", ahead=1)
    assert found == rewards and len(found) == STEPS and len(set(found)) > 1
    assert [text.partition("Room")[0] for text in replica.texts] == [
        text.partition("Room")[0] for text in without.texts
    ]
    first, *later = mine.pools
    assert all(not first & pool for pool in later) and made == 8
    assert [(record.step, set(record.made)) for record in sync.rollouts.batches] == [(0, {0}), (1, {0}), (2, {1})]


def test_a_rollout_function_runs_ahead_too(tmp_path: Path) -> None:
    """It is called with a trainer whose generation has connections of its own; its other fields reach the rewards."""
    uri = f"memory://{uuid.uuid4().hex}"
    model, seen = tiny.llama(), list[float]()

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(text=prompt)["input_ids"] for prompt in prompts]
        whole, chances = [[] for _ in prompts], [[] for _ in prompts]
        for _ in range(2):
            asked = [[*one, *more] for one, more in zip(ids, whole, strict=True)]
            _, answers, logprobs, _ = trainer.vllm_generation.generate(prompts=asked, images=None, num_generations=1)
            for i, answer in enumerate(answers):
                whole[i] += answer
                chances[i] += [chance[0] for chance in logprobs[i]]
        return {"prompt_ids": ids, "completion_ids": whole, "logprobs": chances, "first": [one[0] for one in whole]}

    def reward(first: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert first == [ids[0] for ids in completion_ids]
        seen.extend(first)
        return [float(one) for one in first]

    sync = DeltaSyncCallback(uri, sync_timeout=120, rollouts_ahead=1, max_staleness=1)
    held = [sync, grpo.AheadFirst(sync)]
    with StandInReplica(uri, model).running() as replica:
        grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=held, max_steps=STEPS,
            max_completion_length=4, rollout_func=roll_out, given={"reward_funcs": reward},
        ).train()  # fmt: skip
    sync.close()
    assert len(seen) == 4 * STEPS and len(replica.generated_at) == 2 * STEPS
    assert [set(record.made) for record in sync.rollouts.batches] == [{0}, {0}, {1}]
