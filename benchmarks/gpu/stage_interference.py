"""What noticing and staging versions, and audits, do to an engine loop beside them: the longest turn while each runs.

Usage: python benchmarks/gpu/stage_interference.py [--shape qwen3-0.6b] [--versions 6] [--fraction 0.01] [--objects 1]

No vLLM: a loop that launches kernels, waits for them and does a little Python work stands for the engine's step, and
the plugin's own RankSync stages, commits and settles versions beside it, as it does where one process is engine and
worker (TP=1). One JSON object on the last line; times in milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from commit_gap import SHAPES, change  # noqa: E402
from helpers.publish import Publisher  # noqa: E402

from delta_sync.aside import aside  # noqa: E402
from delta_sync.breath import beside  # noqa: E402
from delta_sync.dtypes import dtype  # noqa: E402
from delta_sync.ledger import Ledger  # noqa: E402
from delta_sync.plan import Plan, Position  # noqa: E402
from delta_sync.store.open import open_store  # noqa: E402
from delta_sync.tensor_delta import TensorDelta  # noqa: E402
from vllm_delta_plugin import chain, commit, stage, staged  # noqa: E402
from vllm_delta_plugin.coverage import TensorInfo, WeightMap  # noqa: E402
from vllm_delta_plugin.live_storage import HAS_TRITON, LiveStorage, live_storage  # noqa: E402
from vllm_delta_plugin.rank_sync import RankSync  # noqa: E402
from vllm_delta_plugin.regions import make_region  # noqa: E402

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # on a CPU: the loop is one thread, as the interpreter is
Span = tuple[str, float, float]


def tensors_of(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen3-like model's tensors."""
    hidden, middle, heads, kv, head = (shape[k] for k in ("hidden", "intermediate", "heads", "kv", "head_dim"))
    found: dict[str, tuple[int, ...]] = {"embed": (shape["vocab"], hidden)}
    for layer in range(shape["layers"]):
        found |= {
            f"{layer}.q": (heads * head, hidden),
            f"{layer}.k": (kv * head, hidden),
            f"{layer}.v": (kv * head, hidden),
            f"{layer}.o": (hidden, heads * head),
            f"{layer}.gate": (middle, hidden),
            f"{layer}.up": (middle, hidden),
            f"{layer}.down": (hidden, middle),
            f"{layer}.norm1": (hidden,),
            f"{layer}.norm2": (hidden,),
        }
    return found


def weight_map(weights: dict[str, np.ndarray]) -> WeightMap:
    """Every tensor in a storage of its own on the device."""
    result = WeightMap(known=frozenset(weights))
    for number, (name, bits) in enumerate(weights.items()):
        live = torch.from_numpy(bits.view(np.int16)).to(DEVICE).view(torch.bfloat16)
        result.storages.append(live_storage(name, live))
        result.tensors[name] = TensorInfo(dtype("BF16"), bits.shape)
        result.regions[name] = [make_region(name, number, (bits.size,), 0, (1,), 0, (1,))]
    return result


class Dealt(Publisher):
    """Whole tensors are dealt out among ``ranks`` objects; a trainer makes one for every 512 MiB of weights."""

    def _part(self, rank: int, deltas: list[TensorDelta]) -> list[TensorDelta]:
        return deltas[rank :: self.ranks]


class Loop:
    """The engine's stand-in: turn after turn on the main thread until stopped, each one's begin and end kept."""

    def __init__(self) -> None:
        self.turns: list[tuple[float, float]] = []
        side = 1024 if DEVICE.type == "cuda" else 64
        self._a = torch.randn(side, side, device=DEVICE)

    def turn(self) -> None:
        """About two milliseconds: kernels, a wait for their result, and the interpreter in between."""
        begin = time.perf_counter()
        x = self._a
        for _ in range(40):
            x = torch.tanh(x @ self._a * 1e-3)
        float(x[0, 0])
        sum(i * i for i in range(5000))
        self.turns.append((begin, time.perf_counter()))

    def longest(self, begin: float, end: float) -> float:
        """The longest turn that touches this time, in milliseconds."""
        return 1e3 * max((b - a for a, b in self.turns if b >= begin and a <= end), default=0.0)


class Clock:
    """Times named pieces of the staging code by wrapping them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note when this block began and ended."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((name, begin, time.perf_counter()))

    def wrap(self, owner: Any, attribute: str) -> None:
        """Time every call of a function or method."""
        original: Callable[..., Any] = getattr(owner, attribute)
        name = f"{getattr(owner, '__name__', owner).rsplit('.', 1)[-1]}.{attribute}"

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)


def notice(ledger: Ledger, at: Position) -> Plan:
    """What the coordinator's thread does before it stages."""
    with beside(lambda: True):
        plan = ledger.plan(at, None, newest=ledger.wait_newer(at, time.monotonic() + 5))
    assert plan is not None
    return plan


def follow(
    rank: RankSync, ledger: Ledger, trainer: Publisher, versions: int, fraction: float, clock: Clock, loop: Loop
) -> None:
    """Publish, notice and stage beside the loop, commit between two of its turns."""
    for seed in range(versions):
        change(trainer.weights, seed, fraction)
        at = Position(trainer.writer.head.version, trainer.writer.head.sha256)
        trainer.delta()
        with clock.span("notice"):
            noticed = aside(lambda at=at: notice(ledger, at))
            while not noticed.done():
                loop.turn()
        plan = noticed.result()
        manifest = plan.target
        for _ in range(20):
            loop.turn()
        with clock.span("stage"):
            rank.stage_begin(plan)
            while rank.stage_poll()["state"] == "staging":
                loop.turn()
        reply = rank.stage_poll()
        assert reply["state"] == "staged", reply
        with clock.span("commit"):
            rank.commit(manifest.version)
            loop.turn()
        rank.settle(manifest.version)
        for _ in range(20):
            loop.turn()


def audit(rank: RankSync, clock: Clock, loop: Loop) -> None:
    """Scan all live memory beside the loop."""
    with clock.span("audit"):
        rank.audit_begin()
        while rank.audit_poll()["state"] == "running":
            loop.turn()
    for _ in range(20):
        loop.turn()


def main() -> None:
    """Build, loop, stage, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--fraction", type=float, default=0.01)
    parser.add_argument("--objects", type=int, default=1, help="of a version; fetched and unpacked side by side")
    parser.add_argument("--switch", type=float, help="seconds until the interpreter goes to a thread that waits for it")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    shapes = tensors_of(SHAPES[args.shape])
    weights = {name: random.integers(0x3C00, 0x3D00, shape, np.uint16) for name, shape in shapes.items()}
    clock, loop = Clock(), Loop()
    clock.wrap(chain, "decode_against")
    clock.wrap(chain, "fold")
    clock.wrap(staged, "map_positions")
    clock.wrap(staged.StageBuilder, "_add_storage")
    clock.wrap(LiveStorage, "read")
    if HAS_TRITON:
        from vllm_delta_plugin import gpu_coded, gpu_decode, gpu_stage

        clock.wrap(commit, "unpack_if_alone")
        clock.wrap(gpu_decode, "together_to_device")
        clock.wrap(gpu_coded, "decode")
        clock.wrap(gpu_stage, "stage_coded_on_device")
        clock.wrap(gpu_stage, "stage_on_device")
        clock.wrap(gpu_stage.GpuStageBuilder, "finish")
    clock.wrap(stage, "fold_plan")
    clock.wrap(commit.Cuda, "prepare")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Dealt(folder, weights)
        trainer.ranks = args.objects
        trainer.origin()
        rank = RankSync(weight_map(weights), {"uri": folder}, rank=0, world_size=1)
        if args.switch:
            sys.setswitchinterval(args.switch)  # else the plugin's
        gc.collect()
        gc.freeze()  # as vLLM does, so that no collection looks through all that was imported
        for _ in range(200):
            loop.turn()
        quiet = [1e3 * (end - begin) for begin, end in loop.turns[100:]]
        ledger = Ledger(open_store(folder))
        ledger.head()
        follow(rank, ledger, trainer, args.versions, args.fraction, clock, loop)
        for _ in range(args.versions):
            audit(rank, clock, loop)
        exact = all(
            np.array_equal(rank.weights.storages[i].bits.cpu().numpy().view(np.uint16), bits.reshape(-1))
            for i, bits in enumerate(trainer.weights.values())
        )
    print(json.dumps(report(clock, loop, quiet, exact), indent=1), flush=True)


def report(clock: Clock, loop: Loop, quiet: list[float], exact: bool) -> dict[str, Any]:
    """Per timed piece: calls, its own milliseconds in all, and the longest loop turn that touched one of its calls."""
    pieces: dict[str, Any] = {}
    for name in dict.fromkeys(span[0] for span in clock.spans):
        spans = [(begin, end) for n, begin, end in clock.spans if n == name]
        worst = sorted(loop.longest(*span) for span in spans)
        pieces[name] = {
            "calls": len(spans),
            "total_ms": round(1e3 * sum(end - begin for begin, end in spans), 1),
            "turn_median_ms": round(statistics.median(worst), 2),
            "turn_max_ms": round(worst[-1], 2),
        }
    stages = [loop.longest(begin, end) for name, begin, end in clock.spans if name == "stage"]
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "bit_exact": exact,
        "switch_interval_ms": 1e3 * sys.getswitchinterval(),
        "quiet_turn_ms": {"median": round(statistics.median(quiet), 3), "max": round(max(quiet), 3)},
        "longest_turn_of_each_stage_ms": [round(value, 2) for value in stages],
        "pieces": pieces,
    }


if __name__ == "__main__":
    main()
