"""Five hundred GRPO steps of a tiny model, in windows: memory, files, threads, snapshots and latency must stay flat.

    python benchmarks/flat_run.py [--steps 500] [--windows 5] [--latency-factor 2]

A real GRPOTrainer with DeltaSyncCallback publishes to a folder, with complete weights every 50 versions of which two
are kept, and waits at each step for a replica in this process (the tests' stand-in, which follows the bucket bit for
bit). The first window warms up. Fails where the last window has more open files, threads or snapshots than any before
it, or, beside the second, 2 % and 4 MB more anonymous memory, or publishes or waits `--latency-factor` times as long.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/trainer"), str(ROOT / "benchmarks")]

if __name__ == "__main__":
    import no_vllm  # noqa: F401
import bucket  # noqa: E402
import grpo  # noqa: E402
import tiny  # noqa: E402
from sharded_memory import anonymous, tidy  # noqa: E402
from stand_in_replica import StandInReplica  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from wire_layouts import machine  # noqa: E402

from trl_callback import DeltaSyncCallback  # noqa: E402
from trl_callback.past import Past  # noqa: E402
from trl_callback.snapshot import Snapshot  # noqa: E402

COUNTS = ("files", "threads", "snapshots")
LATENCIES = ("publish_ms", "wait_ms")


class Look(TrainerCallback):
    """At the end of every window: what is held, and the medians of the window's own steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[dict[str, float]] = []
        self._publish: list[float] = []
        self._wait: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Comes after DeltaSyncCallback's, which adds its numbers."""
        for name, seen in (("publish", self._publish), ("wait", self._wait)):
            if logs and f"delta_sync/{name}_seconds" in logs:
                seen.append(1e3 * logs[f"delta_sync/{name}_seconds"])
        if logs and "loss" in logs and state.global_step % self.every == 0:
            state.log_history.clear()  # the trainer's own, which grows
            tidy()
            medians = {"publish_ms": statistics.median(self._publish), "wait_ms": statistics.median(self._wait)}
            self.rows.append({"step": state.global_step, "memory_mb": anonymous() / 1e6, **held(), **medians})
            self._publish, self._wait = [], []


def held() -> dict[str, float]:
    """Open files, threads (those of requests to the replica aside, which come and go), snapshots of weights."""
    kinds = [type(thing) for thing in gc.get_objects()]
    threads = [thread for thread in threading.enumerate() if "process_request" not in thread.name]
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(threads),
        "snapshots": sum(issubclass(kind, Snapshot) or kind is Past for kind in kinds),
    }


def verdict(rows: Sequence[dict[str, float]], latency_factor: float) -> list[str]:
    """What grew, as sentences; none if all is flat. Threads and sockets of requests come and go between windows."""
    first, last = rows[1], rows[-1]
    most = {what: max(row[what] for row in rows[:-1]) for what in COUNTS}
    grew = [f"{what}: {most[what]:g} to {last[what]:g}" for what in COUNTS if last[what] > most[what]]
    if last["memory_mb"] > 1.02 * first["memory_mb"] + 4:
        grew.append(f"memory: {first['memory_mb']:.1f} to {last['memory_mb']:.1f} MB")
    grew += [f"{what}: {first[what]:.1f} to {last[what]:.1f}" for what in LATENCIES
             if last[what] > latency_factor * max(first[what], 1.0)]  # fmt: skip
    return grew


def run(steps: int, windows: int, folder: Path) -> list[dict[str, float]]:
    """Train; the rows, once the bucket's newest version is proven what was trained."""
    model = tiny.llama()
    look = Look(steps // windows)
    sync = DeltaSyncCallback(f"{folder}/run", anchor_every=50, anchor_chain_ratio=0.0, keep_anchors=2, keep_grace=1.0)
    with StandInReplica(f"{folder}/run", model).running() as replica:
        trainer = grpo.grpo_trainer(
            folder, model=model, url=replica.url, use_vllm=True, callbacks=[sync, look], max_steps=steps,
            learning_rate=1e-4, num_train_epochs=10**6,
        )  # fmt: skip
        trainer.train()
        sync.sync()
        live = {name: bits.tobytes() for name, bits in replica.live.items()}
    sync.close()
    trained = bucket.cast_bytes(tiny.cast_state(trainer.model))
    if not live == bucket.materialise(f"{folder}/run") == trained:
        raise SystemExit("what is served, or in the bucket, is not what was trained")
    return look.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--latency-factor", type=float, default=2.0)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="flat-run-") as folder:
        rows = run(options.steps, options.windows, Path(folder))
    print("\n| step | anonymous memory, MB | open files | threads | snapshots | publish, ms | wait, ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = [f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in row]
        print("| " + " | ".join(numbers) + " |")
    loads = {"load_before": load, "load_after": os.getloadavg()[0]}
    print(json.dumps({**vars(options), **machine(), **loads, "rows": rows}))
    if grew := verdict(rows, options.latency_factor):
        raise SystemExit("not flat: " + "; ".join(grew))


if __name__ == "__main__":
    main()
