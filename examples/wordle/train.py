"""Teach a model Wordle by GRPO, while a vLLM server elsewhere plays with every step's weights.

    vllm serve MODEL --delta-sync BUCKET
    python -m examples.wordle.train --model MODEL --vllm http://rollouts:8000 --env http://wordle:8000 --bucket BUCKET

The environment is any OpenEnv Wordle. A model whose chat template supports tools (Qwen3) plays through a
`guess` tool; any other (SmolLM2) plays in plain text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import supports_tool_calling

from examples.wordle import text_rollout
from examples.wordle.client import Turn, WordleClient
from examples.wordle.cpu_bf16 import use_float32_products
from examples.wordle.rewards import progress
from examples.wordle.wake import NotAwake, wait_until_awake
from trl_callback import DeltaSyncCallback

ENV_TOKEN = "WORDLE_ENV_TOKEN"  # the environment's key, where it asks for one
LONGEST = 100  # letters of a guess that the server is asked about; it refuses messages of some thousands
TOOL_PROMPT = "Play a game of Wordle. Call the tool `guess` with one five-letter word at a time until the game is over."


class WordleEnv:
    """A game that the model plays by calling its public methods as tools; TRL makes one per rollout.

    TRL answers the model with the text of what a tool raises. Good for the model's own mistakes, but a server that is
    gone would be a game lost: what fails there is kept, and `tool_reward` raises it.
    """

    def __init__(self, client: Callable[[], WordleClient]) -> None:
        self._client = client()
        self._turns: list[Turn] = []
        self._failure: Exception | None = None

    def reset(self, seed: int | None = None, **_: Any) -> str:
        self._turns, self._failure = [], None
        return self._client.reset(seed).feedback

    def guess(self, guess: str) -> str:
        """Guess the secret word.

        Args:
            guess: One five-letter English word.

        Returns:
            The guess with a mark below each letter (G right place, Y wrong place, X not in the word), or why not.
        """
        if not isinstance(guess, str) or len(guess) > LONGEST:
            raise ValueError("guess: expected one five-letter word")
        if self._turns and self._turns[-1].done:
            return "The game is over."
        if self._failure is not None:  # the batch is lost: waiting for the server once a guess would delay its end
            raise self._failure
        try:
            self._turns.append(self._client.guess(guess))
        except Exception as error:
            self._failure = error
            raise
        return self._turns[-1].feedback


def tool_reward(environments: list[WordleEnv], **_: Any) -> list[float]:
    """How far each game got; an environment's failure ends training here, as TRL lets none out of a tool."""
    for failure in filter(None, (env._failure for env in environments)):
        raise failure
    return [progress(env._turns) for env in environments]


def form_reward(form: list[float], **_: Any) -> list[float]:
    return form


def progress_reward(progress: list[float], **_: Any) -> list[float]:
    return progress


def way_to_play(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The arguments of GRPOTrainer that differ between a model with tools and one without."""
    client = partial(WordleClient, args.env, token=os.environ.get(ENV_TOKEN), wake_timeout=args.wake_timeout)
    games = range(args.seed, args.seed + args.games)
    if supports_tool_calling(tokenizer):
        rows = [{"prompt": [{"role": "user", "content": TOOL_PROMPT}], "seed": seed} for seed in games]
        return {
            "environment_factory": partial(WordleEnv, client),
            "reward_funcs": tool_reward,
            "train_dataset": Dataset.from_list(rows),
        }
    return {
        "rollout_func": text_rollout.TextRollout(tokenizer, client, args.turns),
        "reward_funcs": [form_reward, progress_reward],
        "train_dataset": Dataset.from_list([{"prompt": text_rollout.prompt(seed)} for seed in games]),
    }


class LogToFile(TrainerCallback):
    """Every logged row as a line of JSON, with the unix time of its last optimizer step."""

    def __init__(self, path: Path) -> None:
        self._path, self._stepped_at = path, 0.0

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._stepped_at = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero:
            with self._path.open("a") as file:
                row = {"step": state.global_step, "stepped_at": self._stepped_at, **(logs or {})}
                file.write(json.dumps(row) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help="Hub name or checkpoint folder; the one `vllm serve` started from"
    )
    parser.add_argument("--vllm", required=True, metavar="URL", help="the server that was started with --delta-sync")
    parser.add_argument("--env", required=True, metavar="URL", help="any OpenEnv Wordle server")
    parser.add_argument("--bucket", required=True, metavar="URI", help="the server's --delta-sync URI")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/wordle"), help="metrics.jsonl and final/ (checkpoint)"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=1, help="different games per step and device")
    parser.add_argument("--generations", type=int, default=8, help="times that each game is played per step")
    parser.add_argument("--games", type=int, default=1000, help="different games in the data set")
    parser.add_argument("--turns", type=int, default=6, help="guesses per game (models without tools)")
    parser.add_argument("--max-tokens", type=int, default=None, help="per game with tools (1024), else per guess (12)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--codec", choices=("gap", "context"), default="gap", help="context: fewer bytes, one rank")
    parser.add_argument("--anchor-every", type=int, default=50, help="versions between complete weights in the bucket")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wake-timeout", type=float, default=900, help="seconds that a server may take to get up")
    return parser.parse_args()


def config(args: argparse.Namespace, tools: bool) -> GRPOConfig:
    gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(args.output),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=args.vllm,
        model_init_kwargs={"dtype": "float32"},  # small steps would vanish in bf16 master weights …
        bf16=True,  # … but compute as the server does, so that both sides' log-probabilities agree
        use_cpu=not gpu,
        gradient_checkpointing=gpu,  # with a small model on CPU, time is scarcer than memory
        num_generations=args.generations,
        per_device_train_batch_size=args.generations * args.groups,
        max_completion_length=args.max_tokens or (1024 if tools else 12),
        chat_template_kwargs={"enable_thinking": False} if tools else None,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )


def wake(args: argparse.Namespace) -> None:
    """Both servers may be Spaces that sleep; better to wait here than in the middle of a trainer's start."""
    try:
        wait_until_awake(args.env, os.environ.get(ENV_TOKEN), args.wake_timeout, probe="/metadata")
        wait_until_awake(args.vllm, os.environ.get("VLLM_API_KEY"), args.wake_timeout, probe="/v1/models")
    except NotAwake as error:
        raise SystemExit(f"not awake: {error}") from None


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    wake(args)
    if not torch.cuda.is_available():
        use_float32_products()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    trainer = GRPOTrainer(
        model=args.model,
        args=config(args, supports_tool_calling(tokenizer)),
        processing_class=tokenizer,
        callbacks=[
            DeltaSyncCallback(
                args.bucket,
                codec=args.codec,
                anchor_every=args.anchor_every,
                sync_timeout=max(600.0, args.wake_timeout),
            ),
            LogToFile(args.output / "metrics.jsonl"),
        ],
        **way_to_play(args, tokenizer),
    )
    trainer.train()
    trainer.save_model(str(args.output / "final"))


if __name__ == "__main__":
    main()
