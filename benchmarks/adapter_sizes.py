"""Bytes of a version of LoRA training, as the adapter or as a delta of merged weights, of the very same steps.

Usage: python benchmarks/adapter_sizes.py [--ranks 4 16 64] [--rates 1e-5 1e-4 1e-3] [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import platform
from statistics import fmean
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from delta_sync import DEFAULT_CODEC, DeltaHeader, encode_delta
from delta_sync.adapter import encode_adapter
from trl_callback.adapter_image import AdapterImage, adapter_sizes
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Snapshot

HIDDEN, LAYERS, VOCAB = 256, 2, 512
HEADER = DeltaHeader("sizes", 2, 1, DEFAULT_CODEC)


def adapted(rank: int) -> Any:
    """A tiny Llama, all of whose linear layers have an adapter."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_attention_heads=8,
                         num_hidden_layers=LAYERS, tie_word_embeddings=True)  # fmt: skip
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(LlamaForCausalLM(config), settings)


def measured(rank: int, rate: float, steps: int) -> dict[str, float]:
    """Mean bytes of the last half of ``steps`` optimizer steps, either way."""
    model = adapted(rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    merged_image, image = ServingImage(model, lambda name: "BF16"), AdapterImage(model, "BF16")
    snapshot = Snapshot(merged_image)
    small, weights = adapter_sizes(model)
    rows = []
    for _ in range(steps):
        tokens = torch.randint(4, VOCAB, (4, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        deltas = snapshot.diff(merged_image)
        snapshot.apply(deltas, snapshot.advanced(deltas))
        whole = encode_adapter("sizes", 2, image.config, Snapshot(image))
        changed = sum(delta.changed for delta in deltas.values())
        rows.append((len(encode_delta(HEADER, list(deltas.values()))), len(whole), changed / weights))
    merged, adapter, share = (fmean(column) for column in zip(*rows[steps // 2 :], strict=True))
    return {"rank": rank, "rate": rate, "adapter_share": small / weights, "changed": share,
            "adapter_bytes": adapter, "merged_bytes": merged}  # fmt: skip


def main() -> None:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    rows = [measured(rank, rate, args.steps) for rank in args.ranks for rate in args.rates]
    print("| rank | learning rate | adapter, kB | merged delta, kB | adapted weights changed | smaller |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        smaller = "adapter" if row["adapter_bytes"] < row["merged_bytes"] else "merged"
        kilobytes = f"{row['adapter_bytes'] / 1e3:.1f} | {row['merged_bytes'] / 1e3:.1f}"
        print(f"| {row['rank']} | {row['rate']:g} | {kilobytes} | {row['changed']:.2%} | {smaller} |")
    print(json.dumps({"machine": platform.processor() or platform.machine(), "steps": args.steps, "rows": rows}))


if __name__ == "__main__":
    main()
