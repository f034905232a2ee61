"""Host memory that publishing takes on each rank of a sharded trainer, beside gathering every weight on rank 0.

    python benchmarks/sharded_memory.py --ranks 2 --strategy fsdp2 [--steps 20] [--hidden 512 --layers 8 --vocab 32000]

Both publish the same optimizer steps of one run, in turns. `held` is what stays between steps (the copy of the last
published bits), `peak` the most above the trainer's own memory while a step is published, background included, and
complete weights once. Each version's state digest must equal the digest of the gathered weights. Random weights, no
network; NCCL and one GPU a rank where there are that many.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2", "zero3"], default="fsdp2")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--lr", type=float, default=1e-3, help="of plain gradient descent; sets what share changes")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options)
    else:
        launch(options)


def launch(options: argparse.Namespace) -> None:
    """Start the ranks, print their rows and one line of JSON."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="sharded-memory-") as folder:
        free.bind(("127.0.0.1", 0))
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
                  "WORLD_SIZE": str(options.ranks), "BUCKET": folder}  # fmt: skip
        common.setdefault("OMP_NUM_THREADS", "1")
        free.close()
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(options.ranks)
        ]  # fmt: skip
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed; its error is above")
    rows = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    where = rows[0]["device"]
    print(f"{options.strategy}, {rows[0]['parameters'] / 1e6:.1f}M parameters, {options.steps} steps, "
          f"{rows[0]['changed']:.1%} changed in each, {where}, MB\n")  # fmt: skip
    print(f"{'rank':>4} {'ours: held':>11} {'peak':>7} {'gathering: held':>17} {'peak':>7}")
    for rank, row in enumerate(rows):
        ours, gather = row["ours"], row["gather"]
        print(f"{rank:>4} {ours['held']:>11.1f} {ours['peak']:>7.1f} {gather['held']:>17.1f} {gather['peak']:>7.1f}")
    print(f"\nversions whose digest is that of the gathered weights: {rows[0]['equal']} of {rows[0]['versions']}")
    print(json.dumps({**vars(options), "machine": platform.machine(), "cores": os.cpu_count(), "rows": rows}))


def train(options: argparse.Namespace) -> None:
    """One rank."""
    from trl_callback.config import DeltaSyncConfig
    from trl_callback.metrics import Metrics
    from trl_callback.session import Subject
    from trl_callback.team_session import TeamSession

    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    model, optimize = laid_out(options, device)
    warm_up()

    memory, config = Memory(), DeltaSyncConfig.build(os.environ["BUCKET"] + "/run", serving_dtype="BF16")
    with memory.window("ours", keeps=True):
        session = TeamSession(Subject(model, None, "BF16", 0), config, None, Metrics())
        settle(session)
    gathering = Gathering(model)
    with memory.window("gather", keeps=True):
        gathering.publish()
    equal = versions = 0
    for step in range(1, options.steps + 1):
        optimize()
        with memory.window("ours"):
            session.step_done(step)
            settle(session)
        with memory.window("gather"):
            digest = gathering.publish()
        if rank == 0:
            versions += 1
            equal += digest == session._lead._publisher._chain._manifest.state_digest  # type: ignore[union-attr]
    session.finish(options.steps)
    session.close()
    distributed.barrier()
    count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    share = session._metrics.take().get("delta_sync/changed_fraction", 0.0)
    print(json.dumps({**memory.report(), "equal": equal, "versions": versions, "parameters": count, "changed": share,
                      "device": torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}"}))  # fmt: skip
    distributed.destroy_process_group()


def settle(session: Any) -> None:
    """Wait until rank 0 has published, so that what happens in the background falls into the window too."""
    if session._lead is not None:
        session._lead.flush()
        publisher = session._lead._publisher
        with publisher._changed:
            publisher._changed.wait_for(lambda: not publisher.anchor_wanted, 300)
    distributed.barrier()


def laid_out(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """A model over the ranks, and what makes one optimizer step of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = options.hidden // 64
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3, num_hidden_layers=options.layers,
            num_attention_heads=heads, num_key_value_heads=heads, vocab_size=options.vocab, tie_word_embeddings=True,
        )
    ).to(device)  # fmt: skip
    tokens = torch.randint(0, options.vocab, (2, 32), device=device)
    if options.strategy == "zero3":
        import deepspeed

        config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2,
                  "zero_allow_untested_optimizer": True}  # fmt: skip
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), options.lr), config=config
        )

        def step_zero() -> None:
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()

        return engine.module, step_zero
    wrapped: Any = model
    if options.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), options.lr)

    def step() -> None:
        wrapped(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


class Gathering:
    """What a trainer does that publishes from rank 0: gather each weight, compare it there, encode there."""

    def __init__(self, model: Any) -> None:
        self._model, self._rank = model, distributed.get_rank()
        self.bits: dict[str, Any] = {}  # on rank 0, as last published
        self._shapes: dict[str, tuple[int, ...]] = {}

    def publish(self) -> str:
        """The state digest after it, on rank 0."""
        from delta_sync import DTYPES, diff, encode_delta, state_digest, tensor_key
        from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader
        from delta_sync.digest import digest
        from delta_sync.manifest import TensorState

        deltas = []
        for name, parameter in self._model.named_parameters():
            whole = gathered(parameter)
            if self._rank:
                continue
            bits = whole.to(torch.bfloat16).cpu().view(torch.int16).numpy().view("<u2").reshape(-1)
            self._shapes[name] = tuple(whole.shape)
            if name in self.bits:
                deltas.append(diff(name, DTYPES["BF16"], self._shapes[name], self.bits[name], bits))
            self.bits[name] = bits.copy()
        if deltas:
            encode_delta(DeltaHeader("gather", 2, 1, DEFAULT_CODEC), deltas)
        return state_digest(
            {n: TensorState("BF16", self._shapes[n], digest(b, tensor_key(n))) for n, b in self.bits.items()}
        )


def fingerprint(bits: dict[str, Any]) -> str:
    """SHA-256 of every tensor's name and bits."""
    hashed = hashlib.sha256()
    for name in sorted(bits):
        hashed.update(name.encode() + b"\0")
        hashed.update(bits[name].tobytes())
    return hashed.hexdigest()


def gathered(parameter: Any) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach()
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach()


class Memory:
    """This process's anonymous memory, sampled all the time."""

    def __init__(self) -> None:
        self.held = {"ours": 0.0, "gather": 0.0}
        self.peak = {"ours": 0.0, "gather": 0.0}
        self._open: _Window | None = None
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        """What is read counts for the window that was open before reading began, never for one opened meanwhile."""
        pause = threading.Event()
        while not pause.wait(0.002):
            window = self._open
            if window is not None:
                window.highest = max(window.highest, anonymous())

    def window(self, which: str, *, keeps: bool = False) -> Any:
        """Count what is taken while it is open for ``which``; ``keeps``: what remains is what it holds."""
        return _Window(self, which, keeps)

    def report(self) -> dict[str, dict[str, float]]:
        """MB."""
        return {which: {"held": self.held[which] / MB, "peak": self.peak[which] / MB} for which in self.held}


class _Window:
    def __init__(self, memory: Memory, which: str, keeps: bool) -> None:
        self._memory, self._which, self._keeps = memory, which, keeps
        self.highest = 0.0

    def __enter__(self) -> None:
        tidy()
        self._start = self.highest = anonymous()
        self._memory._open = self

    def __exit__(self, *_: Any) -> None:
        memory, which = self._memory, self._which
        memory._open = None
        rose = self.highest - self._start
        tidy()
        before = memory.held[which]
        if self._keeps:
            memory.held[which] = anonymous() - self._start
        memory.peak[which] = max(memory.peak[which], before + rose)


def anonymous() -> float:
    """Bytes of anonymous resident memory: files' pages, which the system takes back at will, are not counted."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024.0 * int(line.split()[1])
    raise SystemExit("this measurement needs Linux")


def tidy() -> None:
    """Give freed memory back to the system, so that what remains is what is held."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def warm_up() -> None:
    """Load what is compiled on first use, so that it is not counted."""
    import numpy as np

    from delta_sync import DTYPES, diff, encode_delta, tensor_key
    from delta_sync.delta import apply
    from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader
    from delta_sync.digest import digest, digest_change, digest_region
    from delta_sync.rounding import diff_rounded

    old, new = np.zeros(512, "<u2"), np.arange(512, dtype="<u2")
    delta = diff("t", DTYPES["BF16"], (512,), old, new)
    encode_delta(DeltaHeader("warm", 2, 1, DEFAULT_CODEC), [delta])
    diff_rounded("t", (512,), old, np.zeros(512, "<f4"))
    apply(delta, old.copy())
    digest(new, tensor_key("t"))
    digest_region(new, 0, (1,), 0, (1,), (512,), tensor_key("t"))
    digest_change(delta.positions, old[delta.positions], new[delta.positions], tensor_key("t"))


if __name__ == "__main__":
    main()
