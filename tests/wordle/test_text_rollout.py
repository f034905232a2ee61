"""The rollout against the real environment server; the model is a script of answers."""

from functools import partial
from types import SimpleNamespace

import pytest
from helpers.byte_tokenizer import byte_tokenizer

from examples.wordle.client import WordleClient
from examples.wordle.text_rollout import TextRollout, prompt


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


class Script:
    """Stands where TRL's vllm_generation stands; says per call what the n-th game answers."""

    def __init__(self, tokenizer, calls, ended=True):
        self._tokenizer, self._calls, self._ended = tokenizer, list(calls), ended
        self.asked = []

    def generate(self, prompts, images, num_generations):
        self.asked.append([self._tokenizer.decode(ids) for ids in prompts])
        ids = [self._tokenizer.encode(text + "<|im_end|>" * self._ended) for text in self._calls.pop(0)]
        return prompts, ids, [[[-0.5] for _ in row] for row in ids], None


def trainer(script, processes=1):
    return SimpleNamespace(vllm_generation=script, accelerator=SimpleNamespace(num_processes=processes))


@pytest.fixture
def rollout(tokenizer, wordle_url):
    made = TextRollout(tokenizer, partial(WordleClient, wordle_url), max_turns=2)
    yield made
    made.close()


def secret(rollout, conversation):
    rollout._start(0, conversation)
    return rollout._clients[0]._ask({"type": "state"})["raw_state"]["game_state"]["secret_word"]


def test_two_turns(rollout, tokenizer):
    conversation = prompt(3)
    answer = secret(rollout, conversation)
    script = Script(tokenizer, [["crane", answer], ["slate"]])
    out = rollout([conversation, conversation], trainer(script))
    assert [len(calls) for calls in script.asked] == [2, 1]  # the game that was won is over
    assert out["progress"][1] == 1.0 and out["progress"][0] < 1.0
    assert out["form"] == pytest.approx([1.0, 1.0])
    first = out["completion_ids"][0]
    assert len(first) == len(out["logprobs"][0]) == len(out["env_mask"][0])
    own = [t for t, mask in zip(first, out["env_mask"][0], strict=True) if mask]
    assert tokenizer.decode(own) == "crane<|im_end|>slate<|im_end|>"
    chances = [p for p, mask in zip(out["logprobs"][0], out["env_mask"][0], strict=True) if not mask]
    assert chances and set(chances) == {0.0}


def test_the_second_prompt_is_the_chat_template_of_the_whole_conversation(rollout, tokenizer):
    conversation = prompt(3)
    script = Script(tokenizer, [["crane"], ["slate"]])
    rollout([conversation], trainer(script))
    reply = script.asked[1][0].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
    so_far = [*conversation, {"role": "assistant", "content": "crane"}, {"role": "user", "content": reply}]
    expected = tokenizer.apply_chat_template(so_far, add_generation_prompt=True, tokenize=False)
    assert script.asked[1][0] == expected


def test_a_group_shares_its_secret_and_groups_differ(rollout):
    assert secret(rollout, prompt(1)) == secret(rollout, prompt(1))
    assert len({secret(rollout, prompt(seed)) for seed in range(8)}) > 4


def test_an_answer_cut_short_is_not_continued(rollout, tokenizer):
    script = Script(tokenizer, [["a very long answer that was"]], ended=False)
    out = rollout([prompt(1)], trainer(script))
    assert len(script.asked) == 1 and set(out["env_mask"][0]) == {1}
    assert out["form"][0] < 0.3


def test_every_rank_asks_for_every_game_when_there_are_several(rollout, tokenizer):
    conversation = prompt(3)
    answer = secret(rollout, conversation)
    script = Script(tokenizer, [[answer, answer], ["crane", "crane"]])
    out = rollout([conversation, conversation], trainer(script, processes=2))
    assert [len(calls) for calls in script.asked] == [2, 2]
    assert [tokenizer.decode(ids) for ids in out["completion_ids"]] == [f"{answer}<|im_end|>"] * 2


def test_prompts_show_two_words_and_differ(tokenizer):
    shown = [m["content"] for m in prompt(5) if m["role"] == "assistant"]
    assert len(shown) == 2 and all(len(word) == 5 for word in shown)
    assert prompt(5) == prompt(5) != prompt(6)
