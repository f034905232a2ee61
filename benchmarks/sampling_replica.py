"""The tests' stand-in for a server, sampling: its tokens come from the very bits that it follows in the bucket."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "trainer")]

import torch  # noqa: E402
from helpers import tiny_models  # noqa: E402
from stand_in_replica import StandInReplica  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

EOS = tiny_models.COMMON["eos_token_id"]


@torch.inference_mode()
def sample(model: Any, ids: torch.Tensor, count: int, generator: torch.Generator) -> tuple[list[Any], list[Any]]:
    """``count`` tokens after each row of ``ids`` [rows, length] at temperature 1, cut after an end of sequence.

    Returns token ids and their log-probabilities, both [rows][tokens].
    """
    past, asked, tokens, chances = None, ids, [], []
    for _ in range(count):
        out = model(asked, past_key_values=past, use_cache=True)
        past, logprobs = out.past_key_values, out.logits[:, -1].float().log_softmax(-1)
        asked = torch.multinomial(logprobs.exp(), 1, generator=generator)
        tokens.append(asked[:, 0])
        chances.append(logprobs.gather(-1, asked)[:, 0])
    sampled, scored = torch.stack(tokens, 1).tolist(), torch.stack(chances, 1).tolist()
    ends = [row.index(EOS) + 1 if EOS in row else count for row in sampled]
    return ([row[:end] for row, end in zip(sampled, ends, strict=True)],
            [row[:end] for row, end in zip(scored, ends, strict=True)])  # fmt: skip


class SamplingReplica(StandInReplica):
    """Follows ``uri`` from the checkpoint's weights; samples with transformers in float32, one request at a time."""

    def __init__(self, uri: str, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        super().__init__(uri, self._model, vocab=tiny_models.VOCAB)
        self._generator, self._held = torch.Generator(), None
        self._one_at_a_time = threading.Lock()

    def seed(self, seed: int) -> None:
        """What is sampled from here on is decided by ``seed``, the weights and the requests."""
        self._generator.manual_seed(seed)

    def complete(self, body: Any) -> tuple[int, Any]:
        """As its base, but the tokens are the model's."""
        with self._one_at_a_time:
            _, answer = super().complete(body)  # its version is noted first: the weights may be newer, never older
            self._load()
            by_length: dict[int, list[dict[str, Any]]] = {}
            for choice in answer["choices"]:
                by_length.setdefault(len(choice["prompt_token_ids"]), []).append(choice)
            for choices in by_length.values():
                self._fill(choices, body["max_tokens"])
        return 200, answer

    def _load(self) -> None:
        with self._lock, torch.no_grad():
            if self._held != self.position:
                bits = {name: torch.from_numpy(one.view("int16").copy()) for name, one in self.live.items()}
                shaped = {
                    name: one.view(torch.bfloat16).view(self.layout[name][1]).float() for name, one in bits.items()
                }
                self._model.load_state_dict(shaped, strict=False)  # a tied head is not among them
                self._held = self.position

    def _fill(self, choices: list[dict[str, Any]], count: int) -> None:
        ids = torch.tensor([choice["prompt_token_ids"] for choice in choices])
        for choice, own, chance in zip(choices, *sample(self._model, ids, count, self._generator), strict=True):
            names = [f"token_id:{token}" for token in own]
            tops = [{name: one} for name, one in zip(names, chance, strict=True)]
            choice["token_ids"] = own
            choice["logprobs"] = {"tokens": names, "token_logprobs": chance, "top_logprobs": tops}
