"""What keeping CPU weights plain costs: tokens per second of vLLM with and without this plugin's CPU seams.

    python benchmarks/cpu_plain_weights.py [--model FOLDER] [--dtype bfloat16] [--repeats 3]

Without --model a random model of SmolLM2-135M's shape is made; speed does not depend on the values.
Each way runs in its own process. Decoding is timed from the moment at which every stream has its first token, so that
no prompt is in it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXTENSION = "vllm_delta_plugin.worker_extension.DeltaSyncWorkerExtension"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PROMPT, NEW = 256, 64


def main() -> None:
    """Measure both ways and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=("packed", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.model, args.dtype, args.way, args.repeats)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make(Path(scratch) / "model")
        ways = {way: child(model, args.dtype, way, args.repeats) for way in ("packed", "plain")}
    ratio = {k: round(ways["plain"][k] / ways["packed"][k], 3) for k in ways["packed"]}
    print(json.dumps({"tokens_per_second": ways, "plain_over_packed": ratio}, indent=1))


def make(folder: Path) -> Path:
    """A random checkpoint of SmolLM2-135M's shape."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def child(model: Path, dtype: str, way: str, repeats: int) -> dict[str, float]:
    """Measure one way in a process of its own."""
    options = ["--model", str(model), "--dtype", dtype, "--way", way, "--repeats", str(repeats)]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure(model: Path, dtype: str, way: str, repeats: int) -> dict[str, float]:
    """Median tokens per second: prompts read, and tokens decoded by 1 and by 8 streams."""
    from vllm import LLM

    from vllm_delta_plugin.compat import kernel_scan

    kernel_scan.install()
    extra = {"worker_extension_cls": EXTENSION} if way == "plain" else {}
    llm = LLM(
        str(model),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **extra,
    )
    speeds(llm.llm_engine)  # in vain: what is made at first use
    runs = [speeds(llm.llm_engine) for _ in range(repeats)]
    return {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}


def speeds(engine: Any) -> dict[str, float]:
    """Of one run each with 1 and with 8 streams."""
    (_, alone), (prefill, together) = (speed(engine, streams, NEW) for streams in (1, 8))
    return {"prefill": prefill, "decode_1_stream": alone, "decode_8_streams": together}


def speed(engine: Any, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of greedy requests: of the prompts, and of what is decoded once all have their first token."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    for stream in range(streams):
        ids = [(7 * i + stream) % 40000 + 5 for i in range(PROMPT)]
        engine.add_request(str(stream), {"prompt_token_ids": ids}, sampling)
    made: dict[str, int] = {}
    started = time.perf_counter()
    while len(made) < streams:
        step(engine, made)
    read, before = time.perf_counter(), sum(made.values())
    while engine.has_unfinished_requests():
        step(engine, made)
    return PROMPT * streams / (read - started), (sum(made.values()) - before) / (time.perf_counter() - read)


def step(engine: Any, made: dict[str, int]) -> None:
    """One forward pass; ``made``: how many tokens each request has by then."""
    for output in engine.step():
        made[output.request_id] = len(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
