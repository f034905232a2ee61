"""An anchor is an ordinary checkpoint: transformers loads model and tokenizer from its folder, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trl_callback import DeltaSyncCallback


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen3_moe, tiny.mixtral])
def test_transformers_starts_from_an_anchor(tmp_path: Path, build: Any) -> None:
    uri = tmp_path / "bucket"
    model = build()
    start = tiny.cast_state(model)
    sync = DeltaSyncCallback(str(uri), anchor_every=0)
    trainer = grpo.plain_trainer(tmp_path, model=model, callbacks=[sync], steps=1, bf16=True)
    trainer.processing_class = trainer.callback_handler.processing_class = tiny.tokenizer()
    trainer.train()
    sync.close()
    (folder,) = (path for path in (uri / "anchors").iterdir() if path.is_dir())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16 and AutoConfig.from_pretrained(folder).architectures == [type(model).__name__]
    assert bucket.cast_bytes(tiny.cast_state(loaded)) == bucket.cast_bytes(start)
    assert AutoTokenizer.from_pretrained(folder)("w5 w6")["input_ids"] == [5, 6]
