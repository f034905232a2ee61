"""Several turns of Wordle in plain text, for models whose chat template knows no tools.

`TextRollout` is what GRPOTrainer takes as `rollout_func`: each completion is a whole game, the model's
guesses and the server's answers one after the other, where `env_mask` is 1 on the model's own tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from examples.wordle.client import Turn, WordleClient
from examples.wordle.rewards import first_word, form, progress
from examples.wordle.words import answers

SYSTEM = "Answer with one five-letter English word."  # short: on a CPU, the prompt is most of the work
ASK = "Guess."
AGAIN = "Guess again."
PLACEHOLDER = "PLACEHOLDER"

Conversation = list[dict[str, str]]


def prompt(seed: int) -> Conversation:
    """A two-shot prompt; the seed draws the two words shown."""
    shown = Random(seed).sample(answers(), 2)
    shots = [message for word in shown for message in _exchange(ASK, word)]
    return [{"role": "system", "content": SYSTEM}, *shots, {"role": "user", "content": ASK}]


def _exchange(question: str, answer: str) -> Conversation:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@dataclass
class Play:
    """One game as tokens. `context` is what the model is asked with next, prompt included."""

    client: WordleClient
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    forms: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    live: bool = True

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def add(self, ids: list[int], logprobs: list[float], own: bool) -> None:
        self.completion_ids += ids
        self.logprobs += logprobs
        self.env_mask += [int(own)] * len(ids)


class TextRollout:
    """Plays one game per prompt, up to `max_turns` guesses, on clients made by `connect` and kept for later batches."""

    def __init__(self, tokenizer: Any, connect: Callable[[], WordleClient], max_turns: int) -> None:
        self._tokenizer, self._connect, self._max_turns = tokenizer, connect, max_turns
        self._clients: list[WordleClient] = []

    def __call__(self, prompts: list[Conversation], trainer: Any) -> dict[str, list[Any]]:
        """GRPOTrainer's rollout_func; a group (equal prompts) shares its secret where the server takes seeds."""
        plays = [self._start(i, conversation) for i, conversation in enumerate(prompts)]
        for turn in range(self._max_turns):
            # `generate` is a collective over all ranks: with several of them every rank asks for every game each turn.
            asked = plays if trainer.accelerator.num_processes > 1 else [play for play in plays if play.live]
            if not asked:
                break
            _, ids, logprobs, _ = trainer.vllm_generation.generate(
                prompts=[play.context for play in asked], images=None, num_generations=1
            )
            for play, own, chances in zip(asked, ids, logprobs, strict=True):
                if play.live:
                    self._take(play, own, [chance[0] for chance in chances], last=turn + 1 == self._max_turns)
        return {
            "prompt_ids": [play.prompt_ids for play in plays],
            "completion_ids": [play.completion_ids for play in plays],
            "logprobs": [play.logprobs for play in plays],
            "env_mask": [play.env_mask for play in plays],
            "form": [sum(play.forms) / len(play.forms) for play in plays],
            "progress": [progress(play.turns) for play in plays],
        }

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _start(self, i: int, conversation: Conversation) -> Play:
        while len(self._clients) <= i:
            self._clients.append(self._connect())
        self._clients[i].reset(seed=zlib.crc32(json.dumps(conversation, sort_keys=True).encode()))
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        return Play(self._clients[i], self._encode(text))

    def _take(self, play: Play, ids: list[int], logprobs: list[float], last: bool) -> None:
        """Score one answer of the model, play it, and append the server's answer for the next turn."""
        ended = bool(ids) and ids[-1] == self._tokenizer.eos_token_id
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        play.add(ids, logprobs, own=True)
        play.forms.append(form(text, ended))
        turn = play.client.guess(first_word(text) or "none")
        play.turns.append(turn)
        play.live = ended and not turn.done and not last
        if play.live:
            reply = self._reply(turn)
            play.add(reply, [0.0] * len(reply), own=False)

    def _reply(self, turn: Turn) -> list[int]:
        """The tokens between the model's end-of-turn and its next guess, as the chat template writes them."""
        marks = " ".join(turn.marks) if turn.marks else "That is not a five-letter word of the list."
        later = [{"role": "assistant", "content": PLACEHOLDER}, {"role": "user", "content": f"{marks}\n{AGAIN}"}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": ASK}, *later], add_generation_prompt=True, tokenize=False
        )
        return self._encode(text.partition(PLACEHOLDER)[2].removeprefix(self._tokenizer.eos_token))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
