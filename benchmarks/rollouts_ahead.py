"""What running ahead brings and costs: GRPO with rollouts_ahead=0 and 1, the same seeds, a real vLLM server.

    python benchmarks/rollouts_ahead.py [--steps 24] [--environment 0] [--environment 1.0] [--pairs 2]
    python benchmarks/rollouts_ahead.py --no-vllm --pairs 8 --steps 40 --lr 1e-3 --lr 2e-3

A tiny model (two layers, 128 wide, random weights) is trained against one stock ``vllm serve`` on this machine. Each
completion has two turns; between them an environment elsewhere takes ``--environment`` seconds. A token's reward is
its number, so that there is something to learn. Runs take turns (0, 1, 1, 0, …); each starts from the same weights in
a new epoch of the same bucket. The staleness of a completion is in optimizer steps, that of its oldest token.

The reward that a trainer logs with 1 is that of weights one step older than what it logs with 0. So the weights
themselves are compared: after each step of the last quarter both runs' sample the same number of completions with the
same random numbers. From two pairs on, the exit code says whether 1 is not worse: two standard errors below its mean,
the paired difference is still above ``--margin`` (a share of what the run with 0 has gained) below nothing.

With ``--no-vllm`` the tests' stand-in follows the bucket and samples with transformers from the bits it serves: for
many steps, where rewards are to be compared and not speed. Both then compute in float32, which CPUs do fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "trainer"), str(ROOT / "benchmarks")]

if __name__ == "__main__" and "--no-vllm" in sys.argv:
    import no_vllm  # noqa: F401
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from helpers import tiny_models  # noqa: E402
from helpers.server import VllmServer  # noqa: E402
from paired import compare  # noqa: E402
from sampling_replica import SamplingReplica, sample  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from wire_layouts import machine  # noqa: E402

from trl_callback import DeltaSyncCallback  # noqa: E402

GROUP = 8  # completions of a prompt
TOKENS = 16  # of one turn
TURNS = 2
JUDGED = 256  # completions of weights that are compared
LIMIT = 300.0  # seconds


@dataclass
class Result:
    """One run's numbers: times in seconds, of the steps after the first two; rewards as logged, and of the weights."""

    ahead: int
    seconds: float
    waits: float
    tokens: int
    rewards: list[float]
    weights: list[float]  # at the start, then after each step of the last quarter
    unweighted: float  # share of completions that TRL's correction gave no weight
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def logged(self) -> float:
        """Mean reward of the last quarter, as logged."""
        return statistics.fmean(self.rewards[-len(self.rewards) // 4 :])

    @property
    def reached(self) -> float:
        """Mean reward of the last quarter's weights."""
        return statistics.fmean(self.weights[1:])


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


def train(folder: Path, server: Any, ahead: int, case: Case, args: argparse.Namespace) -> Result:
    """One run from the checkpoint's weights."""
    sync = DeltaSyncCallback(str(folder / "bucket"), rollouts_ahead=ahead, max_staleness=ahead, sync_timeout=LIMIT)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    look = Look(args.steps)
    if args.no_vllm:
        server.seed(case.seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "out"), seed=case.seed, per_device_train_batch_size=args.prompts * GROUP,
            num_generations=GROUP, max_completion_length=TOKENS, max_steps=args.steps, learning_rate=case.lr,
            lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=True, bf16=not args.no_vllm,
            use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, gradient_checkpointing=False, vllm_importance_sampling_mode=args.correction,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{5 + i} w{6 + i}" for i in range(400)]}),
        processing_class=tokenizer,
        callbacks=[sync],
        rollout_func=Turns(tokenizer, case.environment),
    )  # fmt: skip
    look.trainer = trainer
    trainer.add_callback(look)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    sync.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    counted = args.prompts * GROUP
    staleness = sync.rollouts.staleness
    if not ahead:  # of a batch as a whole
        for entry in logs:
            staleness[int(entry["delta_sync/staleness"])] += counted
    tokens = round(sum(entry["completions/mean_length"] for entry in logs[2:]) * counted)
    waits = statistics.fmean(entry["delta_sync/wait_seconds"] for entry in logs[2:])
    rewards = [entry["reward"] for entry in logs]
    return Result(ahead, look.seconds(), waits, tokens, rewards, look.judged(trainer.model),
                  statistics.fmean(look.unweighted), staleness)  # fmt: skip


class Look(TrainerCallback):
    """Notes when each step ends and what its completions weighed, and keeps the weights that are to be judged."""

    def __init__(self, steps: int) -> None:
        self.trainer: Any = None
        self.kept: list[tuple[int, dict[str, torch.Tensor]]] = []  # step, weights
        self.unweighted: list[float] = []
        self._steps, self._times = steps, list[float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Where training starts from."""
        self._keep(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """A step has ended."""
        self._times.append(time.perf_counter())
        for batch in self.trainer._buffered_inputs:
            ratio = batch["importance_sampling_ratio"]
            self.unweighted.append(float((ratio == 0).all(-1).float().mean()))
        if state.global_step > self._steps - self._steps // 4:
            self._keep(state.global_step, model)

    def seconds(self) -> float:
        """Of all steps but the first two."""
        return self._times[-1] - self._times[1]

    def judged(self, model: Any) -> list[float]:
        """How good the kept weights are, in ``model``, once nobody is timed any more."""
        found = []
        for step, weights in self.kept:
            model.load_state_dict(weights)
            found.append(goodness(model.eval(), step))
        return found

    def _keep(self, step: int, model: Any) -> None:
        self.kept.append((step, {name: tensor.clone() for name, tensor in model.state_dict().items()}))


def goodness(model: Any, seed: int) -> float:
    """The mean reward of so many first turns of ``model``, by random numbers of their own."""
    ids = torch.tensor([[5 + i % 400, 6 + i % 400] for i in range(JUDGED)])
    tokens, _ = sample(model, ids, TOKENS, torch.Generator().manual_seed(seed))
    return statistics.fmean(reward(tokens))


@dataclass(frozen=True)
class Case:
    """What differs between rows of a table, and between pairs of a row."""

    environment: float
    lr: float
    seed: int = 0


def serve(folder: Path, args: argparse.Namespace) -> Any:
    """A context in which ``.url`` is served."""
    if args.no_vllm:
        return SamplingReplica(str(folder / "bucket"), folder / "model").running()
    return VllmServer(folder / "model", folder / "server.log", ["--delta-sync", str(folder / "bucket")])


def run_pairs(case: Case, args: argparse.Namespace) -> dict[int, list[Result]]:
    """Both kinds of run, in turns, on one server."""
    results: dict[int, list[Result]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_models.build(folder / "model", "qwen3")
        with serve(folder, args) as server:
            for pair in range(args.pairs):
                seeded = replace(case, seed=args.seed + pair)
                for ahead in (0, 1) if pair % 2 == 0 else (1, 0):
                    run = train(folder, server, ahead, seeded, args)
                    results[ahead].append(run)
                    about = f"lr {case.lr:g}, seed {seeded.seed}, rollouts_ahead={ahead}"
                    print(f"{about}: {run.weights[0]:.4f} to {run.reached:.4f}", file=sys.stderr, flush=True)
    return results


def show_speed(case: Case, results: dict[int, list[Result]]) -> None:
    """Rows of the first table: means over the runs of one kind."""
    steps = len(results[0][0].rewards)
    rates = {}
    for ahead, runs in results.items():
        rates[ahead] = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
        staleness = sum((run.staleness for run in runs), Counter())
        histogram = ", ".join(f"{age}: {count}" for age, count in sorted(staleness.items()))
        print(
            f"| {case.environment:g} s | {case.lr:g} | {ahead} | {mean(run.seconds for run in runs) / (steps - 2):.2f} "
            f"| {rates[ahead]:.0f} ({rates[ahead] / rates[0]:.2f}x) | {mean(run.waits for run in runs):.2f} "
            f"| {mean(mean(run.rewards) for run in runs):.3f} | {mean(run.logged for run in runs):.3f} | {histogram} |"
        )


def show_rewards(case: Case, results: dict[int, list[Result]], margin: float) -> bool:
    """A row of the second table; whether running ahead is not worse."""
    plain, ahead = results[0], results[1]
    start = mean(run.weights[0] for run in plain + ahead)
    verdict = compare(start, [run.reached for run in plain], [run.reached for run in ahead], margin)
    logged = compare(start, [run.logged for run in plain], [run.logged for run in ahead], margin)
    print(
        f"| {case.environment:g} s | {case.lr:g} | {start:.3f} | {mean(run.reached for run in plain):.3f} "
        f"| {mean(run.reached for run in ahead):.3f} | {verdict.difference} | {-margin * verdict.gain.mean:+.4f} "
        f"| {logged.difference} | {mean(run.unweighted for run in plain):.1%}, "
        f"{mean(run.unweighted for run in ahead):.1%} | {verdict} |"
    )
    return verdict.not_worse


mean = statistics.fmean


def main() -> None:
    """Print the machine, the tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=2, help="of runs with a seed in common")
    parser.add_argument("--prompts", type=int, default=2, help=f"of a batch, each completed {GROUP} times")
    parser.add_argument("--environment", type=float, action="append", help="seconds between two turns")
    parser.add_argument("--no-vllm", action="store_true", help="a stand-in that samples: rewards, not speed")
    parser.add_argument("--lr", type=float, action="append")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair")
    parser.add_argument("--margin", type=float, default=0.1, help="share of the gain that may be lacking")
    parser.add_argument("--correction", default="sequence_mask", help="TRL's vllm_importance_sampling_mode")
    args = parser.parse_args()
    environments = args.environment or ([0.0] if args.no_vllm else [0.0, 1.0])
    loads, found = {"load_before": os.getloadavg()[0]}, {}
    for environment in environments:
        for lr in args.lr or [1e-3]:
            found[Case(environment, lr)] = run_pairs(Case(environment, lr), args)
    where = machine()
    loads["load_after"] = os.getloadavg()[0]
    print(f"\n{where['cpu']}, {where['cores']} cores, load {loads['load_before']:.1f} before, "
          f"{loads['load_after']:.1f} after, torch {torch.__version__}, {args.steps} steps, {args.pairs} pairs, "
          f"{args.correction}\n")  # fmt: skip
    print("| environment | lr | rollouts_ahead | s/step | completion tokens/s | s waiting a step | mean reward "
          "| of the last quarter | staleness: completions |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for case, results in found.items():
        show_speed(case, results)
    shown = args.pairs < 2
    if not shown:
        print("\n| environment | lr | start | weights with 0 | with 1 | difference (2 errors) | may be | as logged "
              "| without weight, 0 and 1 | verdict |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
        verdicts = [show_rewards(case, results, args.margin) for case, results in found.items()]
        shown = all(verdicts)
    rows = [{**vars(case), "runs": [vars(run) for runs in results.values() for run in runs]}
            for case, results in found.items()]  # fmt: skip
    print(json.dumps({"benchmark": "rollouts_ahead", **vars(args), **where, **loads, "found": rows}))
    if not shown:
        raise SystemExit("that running ahead is not worse is not shown")


if __name__ == "__main__":
    main()
