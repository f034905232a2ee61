"""What running ahead brings and costs: GRPO with rollouts_ahead=0 and 1, the same seeds, a real vLLM server.

Usage: python benchmarks/rollouts_ahead.py [--steps 24] [--environment 0] [--environment 1.0] [--repeats 2] [--no-vllm]

A tiny model (two layers, 128 wide, random weights) is trained against one stock ``vllm serve`` on this machine. Each
completion has two turns; between them an environment elsewhere takes ``--environment`` seconds. A token's reward is
its number, so that there is something to learn. Runs take turns (0, 1, 1, 0, …); each starts from the same weights in
a new epoch of the same bucket. The staleness of a completion is in optimizer steps, that of its oldest token.

With ``--no-vllm`` the tests' stand-in follows the bucket and samples with transformers from the bits it serves: for
many steps, where rewards are to be compared and not speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "trainer")]

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from helpers import tiny_models  # noqa: E402
from helpers.server import VllmServer  # noqa: E402
from stand_in_replica import StandInReplica  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from trl_callback import DeltaSyncCallback  # noqa: E402

GROUP = 8  # completions of a prompt
PROMPTS = 2  # of a batch
TOKENS = 16  # of one turn
TURNS = 2
EOS = tiny_models.COMMON["eos_token_id"]
LIMIT = 300.0  # seconds


@dataclass
class Result:
    """One run's numbers: times in seconds, of the steps after the first two."""

    ahead: int
    seconds: float
    waits: float
    tokens: int
    rewards: list[float]
    staleness: Counter[int] = field(default_factory=Counter)


class Turns:
    """GRPOTrainer's rollout_func: two turns, an environment in between."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        self._tokenizer, self._seconds = tokenizer, seconds

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts' and completions' ids, log-probabilities, and 1 where the model wrote."""
        ids = [self._tokenizer(text=prompt)["input_ids"] for prompt in prompts]
        whole: list[list[int]] = [[] for _ in prompts]
        chances: list[list[float]] = [[] for _ in prompts]
        for turn in range(TURNS):
            if turn:
                time.sleep(self._seconds)
            asked = [[*one, *more] for one, more in zip(ids, whole, strict=True)]
            _, answers, logprobs, _ = trainer.vllm_generation.generate(prompts=asked, images=None, num_generations=1)
            for i, answer in enumerate(answers):
                whole[i] += answer
                chances[i] += [chance[0] for chance in logprobs[i]]
        return {"prompt_ids": ids, "completion_ids": whole, "logprobs": chances}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The mean token, as a share of the vocabulary."""
    return [sum(ids) / (tiny_models.VOCAB * len(ids)) for ids in completion_ids]


def train(folder: Path, url: str, ahead: int, environment: float, args: argparse.Namespace) -> Result:
    """One run from the checkpoint's weights."""
    sync = DeltaSyncCallback(str(folder / "bucket"), rollouts_ahead=ahead, max_staleness=ahead, sync_timeout=LIMIT)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "out"), seed=args.seed, per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP, max_completion_length=TOKENS, max_steps=args.steps, learning_rate=args.lr,
            lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=True, bf16=True, use_vllm=True,
            vllm_mode="server", vllm_server_base_url=url, save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{5 + i} w{6 + i}" for i in range(400)]}),
        processing_class=tokenizer,
        callbacks=[sync],
        rollout_func=Turns(tokenizer, environment),
    )  # fmt: skip
    times: list[float] = []
    trainer.add_callback(StepTimes(times))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    sync.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    counted = PROMPTS * GROUP
    staleness = sync.rollouts.staleness
    if not ahead:  # of a batch as a whole
        for entry in logs:
            staleness[int(entry["delta_sync/staleness"])] += counted
    tokens = round(sum(entry["completions/mean_length"] for entry in logs[2:]) * counted)
    waits = statistics.fmean(entry["delta_sync/wait_seconds"] for entry in logs[2:])
    return Result(ahead, times[-1] - times[1], waits, tokens, [entry["reward"] for entry in logs], staleness)


class StepTimes(TrainerCallback):
    """Notes when each step ends, in seconds."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self._times.append(time.perf_counter())


class Sampler(StandInReplica):
    """Follows the bucket bit for bit, and samples from these bits with transformers, at temperature 1."""

    def __init__(self, uri: str, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        super().__init__(uri, self._model, vocab=tiny_models.VOCAB)
        self._generator, self._held = torch.Generator().manual_seed(0), None
        self._one_at_a_time = threading.Lock()

    def complete(self, body: Any) -> tuple[int, Any]:
        """As its base, but the tokens are the model's."""
        with self._one_at_a_time, torch.inference_mode():
            self._load()
            _, answer = super().complete(body)
            by_length: dict[int, list[dict[str, Any]]] = {}
            for choice in answer["choices"]:
                by_length.setdefault(len(choice["prompt_token_ids"]), []).append(choice)
            for choices in by_length.values():
                self._fill(choices, body["max_tokens"])
        return 200, answer

    def _load(self) -> None:
        with self._lock:
            if self._held != self.position:
                bits = {name: torch.from_numpy(one.view("int16").copy()) for name, one in self.live.items()}
                shaped = {name: one.view(torch.bfloat16).view(self.layout[name][1]) for name, one in bits.items()}
                self._model.load_state_dict(shaped, strict=False)
                self._model.tie_weights()
                self._held = self.position

    def _fill(self, choices: list[dict[str, Any]], count: int) -> None:
        ids = torch.tensor([choice["prompt_token_ids"] for choice in choices])
        past, asked, tokens, chances = None, ids, [], []
        for _ in range(count):
            out = self._model(asked, past_key_values=past, use_cache=True)
            past, logprobs = out.past_key_values, out.logits[:, -1].float().log_softmax(-1)
            asked = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            tokens.append(asked[:, 0])
            chances.append(logprobs.gather(-1, asked)[:, 0])
        sampled, scored = torch.stack(tokens, 1).tolist(), torch.stack(chances, 1).tolist()
        for choice, own, chance in zip(choices, sampled, scored, strict=True):
            end = own.index(EOS) + 1 if EOS in own else count
            names = [f"token_id:{token}" for token in own[:end]]
            tops = [{name: one} for name, one in zip(names, chance, strict=False)]
            choice["token_ids"] = own[:end]
            choice["logprobs"] = {"tokens": names, "token_logprobs": chance[:end], "top_logprobs": tops}


def serve(folder: Path, args: argparse.Namespace) -> Any:
    """A context in which ``.url`` is served."""
    if args.no_vllm:
        return Sampler(str(folder / "bucket"), folder / "model").running()
    return VllmServer(folder / "model", folder / "server.log", ["--delta-sync", str(folder / "bucket")])


def compare(environment: float, args: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of run, in turns, on one server."""
    results: dict[int, list[Result]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_models.build(folder / "model", "qwen3")
        with serve(folder, args) as server:
            for repeat in range(args.repeats):
                for ahead in (0, 1) if repeat % 2 == 0 else (1, 0):
                    results[ahead].append(train(folder, server.url, ahead, environment, args))
    return {str(ahead): summary(runs) for ahead, runs in results.items()}


def summary(runs: list[Result]) -> dict[str, Any]:
    """Means over the runs of one kind."""
    steps = len(runs[0].rewards)
    last = [statistics.fmean(run.rewards[-steps // 4 :]) for run in runs]
    return {
        "step_seconds": statistics.fmean(run.seconds / (steps - 2) for run in runs),
        "tokens_per_second": sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
        "wait_seconds": statistics.fmean(run.waits for run in runs),
        "reward": statistics.fmean(statistics.fmean(run.rewards) for run in runs),
        "reward_last_quarter": statistics.fmean(last),
        "reward_last_quarter_runs": last,
        "staleness": dict(sorted(sum((run.staleness for run in runs), Counter()).items())),
    }


def show(environment: float, found: dict[str, Any]) -> None:
    """The table's rows."""
    before = found["0"]["tokens_per_second"]
    for ahead, one in found.items():
        histogram = ", ".join(f"{staleness}: {count}" for staleness, count in one["staleness"].items())
        runs = ", ".join(f"{value:.3f}" for value in one["reward_last_quarter_runs"])
        print(
            f"| {environment:g} s | {ahead} | {one['step_seconds']:.2f} | {one['tokens_per_second']:.0f} "
            f"({one['tokens_per_second'] / before:.2f}x) | {one['wait_seconds']:.2f} | {one['reward']:.3f} | "
            f"{one['reward_last_quarter']:.3f} ({runs}) | {histogram} |"
        )


def main() -> None:
    """Print the machine, the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("--environment", type=float, action="append", help="seconds between two turns")
    parser.add_argument("--no-vllm", action="store_true", help="a stand-in that samples: rewards, not speed")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    environments = args.environment or [0.0, 1.0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
          f"torch {torch.__version__}")  # fmt: skip
    print("| environment | rollouts_ahead | s/step | completion tokens/s | s waiting a step | mean reward | "
          "of the last quarter (runs) | staleness: completions |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    found = {}
    for environment in environments:
        found[f"{environment:g}"] = compare(environment, args)
        show(environment, found[f"{environment:g}"])
    print(json.dumps({"benchmark": "rollouts_ahead", "steps": args.steps, "repeats": args.repeats, "found": found}))


if __name__ == "__main__":
    main()
