"""What a commit costs open streams on a GPU: ``vllm serve`` follows a run of random 1 % changes at a real model's size.

Usage: python benchmarks/gpu/commit_gap.py [--shape qwen3-0.6b] [--versions 20] [--streams 8]

The weights are random in the true shapes, the server is a stock one with CUDA graphs, and the numbers are a client's.
All versions are published before the server starts, and given to it one by one: no trainer works beside it.
*At commit*: of each stream the longest gap between two tokens that touches the commit or the 10 ms after it, of all
commits. *Control*: the same at moments 0.35 s after a version was served, when nothing happens but that the status is
asked 20 times a second, as while versions come. *While staging*: of all streams the longest gap from the manifest's
being there until the version is served. *Audit*: as control, all 20 ms while all of memory is scanned, and *between
audits*, for about as long (0.2 s at least) after each: streams may have grown by then, and with them steps. At the end
the live bits are read out of the server and digested, and must be the trainer's; greedy answers must be a fresh
engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers.machine import SERVE_ARGS  # noqa: E402
from helpers.server import VllmServer  # noqa: E402
from helpers.tiny_models import write_tokenizer  # noqa: E402
from prepared_run import PreparedRun  # noqa: E402
from streams import Recorded, Streams  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden": 256,
        "layers": 2,
        "intermediate": 512,
        "heads": 4,
        "kv": 2,
        "head_dim": 64,
        "vocab": 2048,
        "tied": True,
    },
    "qwen3-0.6b": {
        "hidden": 1024,
        "layers": 28,
        "intermediate": 3072,
        "heads": 16,
        "kv": 8,
        "head_dim": 128,
        "vocab": 151936,
        "tied": True,
    },
    "qwen3-8b": {
        "hidden": 4096,
        "layers": 36,
        "intermediate": 12288,
        "heads": 32,
        "kv": 8,
        "head_dim": 128,
        "vocab": 151936,
        "tied": False,
    },
}
CONTEXT, SEQUENCES = 4096, 64
PROMPTS = [[5, 6, 7, 8], [100, 200, 300], list(range(10, 60))]


def build(path: Path, shape: dict[str, Any]) -> PreTrainedModel:
    """Write a checkpoint of this shape with random weights, in one file, and a tokenizer of one word a token."""

    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="1TB")
    write_tokenizer(path, shape["vocab"])
    return model


def change(weights: dict[str, np.ndarray], seed: int, fraction: float) -> None:
    """One step up or down in a random share of every tensor's elements, as an optimizer's step does it."""
    random = np.random.default_rng(seed)
    for bits in weights.values():
        flat = bits.reshape(-1)
        at = random.integers(0, flat.size, max(1, int(flat.size * fraction)))
        flat[at] ^= 1


def gaps(recorders: list[Recorded], begin: float, end: float) -> list[float]:
    """Milliseconds between neighbouring tokens of the same stream, of all pairs that touch [begin, end]."""
    found = []
    for recorder in recorders:
        for all_times in recorder.times:
            first = max(0, bisect_left(all_times, begin) - 1)
            times = all_times[first : bisect_right(all_times, end) + 1]
            found += [1e3 * (b - a) for a, b in pairwise(times) if b >= begin and a <= end]
    return found


def main() -> None:
    """Build, serve, publish, measure, compare; one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=0.01)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and all times here")
    parser.add_argument("--no-fresh", action="store_true", help="leave out the fresh engine, a third of the time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, place: Path) -> None:
    """The whole measurement, in ``place``."""
    began = time.time()
    logs = args.logs or place
    logs.mkdir(parents=True, exist_ok=True)
    run = prepare(args, place, began)
    found, answers = serve(args, place, run, logs, began)
    print(json.dumps(found), flush=True)
    if args.no_fresh:
        return
    fresh = fresh_answers(args, place, run, logs)
    found |= {"greedy_equals_fresh_engine": answers == fresh, "seconds": round(time.time() - began, 1)}
    print(json.dumps(found), flush=True)


def prepare(args: argparse.Namespace, place: Path, began: float) -> PreparedRun:
    """Build the model, and publish all versions where no server looks."""
    model = build(place / "base", SHAPES[args.shape])
    say("publishing", began)
    run = PreparedRun(model, place / "made", place / "run")
    for _ in range(args.versions):
        run.prepare(args.fraction)
    run.close()
    return run


def options(shape: dict[str, Any]) -> tuple[str, ...]:
    """A server's, with room for as many whole contexts as it takes at once."""
    found = ("--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEQUENCES), *SERVE_ARGS)
    if not torch.cuda.is_available():
        return found
    token = 2 * 2 * shape["layers"] * shape["kv"] * shape["head_dim"]  # bytes: keys and values, bfloat16
    return (*found, "--kv-cache-memory-bytes", str(int(1.02 * token * CONTEXT * SEQUENCES)))


def serve(
    args: argparse.Namespace, place: Path, run: PreparedRun, logs: Path, began: float
) -> tuple[dict[str, Any], list[str]]:
    """Serve all versions under streams; what was measured, and the greedy answers at the end."""
    say("serving", began)
    follow = ("--delta-sync", str(place / "run"))
    with VllmServer(place / "base", logs / "live.log", follow, base=options(SHAPES[args.shape])) as server:
        run.give(0)
        server.wait_version(1, 120)
        say("streaming", began)
        with Streams(server.url, args.streams) as streams:
            time.sleep(5)
            quiet = (time.time() - 3, time.time())
            rows = [step(server, run, number) for number in range(1, args.versions + 1)]
            say("auditing", began)
            audits = [audit(server) for _ in range(5)]
            recorders = streams.stop()
        keep(logs / "times.npz", rows, audits, recorders)
        heard = [row for row in rows if gaps(recorders, row["begin"], row["end"])]
        if len(heard) < 0.9 * len(rows):  # else all streams were between two completions
            missed = f"{len(rows) - len(heard)} of {len(rows)} versions"
            raise SystemExit(f"no tokens came while {missed} did: {[r.interruptions for r in recorders]}")
        say("comparing", began)
        tensors = server.get("/delta_sync/tensors?scan=1", timeout=300)["tensors"]
        exact = {name: int(entry["digest"], 16) for name, entry in tensors.items()} == run.digests()
        answers = [server.complete(prompt, 32)["text"] for prompt in PROMPTS]
        status = server.status()
    found = {
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "shape": args.shape,
        "elements": run.elements,
        "changed": status["changed_elements_last"],
        "streams": args.streams,
        "versions": status["version"],
        "bit_exact": exact,
        "refusals": status["refusals"],
        **summary(heard, audits, recorders, quiet),
    }
    return found, answers


def fresh_answers(args: argparse.Namespace, place: Path, run: PreparedRun, logs: Path) -> list[str]:
    """Greedy answers of a fresh engine that loads the last weights."""
    final = run.save(place / "final", place / "base")
    with VllmServer(final, logs / "fresh.log", base=options(SHAPES[args.shape])) as fresh:
        return [fresh.complete(prompt, 32)["text"] for prompt in PROMPTS]


Span = tuple[float, float]
Audit = tuple[float, float, float]


def summary(rows: list[dict[str, Any]], audits: list[Audit], recorders: list[Recorded], quiet: Span) -> dict[str, Any]:
    """What the clients and the server saw, in milliseconds."""
    staging = [max(gaps(recorders, row["begin"], row["end"])) for row in rows]
    ordinary = gaps(recorders, *quiet)
    at_commit = [gap for row in rows for gap in longest(recorders, row["commit_begin"], row["commit_end"])]
    control = [gap for row in rows for gap in longest(recorders, row["end"] + 0.35, row["end"] + 0.35)]
    audited = [gap for begin, end, _ in audits for gap in sampled(recorders, begin, end)]
    between = [gap for _, end, after in audits for gap in sampled(recorders, end + 0.05, after - 0.05)]
    return {
        "gap_without_versions_ms": spread(ordinary),
        "gap_at_control_ms": spread(control),
        "gap_at_commit_ms": spread(at_commit),
        "gap_at_commit_over_control": ratios(at_commit, control),
        "gap_while_audited_ms": spread(audited),
        "gap_between_audits_ms": spread(between),
        "gap_while_audited_over_between": ratios(audited, between),
        "audit_ms": spread([1e3 * (end - begin) for begin, end, _ in audits]),
        "longest_gap_while_staging_ms": spread(staging),
        "commit_ms_first": round(rows[0]["commit_ms"], 3),
        "commit_ms": spread([row["commit_ms"] for row in rows]),
        "stage_ms": spread([1e3 * row["stage_seconds"] for row in rows]),
        "published_to_served_ms": spread([1e3 * (row["end"] - row["begin"]) for row in rows]),
        "tokens": sum(len(times) for r in recorders for times in r.times),
        "interruptions": [why for r in recorders for why in r.interruptions],
    }


def keep(path: Path, rows: list[dict[str, Any]], audits: list[Audit], recorders: list[Recorded]) -> None:
    """Write what the summary is made of: unix times of each completion's tokens, of versions and of audits."""
    tokens = {f"{i}.{j}": np.array(times) for i, r in enumerate(recorders) for j, times in enumerate(r.times)}
    np.savez_compressed(path, rows=json.dumps(rows), audits=np.array(audits), **tokens)


def longest(recorders: list[Recorded], begin: float, end: float) -> list[float]:
    """Of each stream the longest gap, in milliseconds, that touches [begin, end + 10 ms]."""
    found = [gaps([recorder], begin, end + 0.01) for recorder in recorders]
    return [max(of_stream) for of_stream in found if of_stream]


def sampled(recorders: list[Recorded], begin: float, end: float) -> list[float]:
    """``longest`` all 20 ms from begin to end."""
    return [gap for at in np.arange(begin, end, 0.02) for gap in longest(recorders, at, at)]


def audit(server: VllmServer) -> Audit:
    """When a full scan of live memory began and ended, and until when nothing happened after it."""
    begin = time.time()
    server.get("/delta_sync/tensors?scan=1", timeout=300)
    end = time.time()
    time.sleep(max(0.3, end - begin))
    return begin, end, time.time()


def step(server: VllmServer, run: PreparedRun, number: int) -> dict[str, Any]:
    """Give a version, wait until served; when the manifest was there and when the version was seen, and the costs."""
    begin = time.time()
    run.give(number)
    status = server.wait_version(number + 1, 60)
    end = time.time()
    server.wait_status("half a second", lambda _: time.time() > end + 0.5)  # asks as often as before, for the control
    return {
        "begin": begin,
        "end": end,
        "commit_ms": status["commit_ms_last"],
        "commit_begin": status["committed_at_last"] - status["commit_ms_last"] / 1e3,
        "commit_end": status["committed_at_last"],
        "stage_seconds": status["stage_seconds_last"],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest, rounded."""
    median, p99 = np.percentile(values, [50, 99])
    return {"median": round(float(median), 3), "p99": round(float(p99), 3), "max": round(max(values), 3)}


def ratios(some: list[float], others: list[float]) -> dict[str, float]:
    """Of the medians and of the 99th percentiles."""
    return {name: round(spread(some)[name] / spread(others)[name], 3) for name in ("median", "p99")}


def say(what: str, began: float) -> None:
    """Progress, on stderr."""
    print(f"{time.time() - began:6.1f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
