"""GRPO over several ranks: served bits beside gathered weights, memory beside publishing by gathering, one run.

    python benchmarks/sharded_grpo.py --strategy fsdp2 --ranks 3 [--steps 20] [--hidden 256 --layers 4 --vocab 16000]

A real GRPOTrainer under accelerate (gloo on CPUs, as the tests have it) trains a model with random weights and rolls
out from a replica in another process: the plugin's own chain on real storages (plan, stage, proof, swap) behind a
stand-in for vLLM's routes, which answers with random tokens. After each step both publish: ours by the callback, then
one that gathers every weight on rank 0, compares and encodes there (sharded_memory.py, as are `held` and `peak`). Of
each version the replica's live bits must be those that were gathered, by the SHA-256 of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/trainer"), str(ROOT / "benchmarks")]

if "RANK" in os.environ:
    import no_vllm  # noqa: F401 (ranks need none of it, and it takes long to import)
import accelerate_on_cpu  # noqa: E402, F401
import grpo  # noqa: E402
import torch  # noqa: E402
from end_of_rank import leave_groups  # noqa: E402
from several_ranks import FSDP2, ZERO, zero  # noqa: E402
from sharded_memory import Gathering, Memory, fingerprint, settle, warm_up  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback  # noqa: E402
from wire_layouts import machine  # noqa: E402

ENVIRONMENT = {"ddp": {}, "fsdp2": {**FSDP2, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}, "zero3": ZERO}
VOCAB = 96  # of the tokenizer; the model's is larger, so that there is memory to measure


def build(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    heads = options.hidden // 32
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3, num_hidden_layers=options.layers,
            num_attention_heads=heads, num_key_value_heads=heads, vocab_size=options.vocab, tie_word_embeddings=True,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128,
        )
    )  # fmt: skip


class BothPublish(TrainerCallback):
    """Stands for DeltaSyncCallback in the trainer's list; gathers after it. Rank 0 keeps what was gathered by step."""

    def __init__(self, sync: Any) -> None:
        self.sync, self.memory = sync, Memory()
        self.gathered: dict[int, str] = {}
        self._gathering: Any = None

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        self.sync.on_init_end(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with self.memory.window("ours", keeps=True):
            self.sync.on_train_begin(args, state, control, model=model, **kwargs)
            settle(self.sync._session)
        self._gathering = Gathering(model)
        with self.memory.window("gather", keeps=True):
            self._gathering.publish()
        self._keep(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.memory.window("ours"):
            self.sync.on_step_end(args, state, control, **kwargs)
            settle(self.sync._session)
        with self.memory.window("gather"):
            self._gathering.publish()
        self._keep(state.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.sync.sync()  # the last step's weights are served too
        self.sync.on_train_end(*args, **kwargs)

    def _keep(self, step: int) -> None:
        if self._gathering.bits:
            self.gathered[step] = fingerprint(self._gathering.bits)


def train(options: argparse.Namespace) -> None:
    """One rank; its row is the last line."""
    from trl_callback import DeltaSyncCallback

    warm_up()
    sync = DeltaSyncCallback(options.uri, serving_dtype="BF16", anchor_every=0, anchor_chain_ratio=0)
    both = BothPublish(sync)
    deepspeed = options.strategy == "zero3"
    arguments = {"bf16": True, "use_cpu": True} | (zero(3, bf16=False) | {"use_cpu": False} if deepspeed else {})
    trainer = grpo.grpo_trainer(
        options.uri + "-trainer", model=build(options), url=options.url, use_vllm=True, callbacks=[both],
        max_steps=options.steps, **arguments,
    )  # fmt: skip
    trainer.train()
    sync.close()
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
    print(json.dumps({**both.memory.report(), "gathered": both.gathered, "rank": torch.distributed.get_rank(),
                      "parameters": parameters}), flush=True)  # fmt: skip
    leave_groups()


def launch(options: argparse.Namespace) -> None:
    """The replica, the ranks, and what came of both."""
    from served_chain import ServedChain

    with tempfile.TemporaryDirectory(prefix="sharded-grpo-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        replica = ServedChain(f"{folder}/run", build(options), vocab=VOCAB)
        common = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1", **ENVIRONMENT[options.strategy],
        }  # fmt: skip
        if options.strategy != "zero3":
            common["ACCELERATE_USE_CPU"] = "true"
        with replica.running():
            said = [sys.executable, *sys.argv, "--uri", f"{folder}/run", "--url", replica.url]
            ranks = [
                subprocess.Popen(said, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                 stdout=subprocess.PIPE, text=True)
                for rank in range(options.ranks)
            ]  # fmt: skip
            try:
                outputs = [rank.communicate(timeout=options.timeout)[0] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed; its error is above")
    report(options, [json.loads(output.strip().splitlines()[-1]) for output in outputs], replica.fingerprints)


def report(options: argparse.Namespace, rows: list[dict[str, Any]], served: dict[int, str]) -> None:
    """Rows of memory, how many versions are equal, and one line of JSON; fails unless all are."""
    gathered = {int(step): value for step, value in rows[0].pop("gathered").items()}
    equal = sum(served.get(step) == value for step, value in gathered.items())
    where = machine()
    print(f"GRPO over {options.strategy}, {options.ranks} ranks, {rows[0]['parameters'] / 1e6:.1f}M parameters, "
          f"{options.steps} steps, {where['cpu']}, MB\n")  # fmt: skip
    print("| rank | ours: held | peak | gathering: held | peak |\n|---|---|---|---|---|")
    for row in rows:
        numbers = [row[which][what] for which in ("ours", "gather") for what in ("held", "peak")]
        print(f"| {row['rank']} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |")
    print(f"\nversions served with the bits that were gathered: {equal} of {options.steps + 1}")
    print(json.dumps({**vars(options), **where, "equal": equal, "rows": rows}))
    if equal != options.steps + 1:
        sys.exit("a version was not served, or with other bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", choices=ENVIRONMENT, default="fsdp2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that the ranks have")
    parser.add_argument("--uri", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options)
    else:
        launch(options)


if __name__ == "__main__":
    main()
