"""From an optimizer step to served weights over a slow link: ours beside the blog's protocol, same weights, one run.

Usage: python benchmarks/end_to_end.py [--shape smollm2-135m] [--shape qwen3-0.6b] [--mbit 1000]... [--device cuda]
       [--via memory]

A trainer and a replica with weights of a model's shapes meet in an S3 bucket (moto) behind a link of its own for each
(shaped_link.py, a process each; RTT 50 ms), or in memory with every call slowed down the same way (slow_store.py). A
step moves every fp32 master by lr times a normal number, as AdamW does: small weights flip most.

Ours is the product: Publisher, Chain, the replica's plan, stage, proof and swap. The blog's: compare with a bf16
snapshot, one safetensors file of int32 indices and bf16 values, upload, tell the server (one way), which pauses,
downloads, scatters into a snapshot of its own, loads every tensor densely and resumes. Its load is a plain copy into
the live tensors, cheaper than any ``load_weights``. The first token's own forward pass is the same for both and left
out. Medians of the steps after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from helpers.moto_server import ENVIRONMENT, moto_server, new_bucket  # noqa: E402
from safetensors.torch import load, save  # noqa: E402
from shaped_link import link  # noqa: E402
from shapes import SHAPES, tensors_of  # noqa: E402
from slow_store import SlowStore  # noqa: E402

from delta_sync.dtypes import dtype  # noqa: E402
from delta_sync.ledger import Ledger  # noqa: E402
from delta_sync.plan import Plan, Position  # noqa: E402
from delta_sync.store.base import Store  # noqa: E402
from delta_sync.store.open import open_store  # noqa: E402
from trl_callback.chain import Chain  # noqa: E402
from trl_callback.config import DeltaSyncConfig  # noqa: E402
from trl_callback.gpu_snapshot import snapshot_of  # noqa: E402
from trl_callback.metrics import Metrics  # noqa: E402
from trl_callback.publisher import Publisher  # noqa: E402
from trl_callback.serving_image import ServingImage  # noqa: E402
from vllm_delta_plugin.background import STAGING, Job  # noqa: E402
from vllm_delta_plugin.commit import device_of  # noqa: E402
from vllm_delta_plugin.coverage import TensorInfo, WeightMap  # noqa: E402
from vllm_delta_plugin.live_storage import live_storage  # noqa: E402
from vllm_delta_plugin.proof import Layout, Proven, prove  # noqa: E402
from vllm_delta_plugin.regions import make_region  # noqa: E402
from vllm_delta_plugin.stage import Rank, Staged, stage  # noqa: E402

POLL = 0.1  # seconds, the plugin's
LIMIT = 600.0


class Masters(torch.nn.Module):
    """A trainer's fp32 weights."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(
                name.replace(".", "_"), torch.nn.Parameter(0.02 * torch.randn(shape, device=device))
            )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of AdamW's size."""
        for weights in self.parameters():
            weights.add_(torch.randn_like(weights), alpha=lr)


@dataclass
class Clock:
    """Unix-like times of what happened, and seconds of what took long, of one step."""

    begin: float = field(default_factory=time.perf_counter)
    at: dict[str, float] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """It happened now."""
        self.at.setdefault(what, time.perf_counter() - self.begin)


class Ours:
    """The product on both ends."""

    name = "ours"

    def __init__(self, model: Masters, ends: tuple[Store, Store], args: argparse.Namespace) -> None:
        self._clock, self.bytes = Clock(), 0
        self._image = ServingImage(model, lambda name: "BF16")
        config = DeltaSyncConfig.build("memory://ours", codec=args.codec, anchor_every=0, anchor_chain_ratio=0.0)
        snapshot = snapshot_of(self._image, args.snapshot_device, config.bucket_bytes)
        self._chain = Chain(Ledger(ends[0]), snapshot, config, {"config.json": b"{}"}, 0)
        self._publisher = Publisher(self._chain, snapshot, config, Metrics())
        self._ledger = Ledger(ends[1])
        origin = self._ledger.head()
        if origin is None:
            raise RuntimeError("no origin")
        self._position = Position(origin.version, origin.sha256)
        self.live = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
        weights = weight_map(self.live)
        self._rank = Rank(weights, device_of(weights.storages), only_rank=True, limit=2**40)
        tensors = {n: (i.dtype.name, i.shape) for n, i in weights.tensors.items()}
        self._layout = Layout(tensors, [weights.digests().keys()])
        self._proven = Proven.of(self._layout, [weights.digests()])
        self._stop, self._news = threading.Event(), threading.Condition()
        self._version = origin.version
        self._publisher.start()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, step: int) -> Clock:
        """Capture, and wait until the replica serves it."""
        clock = self._clock = Clock()
        self._publisher.capture(self._image, step)
        clock.note("extracted")
        with self._news:
            if not self._news.wait_for(lambda: self._version > step, LIMIT):
                raise TimeoutError(f"step {step} was not served within {LIMIT:g} s")
        self._publisher.flush(LIMIT)
        return clock

    def _serve(self) -> None:
        while not self._stop.is_set():
            newest = self._ledger.wait_newer(self._position, time.monotonic() + LIMIT, self._stop, poll_seconds=POLL)
            plan = self._ledger.plan(self._position, None, newest=newest) if newest else None
            if plan is not None and plan.deltas:
                self._take(plan)

    def _take(self, plan: Plan) -> None:
        clock = self._clock
        clock.note("noticed")
        job: Job[Staged] = Job("stage", STAGING, lambda job: stage(job, self._rank, self._ledger, plan))
        job._thread.join(LIMIT)
        if job.result is None:
            raise job.error or TimeoutError("staging")
        clock.note("staged")
        self._proven = prove(
            self._layout, self._proven.sums, [job.result.parts], plan.tensors, plan.target.state_digest
        )
        job.result.swap.swap(lambda: None)
        synchronize(next(iter(self.live.values())))
        clock.note("served")
        self.bytes = sum(ref.size for step in plan.deltas for ref in step.objects)
        self._position = plan.position
        with self._news:
            self._version = plan.target.version
            self._news.notify_all()

    def close(self) -> None:
        """End both ends."""
        self._stop.set()
        self._thread.join(10)
        self._publisher.stop()


class Blog:
    """The protocol of TRL's blog post, as described there."""

    name = "blog"

    def __init__(self, model: Masters, ends: tuple[Store, Store], args: argparse.Namespace) -> None:
        self._model, self._rtt, self.bytes = model, args.rtt_ms / 1e3, 0
        self._trainer, self._server = ends
        self.live = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
        self._snapshot = {name: p.to("cpu", copy=True) for name, p in self.live.items()}
        self._held = {name: p.to("cpu", copy=True) for name, p in self.live.items()}

    @torch.no_grad()
    def publish(self, step: int) -> Clock:
        """Upload, notify, pause, download, load, resume."""
        clock = Clock()
        changed: dict[str, torch.Tensor] = {}
        for name, weights in self._model.named_parameters():
            new, old = weights.to(torch.bfloat16).cpu(), self._snapshot[name]
            at = torch.nonzero((new != old).reshape(-1))[:, 0]
            values = new.reshape(-1)[at]
            old.reshape(-1)[at] = values
            if at.numel():
                changed[f"{name}.indices"], changed[f"{name}.values"] = at.to(torch.int32), values
        clock.note("extracted")
        data = save(changed)
        key = f"deltas/{step}.safetensors"
        self._trainer.put(key, data)
        clock.note("uploaded")
        time.sleep(self._rtt / 2)  # the trainer tells the server, which pauses
        clock.note("noticed")
        got = load(self._server.get(key, max_bytes=len(data)))
        clock.note("fetched")
        for name, live in self.live.items():
            if f"{name}.indices" in got:
                self._held[name].view(-1)[got[f"{name}.indices"].long()] = got[f"{name}.values"]
            live.copy_(self._held[name])
        synchronize(next(iter(self.live.values())))
        clock.note("served")
        self.bytes = len(data)
        return clock

    def close(self) -> None:
        """Nothing runs."""


def weight_map(live: dict[str, torch.Tensor]) -> WeightMap:
    """Each tensor in a storage of its own."""
    weights = WeightMap(known=frozenset(live))
    for number, (name, value) in enumerate(live.items()):
        weights.storages.append(live_storage(name, value))
        weights.tensors[name] = TensorInfo(dtype("BF16"), tuple(value.shape))
        weights.regions[name] = [make_region(name, number, (value.numel(),), 0, (1,), 0, (1,))]
    return weights


def synchronize(like: torch.Tensor) -> None:
    """Wait for a GPU's work."""
    if like.device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def endpoint(address: str) -> Iterator[None]:
    """Stores opened inside reach S3 by this address."""
    os.environ["AWS_ENDPOINT_URL"] = f"http://{address}"
    yield
    del os.environ["AWS_ENDPOINT_URL"]


def stores(
    args: argparse.Namespace, mbit: float, server: str | None, links: contextlib.ExitStack
) -> list[tuple[Store, Store]]:
    """For each protocol the trainer's and the server's end of a place of its own."""
    if server is None:
        names = [f"{what}{uuid.uuid4().hex}" for what in ("ours", "blog")]
        first, second = ((SlowStore(n, mbit, args.rtt_ms / 1e3), SlowStore(n, mbit, args.rtt_ms / 1e3)) for n in names)
        return [first, second]
    ends = [links.enter_context(link(server.removeprefix("http://"), mbit, args.rtt_ms)) for _ in range(2)]
    bucket = new_bucket(server)
    opened: list[list[Store]] = [[], []]
    for end in ends:
        with endpoint(end):
            for number, place in enumerate(("ours", "blog")):
                opened[number].append(open_store(f"s3://{bucket}/{place}"))
    return [(trainer, replica) for trainer, replica in opened]


def measure(args: argparse.Namespace, shape: str, mbit: float, server: str | None) -> list[dict[str, Any]]:
    """Both protocols over one link, step by step in turns; the live bits of both must be the trainer's."""
    model = Masters(tensors_of(SHAPES[shape]), args.device)
    with contextlib.ExitStack() as links:
        ours, blog = stores(args, mbit, server, links)
        both = [Ours(model, ours, args), Blog(model, blog, args)]
        clocks: dict[str, list[Clock]] = {one.name: [] for one in both}
        for step in range(1, args.steps + 2):
            model.step(args.lr)
            for one in both:
                clocks[one.name].append(one.publish(step))
        for one in both:
            one.close()
            for name, weights in model.named_parameters():
                if not torch.equal(one.live[name], weights.detach().to(torch.bfloat16)):
                    raise SystemExit(f"{one.name}: {name} is not what the trainer has")
    size = sum(weights.numel() for weights in model.parameters())
    return [
        {"shape": shape, "elements": size, "mbit": mbit, "rtt_ms": args.rtt_ms, "protocol": one.name,
         "bytes": one.bytes, **medians(clocks[one.name][1:])}
        for one in both
    ]  # fmt: skip


def medians(clocks: list[Clock]) -> dict[str, float]:
    """Of every moment, milliseconds after the optimizer step."""
    return {what: round(1e3 * statistics.median(c.at[what] for c in clocks), 1) for what in clocks[0].at}


def main() -> None:
    """Every shape over every link; JSON lines, then a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--mbit", type=float, action="append")
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--codec", choices=("gap", "context"), default="gap")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--snapshot-device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--via", choices=("s3", "memory"), default="s3")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows: list[dict[str, Any]] = []
    with moto_server() if args.via == "s3" else contextlib.nullcontext() as server:
        for shape in args.shape or ["smollm2-135m", "qwen3-0.6b"]:
            for mbit in args.mbit or [100, 1000, 10_000]:
                rows += measure(args, shape, mbit, server)
                for row in rows[-2:]:
                    print(json.dumps(row), flush=True)
    print("\n| shape | link | ours: bytes, ms | blog's: bytes, ms | ours / blog's |\n|---|---|---|---|---|")
    for ours, blog in zip(rows[::2], rows[1::2], strict=True):
        print(f"| {ours['shape']} | {ours['mbit']:g} Mbit/s, {ours['rtt_ms']:g} ms | {ours['bytes']:,}, "
              f"{ours['served']:.0f} | {blog['bytes']:,}, {blog['served']:.0f} "
              f"| {ours['served'] / blog['served']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
