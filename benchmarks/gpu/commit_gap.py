"""What a commit costs open streams on a GPU: ``vllm serve`` follows a run of random 1 % changes at a real model's size.

Usage: python benchmarks/gpu/commit_gap.py [--shape qwen3-0.6b] [--versions 20] [--streams 8]

The weights are random in the true shapes, the server is a stock one with CUDA graphs, and the numbers are a client's;
token_gaps.py says what each is, and makes them again of a kept ``times.npz``. All versions are published before streams
begin, and given to the server one by one: no trainer works beside it. At control moments the status is asked 20 times a
second, as while versions come. At the end the live bits are read out of the server and digested, and must be the
trainer's; greedy answers must be a fresh engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
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
from streams import Streams  # noqa: E402
from token_gaps import CONTROL, Audit, Tokens, keep, summary  # noqa: E402
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
    "deep": {  # many tensors, and small ones
        "hidden": 64,
        "layers": 34,
        "intermediate": 128,
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
    say("building", began)
    run = PreparedRun(build(place / "base", SHAPES[args.shape]), place / "made", place / "run")
    server = VllmServer(
        place / "base", logs / "live.log", ("--delta-sync", str(place / "run")), base=options(SHAPES[args.shape])
    )
    server.start()
    try:
        found, answers = serve(args, server, run, logs, began)
    finally:
        server.stop()
    print(json.dumps(found), flush=True)
    if args.no_fresh:
        return
    fresh = fresh_answers(args, place, run, logs)
    found |= {"greedy_equals_fresh_engine": answers == fresh, "seconds": round(time.time() - began, 1)}
    print(json.dumps(found), flush=True)


def options(shape: dict[str, Any]) -> tuple[str, ...]:
    """A server's, with room for as many whole contexts as it takes at once."""
    found = ("--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEQUENCES), *SERVE_ARGS)
    if not torch.cuda.is_available():
        return found
    token = 2 * 2 * shape["layers"] * shape["kv"] * shape["head_dim"]  # bytes: keys and values, bfloat16
    return (*found, "--kv-cache-memory-bytes", str(int(1.02 * token * CONTEXT * SEQUENCES)))


def serve(
    args: argparse.Namespace, server: VllmServer, run: PreparedRun, logs: Path, began: float
) -> tuple[dict[str, Any], list[str]]:
    """Publish, then serve all versions under streams; what was measured, and the greedy answers at the end."""
    say("publishing while the server starts", began)
    for _ in range(args.versions):
        run.prepare(args.fraction)
    run.close()
    say("waiting for the server", began)
    server.wait_healthy()
    run.give(0)
    server.wait_version(1, 120)
    say("streaming", began)
    with Streams(server.url, args.streams) as streams:
        time.sleep(5)
        rows = [step(server, run, number) for number in range(1, args.versions + 1)]
        say("auditing", began)
        audits = [audit(server) for _ in range(20)]
        recorders = streams.stop()
    times, interruptions = [r.times for r in recorders], [why for r in recorders for why in r.interruptions]
    keep(logs / "times.npz", rows, audits, times)
    tokens = Tokens(times)
    silent = sum(not tokens.comes(row["begin"], row["end"]) for row in rows)
    if silent:
        raise SystemExit(f"no tokens came while {silent} of {len(rows)} versions did: {interruptions}")
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
        **summary(tokens, rows, audits),
        "tokens": sum(len(completion) for stream in times for completion in stream),
        "interruptions": interruptions,
    }
    return found, answers


def fresh_answers(args: argparse.Namespace, place: Path, run: PreparedRun, logs: Path) -> list[str]:
    """Greedy answers of a fresh engine that loads the last weights."""
    final = run.save(place / "final", place / "base")
    with VllmServer(final, logs / "fresh.log", base=options(SHAPES[args.shape])) as fresh:
        return [fresh.complete(prompt, 32)["text"] for prompt in PROMPTS]


def audit(server: VllmServer) -> Audit:
    """When a full scan of live memory began and ended, was answered, and until when nothing happened after it."""
    server.get("/delta_sync/tensors?scan=1", timeout=300)
    answered, scan = time.time(), server.status()["audit"]
    begin, end = scan["began_at_last"], scan["ended_at_last"]
    time.sleep(0.3 + end - begin)
    return begin, end, answered, time.time()


def step(server: VllmServer, run: PreparedRun, number: int) -> dict[str, Any]:
    """Give a version, wait until served; when the manifest was there and when the version was seen, and the costs."""
    begin = time.time()
    run.give(number)
    status = server.wait_version(number + 1, 60)
    end = time.time()
    over = end + CONTROL + 0.25
    server.wait_status("the control moment to be over", lambda _: time.time() > over)  # asks as often as before
    return {
        "begin": begin,
        "end": end,
        "commit_ms": status["commit_ms_last"],
        "commit_begin": status["committed_at_last"] - status["commit_ms_last"] / 1e3,
        "commit_end": status["committed_at_last"],
        "stage_seconds": status["stage_seconds_last"],
    }


def say(what: str, began: float) -> None:
    """Progress, on stderr."""
    print(f"{time.time() - began:6.1f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
