"""Fifty commits under load on two cards, in every way that splits a model: bits, answers and streams must come through.

Usage: python benchmarks/gpu/two_cards.py [--layout moe-tp2 …] [--versions 50] [--streams 16] [--at-once 1]

Each layout is a stock ``vllm serve`` of a random model, followed while streams decode. At the end the live bits are
read out of every rank and digested, and must be the trainer's; greedy answers must be those of fresh servers with the
same layout that load the trainer's last weights (and follow a run that is empty, as kernels on a CPU depend on that).
There are two of those, side by side, to tell whether answers depend on weights alone, and each server is asked twice.
One JSON object a layout; exits with 1 if anything differed. Layouts that run at once share the cards and the host, so
that their times say little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

import torch  # noqa: E402
from commit_gap import PROMPTS, change, say  # noqa: E402
from helpers.machine import SERVE_ARGS  # noqa: E402
from helpers.publish import Publisher  # noqa: E402
from helpers.server import VllmServer  # noqa: E402
from helpers.tiny_models import COMMON, write_tokenizer  # noqa: E402
from streams import Streams  # noqa: E402
from token_gaps import spread  # noqa: E402

TP2, PP2, DP2 = ("-tp", "2"), ("-pp", "2"), ("--data-parallel-size", "2")
EP = "--enable-expert-parallel"
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense-tp2": ("llama", TP2),
    "dense-pp2": ("llama", PP2),
    "moe-tp2": ("qwen3_moe", TP2),
    "moe-ep2": ("qwen3_moe", (*TP2, EP)),
    "moe-pp2": ("qwen3_moe", PP2),
    "moe-pp2-eager": ("qwen3_moe", (*PP2, "--enforce-eager")),  # no kernels that are compiled, and chosen by timing
    "dense-dp2": ("llama", DP2),
    "moe-dp2": ("qwen3_moe", DP2),
    "moe-dp2-ep": ("qwen3_moe", (*DP2, EP)),
    "fp8-tp2": ("llama", (*TP2, "--quantization", "fp8")),
}
SIZE = COMMON | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}


def build(path: Path, architecture: str) -> Path:
    """A checkpoint of about 50 (llama) or 110 (qwen3_moe) million random parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    config = {
        "llama": lambda: LlamaConfig(**SIZE, head_dim=64, tie_word_embeddings=False),
        "qwen3_moe": lambda: Qwen3MoeConfig(**SIZE, head_dim=64, tie_word_embeddings=False, **experts),
    }[architecture]()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    return path


def measure(layout: str, args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Serve, publish, compare one layout."""
    architecture, parallel = LAYOUTS[layout]
    began = time.time()
    base = build(place / "base", architecture)
    trainer = Publisher.of_checkpoint(str(place / "run"), base)
    options = ("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", *SERVE_ARGS, *parallel)
    options = (*options, "--kv-cache-memory-bytes", str(4 << 30))  # profiling bears no neighbours
    logs = args.logs or place
    logs.mkdir(parents=True, exist_ok=True)
    with VllmServer(base, logs / f"{layout}.log", ("--delta-sync", str(place / "run")), base=options) as server:
        trainer.origin()
        server.wait_version(1, 120)
        say(f"{layout}: streaming", began)
        served, commits = [], []
        with Streams(server.url, args.streams) as streams:
            for seed in range(args.versions):
                change(trainer.weights, seed, 0.01)
                manifest = trainer.delta()
                begin = time.time()
                status = server.wait_version(manifest.version, 60)
                served.append(1e3 * (time.time() - begin))
                commits.append(status["commit_ms_last"])
            recorders = streams.stop()
        tensors = server.get("/delta_sync/tensors?scan=1", timeout=300)["tensors"]
        live = {name: int(entry["digest"], 16) for name, entry in tensors.items()}
        answers = greedy(server)
        status = server.status()
    final = trainer.save(place / "final", base)

    def fresh_answers(name: str) -> list[list[str]]:
        with VllmServer(final, logs / f"{layout}-{name}.log", ("--delta-sync", str(place / name)), base=options) as one:
            return greedy(one)

    with ThreadPoolExecutor(2) as both:
        fresh, second = both.map(fresh_answers, ("fresh", "second"))
    same = answers == fresh == second and all(one == again for one, again in answers)
    return {
        "layout": layout,
        "card": f"2 x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none",
        "versions": status["version"],
        "engines": len(status.get("engines", [status])),
        "bit_exact": live == {name: state.digest for name, state in trainer.states().items()},
        "greedy_equals_fresh_server": answers == fresh,
        "fresh_servers_agree": fresh == second,
        "answers": "the same" if same else {"live": answers, "fresh": fresh, "second": second},
        "interruptions": [why for r in recorders for why in r.interruptions],
        "tokens_while_committing": sum(len(times) for r in recorders for times in r.times),
        "refusals": status["refusals"],
        "rollbacks": status["rollbacks"],
        "commit_ms": spread(commits),
        "published_to_served_ms": spread(served),
        "seconds": round(time.time() - began, 1),
    }


def greedy(server: VllmServer) -> list[list[str]]:
    """Two answers to each prompt."""
    return [[server.complete(prompt, 32)["text"] for _ in range(2)] for prompt in PROMPTS]


def main() -> int:
    """All layouts asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=1, help="how many layouts to run side by side")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    args = parser.parse_args()
    failed = 0
    with ProcessPoolExecutor(args.at_once, multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(partial(tried, args=args), args.layout or LAYOUTS):
            print(json.dumps(found), flush=True)
            fine = found.get("bit_exact") and found["answers"] == "the same" and not found["interruptions"]
            failed += not fine
    return min(failed, 1)


def tried(layout: str, args: argparse.Namespace) -> dict[str, Any]:
    """What was measured of one layout, or why nothing was."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return measure(layout, args, Path(folder))
        except Exception as error:  # noqa: BLE001  the other layouts still say something
            return {"layout": layout, "error": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    sys.exit(main())
