"""From publish to readable over a Hub bucket: ours beside plain huggingface_hub, the same bytes, taken in turns.

Without ``--bucket`` it starts the tests' own Hub in another process; with it, it uses the real one (HF_TOKEN).
Usage: python benchmarks/hub_latency.py [--bytes 1000000] [--rounds 20] [--bucket ORG/NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bucket", help="a bucket of the real Hub that the token in HF_TOKEN may write to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_XET_CACHE": f"{home}/xet",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        with a_hub(args.bucket) as bucket:
            report(measure(bucket, args.bytes, args.rounds, Path(home)), args)


@contextlib.contextmanager
def a_hub(bucket: str | None) -> Iterator[str]:
    """The id of a bucket on the Hub that HF_ENDPOINT names by then."""
    if bucket is not None:
        yield bucket
        return
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    command = [sys.executable, "-m", "helpers.hub", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ |= dict(word.split("=", 1) for word in server.stdout.readline().split()[1:])
            from huggingface_hub import create_bucket

            create_bucket("bench/latency")
            yield "bench/latency"
        finally:
            server.kill()


def measure(bucket: str, size: int, rounds: int, home: Path) -> dict[str, list[float]]:
    """Seconds of each round, by way. One round of each is left out: it opens connections."""
    ways: dict[str, Callable[[bytes], float]] = {
        "plain batch_bucket_files + download_bucket_files": plain(bucket, home),
        "ours: one object, put + get": one_object(bucket),
        "ours: one version, commit + feed + verified read": one_version(bucket),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            seconds = way(os.urandom(size))
            if number:
                times[name].append(seconds)
    return times


def plain(bucket: str, home: Path) -> Callable[[bytes], float]:
    from huggingface_hub import HfApi

    api = HfApi()

    def way(data: bytes) -> float:
        key, target = f"plain/{uuid.uuid4().hex}", home / "got"
        start = time.perf_counter()
        api.batch_bucket_files(bucket, add=[(data, key)])
        api.download_bucket_files(bucket, [(key, str(target))], raise_on_missing_files=True)
        seconds = time.perf_counter() - start
        assert target.read_bytes() == data
        return seconds

    return way


def one_object(bucket: str) -> Callable[[bytes], float]:
    from delta_sync.store import open_store

    trainer, replica = (open_store(f"hf://buckets/{bucket}/object") for _ in range(2))

    def way(data: bytes) -> float:
        key = uuid.uuid4().hex
        start = time.perf_counter()
        trainer.put(key, data)
        got = replica.get(key, max_bytes=len(data))
        seconds = time.perf_counter() - start
        assert got == data
        return seconds

    return way


def one_version(bucket: str) -> Callable[[bytes], float]:
    """A commit with its fences, and a replica that learns of it and checks its hash: what a training step waits for."""
    from delta_sync import TensorState, model_fingerprint, state_digest
    from delta_sync.ledger import Ledger
    from delta_sync.plan import Position
    from delta_sync.store import open_store
    from delta_sync.writer import Writer

    uri = f"hf://buckets/{bucket}/{uuid.uuid4().hex}"
    writer = Writer.open(Ledger(open_store(uri)))
    store = open_store(uri)
    store.follow()
    reader = Ledger(store)
    state = {"weight": TensorState("BF16", (1,), 0)}

    def commit(data: list[bytes]) -> None:
        same = state if not data else {}
        writer.commit(
            "delta" if data else "origin", (0, 0), same, state_digest(state), model_fingerprint(state), data,
            changed=0, total=1, codec="none" if data else None, prompt_cache="all",
        )  # fmt: skip

    commit([])

    def way(data: bytes) -> float:
        before = writer.head
        position = Position(before.version, before.sha256)
        got: list[bytes] = []

        def read() -> None:
            head = reader.wait_newer(position, time.monotonic() + SECONDS, poll_seconds=0.005)
            got.extend(reader.read_object(ref) for ref in head.objects)

        replica = threading.Thread(target=read)
        replica.start()
        start = time.perf_counter()
        commit([data])
        replica.join(SECONDS)
        seconds = time.perf_counter() - start
        assert got == [data]
        return seconds

    return way


def report(times: dict[str, list[float]], args: argparse.Namespace) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    where = args.bucket or "the tests' Hub on this machine: no distance, no TLS"
    print(f"{args.bytes} random bytes, {args.rounds} rounds in turns, {where} ({machine})\n")
    print(f"{'way':<52}{'median ms':>10}{'best':>8}{'worst':>8}")
    rows = {}
    for name, seconds in times.items():
        middle, best, worst = (1000 * of(seconds) for of in (statistics.median, min, max))
        print(f"{name:<52}{middle:>10.1f}{best:>8.1f}{worst:>8.1f}")
        rows[name] = {"median_ms": round(middle, 2), "best_ms": round(best, 2), "worst_ms": round(worst, 2)}
    print(json.dumps({"bytes": args.bytes, "rounds": args.rounds, "machine": machine, "ways": rows}))


if __name__ == "__main__":
    main()
