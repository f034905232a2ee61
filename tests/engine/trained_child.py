"""A trainer's process: ``trained_child.py CHECKPOINT URI SIGNING_KEY`` trains two steps and publishes them."""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from trl_callback import DeltaSyncCallback


def main(checkpoint: str, uri: str, key: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [{"input_ids": torch.arange(5, 13), "labels": torch.arange(5, 13)}] * 8
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
            use_cpu=True, bf16=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        sync = DeltaSyncCallback(uri, signing_key=key)
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[sync]).train()
        sync.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
