"""train.py's two ways to play, inside a real GRPOTrainer; only the sampling is scripted."""

import argparse
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import trl
from fastapi import FastAPI, WebSocket
from helpers.byte_tokenizer import byte_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from examples.wordle import train
from examples.wordle.client import WordleClient, WordleServerError
from examples.wordle.words import draw

QWEN3 = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"


def options(url, **more):
    defaults = {"env": url, "seed": 0, "games": 4, "turns": 2, "wake_timeout": 0.0}
    return argparse.Namespace(**{**defaults, **more})


def test_the_template_decides_how_to_play(wordle_url):
    text = train.way_to_play(options(wordle_url), byte_tokenizer())
    assert "rollout_func" in text and len(text["reward_funcs"]) == 2 and len(text["train_dataset"]) == 4
    tools = train.way_to_play(options(wordle_url), byte_tokenizer(QWEN3.read_text()))
    assert "environment_factory" in tools and tools["train_dataset"]["seed"] == [0, 1, 2, 3]


def test_the_tool_is_described_to_the_model(wordle_url):
    schema = get_json_schema(train.WordleEnv(partial(WordleClient, wordle_url)).guess)["function"]
    assert schema["name"] == "guess" and schema["parameters"]["required"] == ["guess"]
    assert schema["parameters"]["properties"]["guess"] == {
        "type": "string",
        "description": "One five-letter English word.",
    }


def test_an_environment_plays_and_resets(wordle_url):
    env = train.WordleEnv(partial(WordleClient, wordle_url))
    assert "Wordle" in env.reset(seed=5, prompt="ignored")
    assert "C R A N E" in env.guess("crane")
    assert "Congratulations" in env.guess(draw(5))
    assert env.guess("slate") == "The game is over."
    assert train.tool_reward([env]) == [1.0]
    env.reset(seed=6)
    assert train.tool_reward([env]) == [0.0]


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=300, num_key_value_heads=1, head_dim=8, **shape))


def config(folder):
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=400,
        chat_template_kwargs={"enable_thinking": False},
        max_steps=1,
        learning_rate=1e-3,
        report_to="none",
        logging_steps=1,
    )


def test_a_grpo_step_through_tools(wordle_url, model, tmp_path):
    tokenizer = byte_tokenizer(QWEN3.read_text())
    playing = train.way_to_play(options(wordle_url, games=1), tokenizer)
    log = train.LogToFile(tmp_path / "metrics.jsonl")
    trainer = GRPOTrainer(model=model, args=config(tmp_path), processing_class=tokenizer, callbacks=[log], **playing)
    trainer._generate_single_turn = scripted_player(tokenizer, draw(0))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer.train()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["step"] == 1 and row["stepped_at"] > 1e9
    assert row["reward_std"] > 0.1 and row["rewards/tool_reward/mean"] > 0.25  # a win, two words, and one that is none
    assert row["tools/call_frequency"] == 1.0
    assert any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_an_environment_that_goes_away_ends_training(model, tmp_path, serve):
    """TRL would tell the model of it, and train on games that nobody could play."""
    app, games = FastAPI(), []

    @app.websocket("/ws")
    async def gone_after_a_guess(socket: WebSocket):
        await socket.accept()
        games.append(await socket.receive_text())
        await socket.send_json({"type": "observation", "data": {"observation": {"messages": [{"content": "Wordle"}]}}})
        await socket.receive_text()
        await socket.close()

    tokenizer = byte_tokenizer(QWEN3.read_text())
    playing = train.way_to_play(options(serve(app), games=1), tokenizer)
    trainer = GRPOTrainer(model=model, args=config(tmp_path), processing_class=tokenizer, **playing)
    trainer._generate_single_turn = scripted_player(tokenizer, "slate")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(WordleServerError, match="the session was closed"):
        trainer.train()
    assert len(games) == 4 and trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_failure_is_of_one_game_and_the_models_mistakes_are_none(wordle_url):
    env = train.WordleEnv(partial(WordleClient, wordle_url))
    env.reset(seed=5)
    for mistake in (5, None, "long" * 2000):
        with pytest.raises(ValueError, match="five-letter word"):
            env.guess(mistake)
    assert train.tool_reward([env]) == [0.0]
    env._client._socket.close()
    for _ in range(2):
        with pytest.raises(WordleServerError, match="closed"):
            env.guess("crane")
    with pytest.raises(WordleServerError, match="closed"):
        train.tool_reward([env])
    env.reset(seed=5)
    assert train.tool_reward([env]) == [0.0]


def scripted_player(tokenizer, answer):
    """Every rollout of a group calls the tool once, the last of four with the answer, and then ends."""

    def answer_to(i, text):
        if "<tool_response>" in text:
            return "Done.<|im_end|>"
        word = ["crane", "zzzzz", "slate", answer][i % 4]
        call = json.dumps({"name": "guess", "arguments": {"guess": word}})
        return f"<tool_call>\n{call}\n</tool_call><|im_end|>"

    def generate(prompt_ids, *_, **__):
        texts = [tokenizer.decode(ids) for ids in prompt_ids]
        return [tokenizer.encode(answer_to(i, text)) for i, text in enumerate(texts)], None

    return generate
