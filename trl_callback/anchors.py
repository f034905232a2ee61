"""Complete weights of the newest version, as a checkpoint folder that ``vllm serve`` could start from."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trl_callback.extract import TORCH_DTYPES
from trl_callback.serving_image import own_class
from trl_callback.supported import unwrap


def sidecar_files(model: nn.Module, processing_class: Any, dtype_name: str) -> dict[str, bytes]:
    """File name -> bytes of the model's config and generation config, and of the tokenizer or processor."""
    with tempfile.TemporaryDirectory(prefix="delta-sync-") as folder:
        plain = unwrap(model)
        if isinstance(plain, PreTrainedModel):
            config = copy.deepcopy(plain.config)
            config.dtype = TORCH_DTYPES[dtype_name]
            config.architectures = [own_class(plain).__name__]
            config.save_pretrained(folder)
            if plain.can_generate() and plain.generation_config is not None:
                plain.generation_config.save_pretrained(folder)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        return _read_files(Path(folder))


def _read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
